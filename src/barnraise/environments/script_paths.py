"""Absolute paths that a script names: the files there are not sent with its folder. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from barnraise.environments.script_imports import reached_modules

_MAX_PATH = 1024
_ABSOLUTE = re.compile(r"(/|~[/\\]|[A-Za-z]:[/\\])\S")
# Every machine has these, or has its own.
_SYSTEM = re.compile(r"/(dev|proc|sys|tmp|usr|bin|sbin|lib|lib64|etc|run|var/tmp|opt)(/|$)")
_NAME = re.compile(r"[^A-Za-z0-9]+")


class NamedPath(NamedTuple):
    """Absolute path in the text of a script."""

    file: str
    line: int
    path: str


def absolute_paths(files: Mapping[str, bytes], script: str) -> list[NamedPath]:
    """Return the absolute paths in the texts of a script and of the modules of its folder that it imports."""
    paths: dict[str, NamedPath] = {}
    for file, tree in reached_modules(files, script).items():
        for line, text in _texts(tree):
            if len(text) <= _MAX_PATH and _ABSOLUTE.match(text) and not _SYSTEM.match(text):
                paths.setdefault(text, NamedPath(file, line, text))
    return list(paths.values())


def data_hint(path: str) -> tuple[str, str]:
    """Return the option that sends the folder of a path, and the expression with which a script reads it."""
    last = _NAME.sub("_", re.split(r"[/\\]", path.rstrip("/\\"))[-1].partition(".")[0]).strip("_").lower()
    name = last if last and not last[0].isdigit() else "data"
    return f"--data {name}={path}", f'os.environ["BARNRAISE_DATA_{name.upper()}"]'


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the texts of a module with their lines, without docstrings."""
    ignored = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            yield node.lineno, node.value
