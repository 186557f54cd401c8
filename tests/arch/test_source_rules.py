"""Rules for the source that a reader would otherwise have to remember."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source_tree import SOURCE, files, module_name

# A module is one idea: the limit only stops the ones that hold several.
MODULE_LINES = 600
FUNCTION_LINES = 75
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "shared", "misc"}


def _functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("file", files(), ids=module_name)
def test_modules_and_functions_are_short(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES, f"{lines} lines: split it by responsibility"
    long = {f.name: f.end_lineno - f.lineno + 1 for f in _functions(file) if f.end_lineno is not None}
    assert {name: length for name, length in long.items() if length > FUNCTION_LINES} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for file in files() for part in module_name(file).split(".")}
    assert parts & NAMES_THAT_SAY_NOTHING == set()


@pytest.mark.parametrize("file", [file for file in files() if file.name == "__init__.py"], ids=module_name)
def test_each_package_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), "its first lines must say it"


def test_every_folder_of_modules_is_a_package() -> None:
    missing = {str(file.parent) for file in files() if not (file.parent / "__init__.py").exists()}
    assert missing == set()


def test_package_is_typed_for_users() -> None:
    assert (SOURCE / "barnraise" / "py.typed").exists()


def test_only_code_for_linux_starts_processes_with_the_event_loop() -> None:
    """The agent's event loop on Windows cannot start processes."""
    guilty = [module_name(file) for file in files() if "create_subprocess_" in file.read_text("utf-8")]
    assert guilty == ["barnraise.agent.power.suspend_events"]


def test_nothing_of_ours_pickles() -> None:
    """We never unpickle: bytes from a peer must not become code."""
    guilty = []
    for file in files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            if {name.split(".")[0] for name in names} & {
                "pickle",
                "marshal",
                "shelve",
                "dill",
                "cloudpickle",
            }:
                guilty.append(module_name(file))
    assert guilty == []
