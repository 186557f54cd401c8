"""Current locations of the source and the tests of a mutation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.mutations.table import Mutation

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"


class NotFound(Exception):
    """The table does not fit the tree any more."""


def texts() -> dict[Path, str]:
    """Read all modules, by path below the source."""
    return {file.relative_to(SOURCE): file.read_text("utf-8") for file in sorted(SOURCE.rglob("*.py"))}


def place_of(mutation: Mutation, modules: Mapping[Path, str]) -> Path:
    """Find the one module with the mutation's text; NotFound unless it stands there exactly once."""
    places = [file for file, text in modules.items() for _ in range(text.count(mutation.original))]
    if len(places) != 1:
        where = ", ".join(map(str, places)) or "nowhere"
        raise NotFound(f"{mutation.name}: its text must stand once in src, it stands {where}")
    return places[0]


def files_with_tests(mutation: Mutation) -> list[Path]:
    """Find its test files; NotFound unless each name fits exactly one."""
    files = []
    for name in mutation.tests:
        matches = sorted(TESTS.rglob(name))
        if len(matches) != 1:
            where = ", ".join(str(file.relative_to(ROOT)) for file in matches) or "none"
            raise NotFound(f"{mutation.name}: {name!r} must name one test file, it names {where}")
        files += matches
    return files


def complaints(mutations: tuple[Mutation, ...]) -> list[str]:
    """Say what of the table does not fit the tree."""
    modules, problems = texts(), []
    for mutation in mutations:
        for check in (lambda candidate: place_of(candidate, modules), files_with_tests):
            try:
                check(mutation)
            except NotFound as error:
                problems.append(str(error))
        if mutation.original == mutation.mutated:
            problems.append(f"{mutation.name}: it changes nothing")
    names = [mutation.name for mutation in mutations]
    problems += [f"{name}: two mutations have this name" for name in {*names} if names.count(name) > 1]
    return problems
