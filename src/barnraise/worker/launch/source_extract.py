"""Source text of a function or class, in a file or notebook cell, and the names that it uses."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import symtable
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from barnraise.core.errors import RunError

_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_AT_ONCE = frozenset(["listcomp", "setcomp", "dictcomp", "genexpr"])


@dataclass(frozen=True)
class SourceDefinition:
    """Its names by when they are needed: while it is defined, once it is called, or only to annotate."""

    name: str
    text: str
    place: str
    decorated: bool
    now: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    annotations: frozenset[str] = frozenset()
    makes: frozenset[str] = frozenset()  # globals that it sets itself, which need not be there before
    dotted: frozenset[str] = frozenset()  # such as torch.nn.functional.relu


def function_definition(function: FunctionType) -> SourceDefinition:
    """Return the source of a function. Raise RunError if the source is missing or differs from what runs."""
    code = function.__code__
    for node in _nodes(code.co_filename, function.__globals__):
        is_here = node.name == code.co_name and _first_line(node) == code.co_firstlineno
        if is_here and not isinstance(node, ast.ClassDef):
            return _definition(node, code.co_filename, function.__globals__)
    raise _no_source(function.__name__, code.co_filename)


def class_definition(cls: type, space: Mapping[str, Any]) -> SourceDefinition:
    """Return the source of a class at the top of a file or cell; ``space``: globals of its user."""
    methods = list(_methods(cls))
    for code in methods:
        for node in _nodes(code.co_filename, space):
            is_around = node.lineno <= code.co_firstlineno <= (node.end_lineno or 0)
            if is_around and isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                return _definition(node, code.co_filename, space)
    places = [] if methods else _places(cls)
    for file in places:
        for node in reversed(list(_nodes(file, space))):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__ and _fits(node, cls):
                return _definition(node, file, space)
    raise _no_source(cls.__name__, methods[0].co_filename if methods else "")


def names_used(name: str, text: str, place: str, *, decorated: bool = False) -> SourceDefinition:
    """Return the globals that the text of a definition needs. Pure."""
    tree = ast.parse(text)
    noted = _Annotations()
    bare = noted.visit(ast.parse(text))
    names = _Names()
    names.read(symtable.symtable(ast.unparse(ast.fix_missing_locations(bare)), name, "exec"), at_once=True)
    return SourceDefinition(
        name=name,
        text=text,
        place=place,
        decorated=decorated,
        now=frozenset(names.now),
        later=frozenset(names.later - names.now),
        annotations=frozenset(noted.names - names.now - names.later),
        makes=frozenset(names.makes),
        dotted=frozenset(_dotted(tree)),
    )


@dataclass
class _Names:
    now: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    makes: set[str] = field(default_factory=set)

    def read(self, table: symtable.SymbolTable, *, at_once: bool) -> None:
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            is_global = not symbol.is_assigned() if is_top else symbol.is_global()
            if is_global and symbol.is_referenced():
                (self.now if at_once else self.later).add(symbol.get_name())
            if is_global and symbol.is_assigned():
                self.makes.add(symbol.get_name())
        for child in table.get_children():
            waits = child.get_type() == "function" and child.get_name() not in _AT_ONCE
            self.read(child, at_once=at_once and not waits)


class _Annotations(ast.NodeTransformer):
    """Takes them out: the script has them as texts, so that nothing fails for their sake."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self._note(node.annotation)
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._note(node.returns)
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self._note(node.returns)
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self._note(node.annotation)
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def _note(self, annotation: ast.expr | None) -> None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return
        if annotation is not None:
            self.names |= {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def _dotted(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield ".".join([inner.id, *reversed(parts)])


def _definition(node: _Node, file: str, space: Mapping[str, Any]) -> SourceDefinition:
    first = _first_line(node)
    lines = linecache.getlines(file, dict(space))[first - 1 : node.end_lineno]
    is_file = os.path.exists(file)
    place = f"{os.path.basename(file) if is_file else 'a notebook cell'}, line {first}"
    text = _outdented(lines, node, first)
    return names_used(node.name, text, place, decorated=bool(node.decorator_list))


def _outdented(lines: list[str], node: _Node, first: int) -> str:
    """Remove the indentation; the inside of a multi-line string stays as it is."""
    inside = {
        line
        for part in ast.walk(node)
        if isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for line in range(part.lineno + 1, (part.end_lineno or part.lineno) + 1)
    }
    margin = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    moved = [
        line if number in inside else line.removeprefix(margin) for number, line in enumerate(lines, first)
    ]
    return "".join(moved).rstrip() + "\n"


def _nodes(file: str, space: Mapping[str, Any]) -> Iterator[_Node]:
    lines = linecache.getlines(file, dict(space))
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, _Node):
            yield node


def _first_line(node: _Node) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _methods(cls: type) -> Iterator[CodeType]:
    """Yield the code of the functions that were written in the body of a class."""
    for value in vars(cls).values():
        inner = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        inner = inspect.unwrap(inner) if callable(inner) else inner
        is_own = isinstance(inner, FunctionType) and inner.__qualname__.startswith(f"{cls.__qualname__}.")
        if is_own and linecache.getlines(inner.__code__.co_filename, inner.__globals__):
            yield inner.__code__


def _places(cls: type) -> list[str]:
    """Return files or cells that may define a class without methods, the newest first."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    # An entry without a time of change belongs to no file on the disk.
    cells = [name for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None]
    return [*([file] if file else []), *reversed(cells)]


def _fits(node: ast.ClassDef, cls: type) -> bool:
    """Tell whether the body has the same fields: an older cell may hold another class of that name."""
    noted = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    given = {
        target.id
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return noted == set(vars(cls).get("__annotations__", {})) and all(hasattr(cls, name) for name in given)


def _no_source(name: str, file: str) -> RunError:
    if os.path.exists(file):
        return RunError(
            f"the source of {name} is not in {file} as it runs here: the file has changed since",
            hint="Import it again, or restart Python.",
        )
    return RunError(
        f"{name} has no source that could be sent",
        hint="Write it in a file or a notebook cell; what is typed at a plain Python prompt is not kept.",
    )
