"""``pip install -e .[dev]`` brings what tests and benchmarks import; the tiers name tests that exist."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT
from tests.arch.test_project import PROJECT
from tests.tiers import TABLE, WAITING

# Those whose module has another name than the distribution.
MODULES = {
    "http-message-signatures": "http_message_signatures",
    "opentelemetry-sdk": "opentelemetry",
    "pillow": "PIL",
}
# A comparison runs these in an environment of its own.
OF_COMPARISONS = {"flwr", "torchft"}
OF_EVALUATIONS = {"tokenizers", "transformers"}  # with lm_eval, which is too large for the checks
OF_TESTS = {"own_data"}  # a module that a test writes
OURS = {"barnraise", "tests", "benchmarks", "lab"}


def _needs(extra: str | None) -> Iterator[str]:
    """The distributions of an extra, also of the extras that it names, or those of the package itself."""
    project = PROJECT["project"]
    for need in project["dependencies"] if extra is None else project["optional-dependencies"][extra]:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[([^\]]+)\])?", need)
        assert match is not None, need
        if match[1] == project["name"]:
            for other in match[2].split(","):
                yield from _needs(other.strip())
        else:
            yield match[1].lower()


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_development_extra_brings_every_import() -> None:
    declared = {*_needs(None), *_needs("dev")}
    modules = {MODULES.get(name, name.replace("-", "_")) for name in declared}
    known = modules | OURS | OF_TESTS | OF_COMPARISONS | OF_EVALUATIONS | set(sys.stdlib_module_names)
    # A script may import another one of its own folder, or of the examples.
    known |= {file.stem for file in ROOT.glob("examples/*.py")}
    missing = []
    for folder in ("tests", "benchmarks", "lab"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            near = {other.stem for other in file.parent.glob("*.py")}
            missing += [f"{file.relative_to(ROOT)}: {name}" for name in set(_imported(file)) - known - near]
    assert missing == []


@pytest.mark.parametrize(
    "tool", ["hypothesis", "import-linter", "mypy", "pytest-timeout", "pytest-xdist", "ruff"]
)
def test_tools_of_the_checks_are_declared_and_pinned(tool: str) -> None:
    assert tool in set(_needs("dev"))
    pins = (ROOT / ".ci" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert any(pin.startswith(f"{tool}==") for pin in pins)


def test_every_row_of_the_tiers_names_a_test() -> None:
    """A row for a test that was renamed would put a long test into the short tier without a word."""
    files = {
        file.relative_to(ROOT / "tests").as_posix(): set(
            re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        )
        for file in (ROOT / "tests").rglob("test_*.py")
    }
    for row in TABLE:
        names = [name for file in files if fnmatchcase(file, row.file) for name in files[file]]
        assert any(fnmatchcase(name, row.test) for name in names), f"{row.file} {row.test}"
    for pattern in WAITING:
        assert any(fnmatchcase(file, pattern) for file in files), pattern
