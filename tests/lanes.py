"""The lanes of the checks: each is a pytest with a hard limit, and all are judged together at the end.

``python -m tests.lanes run --name N --limit S --into FOLDER -- WORDS`` runs pytest with these words. When the
limit is reached, every process of the lane prints its stacks and is ended.

``python -m tests.lanes judge --into FOLDER --lane N`` reads what the lanes left. A failed test that waits for
machines or clocks is run once more, alone. The last line is "N passed, N failed". See docs/decisions/0046.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

MOST_RERUNS = 3
RERUN_LIMIT_S = 900.0
_STACKS_S = 10.0  # for the stacks to be printed
_STACK_S = 0.5  # for those of one worker
_MOST_WORKERS = 16
_RERUN_KINDS = ("AssertionError", "TimeoutError", "pytest.fail")


def run_lane(name: str, limit_s: float, into: Path, words: list[str]) -> int:
    """Run pytest and write its record; return its exit code, or 124 if it reached the limit."""
    into.mkdir(parents=True, exist_ok=True)
    record = into / f"{name}.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.recorder", "--record", str(record), *words]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(
            f"== {name}: the limit of {limit_s:g} s is reached; all stacks follow",
            file=sys.stderr,
            flush=True,
        )
        _print_stacks(process)
        code = 124
    finally:
        _signal(process, "SIGKILL")
        process.wait()
    outcome = _read(record) or {"passed": 0, "skipped": 0, "failures": []}
    record.write_text(json.dumps({**outcome, "exit": code, "is_over_limit": code == 124}), encoding="utf-8")
    return code


def _print_stacks(process: subprocess.Popen[bytes]) -> None:
    """Abort the workers of xdist, then the lane, one after the other: their stacks must not mix."""
    workers = psutil.Process(process.pid).children() if hasattr(signal, "SIGABRT") else []
    for worker in workers[:_MOST_WORKERS]:
        with contextlib.suppress(psutil.Error):
            worker.send_signal(signal.SIGABRT)
            time.sleep(_STACK_S)
    _signal(process, "SIGABRT")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS_S)


def _signal(process: subprocess.Popen[bytes], name: str) -> None:
    """To the lane and all its children; on Windows to the lane alone."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, getattr(signal, name))
        else:
            process.kill()


def _read(record: Path) -> dict[str, Any] | None:
    try:
        outcome: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return outcome


def may_rerun(failures: list[dict[str, Any]]) -> bool:
    """Say whether each failure of a test allows that it is run once more."""
    return all(failure["waits"] and failure["kind"] in _RERUN_KINDS for failure in failures)


def judge(into: Path, keep: Path, words: list[str], lanes: list[str], other_checks: list[str]) -> int:
    """Return 0 only if every lane passed, perhaps after a rerun, and no other check failed."""
    passed, problems = 0, list(other_checks)
    failures: dict[str, list[dict[str, Any]]] = {}
    for lane in lanes:
        record = _read(into / f"{lane}.json")
        if record is None:
            problems.append(f"{lane}: left no record")
            continue
        passed += record["passed"]
        for failure in record["failures"]:
            failures.setdefault(failure["test"], []).append(failure)
        if record["is_over_limit"]:
            problems.append(f"{lane}: reached its limit")
        elif record["exit"] not in (0, 1) or (record["exit"] == 1 and not record["failures"]):
            problems.append(f"{lane}: pytest ended with code {record['exit']}")
    waiting = [test for test, its in failures.items() if may_rerun(its)]
    failed = [test for test in failures if test not in waiting]
    if len(waiting) > MOST_RERUNS:
        problems.append(f"{len(waiting)} waiting tests failed; at most {MOST_RERUNS} are run again")
    if failed or problems:
        failed += waiting
    else:
        for number, test in enumerate(waiting):
            first = failures[test][0]["text"]
            print(f"== once more, alone: {test}", flush=True)
            if _passes_alone(number, test, into, words):
                passed += 1
                print(f"{first}\n== passed alone, failed beside others: {test}", flush=True)
                _keep(keep, test, first)
            else:
                failed.append(test)
    for test in failed:
        print(f"FAILED {test}")
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"{passed} passed, {len(failed) + len(problems)} failed", flush=True)
    return 1 if failed or problems else 0


def _passes_alone(number: int, test: str, into: Path, words: list[str]) -> bool:
    folder = into / "alone"
    code = run_lane(f"rerun{number}", RERUN_LIMIT_S, folder, [*words, test])
    record = _read(folder / f"rerun{number}.json")
    return code == 0 and record is not None and record["passed"] == 1


def _keep(keep: Path, test: str, first: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    row = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "test": test,
        "first": first,
    }
    with keep.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("--name", required=True)
    run.add_argument("--limit", type=float, required=True)
    judging = verbs.add_parser("judge")
    judging.add_argument("--keep", type=Path, required=True)
    judging.add_argument("--lane", action="append", default=[], required=True, help="one that has run")
    judging.add_argument("--failed", action="append", default=[], help="a check that failed before")
    for verb in (run, judging):
        verb.add_argument("--into", type=Path, required=True)
        verb.add_argument("words", nargs="*")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the lane would go on without us
    if given.verb == "run":
        return run_lane(given.name, given.limit, given.into, given.words)
    return judge(given.into, given.keep, given.words, given.lane, given.failed)


if __name__ == "__main__":
    sys.exit(main())
