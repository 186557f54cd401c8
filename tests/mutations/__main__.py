"""Try mutations: ``python -m tests.mutations [NAME ...]``; all of them without names.

The last line is one JSON object. The exit code is 0 if all were killed, and 1 if one survived. It is 2 if the
table does not fit the tree, or if the tests fail or cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from tests.mutations.places import ROOT, complaints, files_with_tests, place_of, texts
from tests.mutations.table import MUTATIONS, Mutation

Outcome = Literal["killed", "survived", "broken"]
_LONGEST_S = 900.0
_OUTCOMES: dict[int, Outcome] = {0: "survived", 1: "killed"}  # by the exit code of pytest


class Trial(NamedTuple):
    """Result of one mutation."""

    name: str
    outcome: Outcome
    seconds: float
    output: str  # the last lines of the tests


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutations to try; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time")
    parser.add_argument("--list", action="store_true", help="name all mutations and where they are")
    parser.add_argument("--trust-tests", action="store_true", help="do not run the tests unchanged first")
    given = parser.parse_args(arguments)
    unknown = {*given.names} - {mutation.name for mutation in MUTATIONS}
    problems = [*complaints(MUTATIONS), *(f"{name}: no mutation is called so" for name in sorted(unknown))]
    if problems:
        print("\n".join(problems))
        return 2
    chosen = [mutation for mutation in MUTATIONS if not given.names or mutation.name in given.names]
    if given.list:
        modules = texts()
        print("\n".join(f"{mutation.name:40}{place_of(mutation, modules)}" for mutation in chosen))
        return 0
    if not given.trust_tests and not _passes_unchanged(chosen):
        return 2
    return _report(_tried(chosen, given.jobs))


def _tried(chosen: Sequence[Mutation], jobs: int) -> Iterable[Trial]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(_try, chosen)


def _report(trials: Iterable[Trial]) -> int:
    counts = dict.fromkeys(("killed", "survived", "broken"), 0)
    named: dict[str, list[str]] = {"survived": [], "broken": []}
    began = time.monotonic()
    for trial in trials:
        print(f"{trial.outcome:9} {trial.seconds:6.1f} s  {trial.name}", flush=True)
        counts[trial.outcome] += 1
        if trial.outcome != "killed":
            named[trial.outcome].append(trial.name)
            print(trial.output, flush=True)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"tried": sum(counts.values()), **counts, "names": named, "seconds": seconds}))
    if counts["broken"]:
        return 2
    return 1 if counts["survived"] else 0


def _passes_unchanged(chosen: Sequence[Mutation]) -> bool:
    """A test that fails anyway would kill every mutation."""
    files = sorted({file for mutation in chosen for file in files_with_tests(mutation)})
    print(f"{len(files)} test files without a mutation ...", flush=True)
    done = _run_tests(ROOT, files)
    if done.returncode:
        print(f"{done.stdout}\nTests fail without a mutation, so that no mutation can be judged.")
    return not done.returncode


def _try(mutation: Mutation) -> Trial:
    """Tests start processes with the source beside them, so that all of the tree is copied."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="by-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*"))
        file = copy / "src" / place_of(mutation, texts())
        file.write_text(file.read_text("utf-8").replace(mutation.original, mutation.mutated), "utf-8")
        done = _run_tests(
            copy,
            [copy / test_file.relative_to(ROOT) for test_file in files_with_tests(mutation)],
            mutation.only,
        )
    outcome = _OUTCOMES.get(done.returncode, "broken")
    return Trial(mutation.name, outcome, time.monotonic() - began, "\n".join(done.stdout.splitlines()[-20:]))


def _run_tests(root: Path, files: Sequence[Path], only: str = "") -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"),
        *(f"--rootdir={root}", "--hypothesis-profile=steady"),
        *(("-k", only) if only else ()),
        *map(str, files),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    try:
        return subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONGEST_S,
        )
    except subprocess.TimeoutExpired as error:
        message = f"the tests took more than {error.timeout:.0f} s"
        return subprocess.CompletedProcess(command, -1, message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
