"""Build the text of a script that defines a function.

The script holds the imports, functions, classes and plain data that the function uses, and nothing else of
its file or notebook.
"""

from __future__ import annotations

import builtins
import importlib.metadata
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from barnraise.core.errors import RunError
from barnraise.worker.launch.serializer import a_kind, advice, is_data
from barnraise.worker.launch.source_extract import SourceDefinition, class_definition, function_definition

_MISSING = object()
_OF_EVERY_MODULE = frozenset(["__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__"])


@dataclass(frozen=True)
class GeneratedScript:
    """Script that a worker runs, and the plain data that the script reads by name."""

    text: str
    constants: tuple[tuple[str, object], ...]


def script_of(function: Callable[..., object], folder: Path | None = None) -> GeneratedScript:
    """Build the script of a function. Raise RunError for parts that cannot be sent. ``folder``: sent along,
    so its modules may be imported.
    """
    inner = _plain_function(function)
    parts = _Parts(inner, function, folder)
    home = _home(function, inner.__name__, {"__main__"})
    if home is not None and _is_there(home, folder):
        parts.imports[inner.__name__] = f"from {home} import {inner.__name__}"
    else:
        parts.take_root()
    return GeneratedScript(_text(parts, inner.__name__), tuple(parts.constants.items()))


@dataclass
class _Parts:
    """Parts collected so far, each in the order in which the script needs them."""

    root: FunctionType
    given: Callable[..., object]
    folder: Path | None
    imports: dict[str, str] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    written: dict[str, SourceDefinition] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    def take_root(self) -> None:
        """Write the function last, after everything that it calls, because a reader starts at the end."""
        name = self.root.__name__
        definition = _definition_of(self.given, self.root)
        for used in sorted(definition.now) + sorted(definition.later - {name}):
            self._take(used, definition)
        self._take_soft(definition)
        self.written.setdefault(name, definition)
        for written in self.written.values():
            self._submodules(written)

    def _write(self, definition: SourceDefinition) -> None:
        """Write a definition after everything that it needs at once; the rest may follow."""
        for used in sorted(definition.now):
            self._take(used, definition)
        self.written.setdefault(definition.name, definition)
        for used in sorted(definition.later):
            self._take(used, definition)
        self._take_soft(definition)

    def _take(self, name: str, user: SourceDefinition) -> None:
        if name in self.begun or name in _OF_EVERY_MODULE:
            return
        value = self.root.__globals__.get(name, _MISSING)
        if name == self.root.__name__ and value is not self.given:
            raise RunError(
                f"{user.name} uses {name}, which is not the {name} that is to be run",
                hint="Give one of the two another name.",
            )
        if value is _MISSING:
            if hasattr(builtins, name) or name in user.makes:
                return
            raise RunError(
                f"{user.name} uses {name}, which is not defined", hint=f"Define {name} first, then try again."
            )
        self.begun.add(name)
        if not self._take_code(name, value, user):
            self._take_value(name, value, user)

    def _take_code(self, name: str, value: Any, user: SourceDefinition) -> bool:
        """Collect a module, function or class; return False if the value is none of these."""
        if isinstance(value, ModuleType):
            self.imports[name] = self._module_line(name, value, user)
            return True
        inner = inspect.unwrap(value) if callable(value) else value
        space = self.root.__globals__
        if isinstance(inner, FunctionType) and inner.__globals__ is space:
            self._take_definition(name, value, _definition_of(value, inner))
            return True
        if isinstance(value, type) and value.__module__ == space.get("__name__"):
            outer, dot, _ = value.__qualname__.partition(".")
            if dot:
                raise RunError(
                    f"{user.name} uses {name}, a class that was made inside {outer}",
                    hint="Define the class at the top of the file or in a notebook cell.",
                )
            self._take_definition(name, value, class_definition(value, space))
            return True
        home = None if is_data(value) else _home(value, name, {"__main__", str(space.get("__name__"))})
        if home is None:
            return False
        own = getattr(value, "__name__", name)
        actual = own if vars(sys.modules[home]).get(own) is value else name
        self._check_there(home, user)
        self.imports[name] = f"from {home} import {actual}" + ("" if actual == name else f" as {name}")
        return True

    def _take_definition(self, name: str, value: object, definition: SourceDefinition) -> None:
        if definition.name != name:
            other = self.root.__globals__.get(definition.name, value)
            if other is not value:
                raise RunError(
                    f"{name} is another name of {definition.name}, "
                    f"and {definition.name} means something else now",
                    hint=f"Define {name} under its own name.",
                )
            self.aliases[name] = definition.name
            if definition.name in self.begun:
                return
            self.begun.add(definition.name)
        self._write(definition)

    def _take_value(self, name: str, value: object, user: SourceDefinition) -> None:
        if not is_data(value):
            kind = "a lambda" if _is_lambda(value) else a_kind(value)
            raise RunError(
                f"{user.name} uses the global {name}, which is {kind} and does not travel",
                hint=_advice(name, value),
            )
        self.constants[name] = value

    def _take_soft(self, definition: SourceDefinition) -> None:
        """Collect names in annotations if possible; no function needs them to run."""
        for name in sorted(definition.annotations):
            if is_data(self.root.__globals__.get(name, None)):
                continue
            trial = replace(
                self,
                imports=dict(self.imports),
                constants=dict(self.constants),
                written=dict(self.written),
                aliases=dict(self.aliases),
                begun=set(self.begun),
            )
            try:
                trial._take(name, definition)
            except RunError:
                continue
            self.imports, self.constants, self.written = trial.imports, trial.constants, trial.written
            self.aliases, self.begun = trial.aliases, trial.begun

    def _submodules(self, definition: SourceDefinition) -> None:
        """Import submodules as well: ``import xml.dom`` binds only ``xml``."""
        for dotted in sorted(definition.dotted):
            name, *steps = dotted.split(".")
            value = self.root.__globals__.get(name)
            if not isinstance(value, ModuleType) or value.__name__ != name or name not in self.imports:
                continue
            longest = name
            for step in steps:
                if f"{longest}.{step}" not in sys.modules:
                    break
                longest = f"{longest}.{step}"
            if longest != name:
                self.imports[longest] = f"import {longest}"

    def _module_line(self, name: str, module: ModuleType, user: SourceDefinition) -> str:
        # The same module has another name on Windows.
        full = "os.path" if module is os.path else module.__name__
        if sys.modules.get(full) is not module:
            raise RunError(
                f"{user.name} uses the module {name}, which no import could find again",
                hint="Import an ordinary module inside the function.",
            )
        self._check_there(full, user)
        return f"import {full}" if full == name else f"import {full} as {name}"

    def _check_there(self, home: str, user: SourceDefinition) -> None:
        if _is_there(home, self.folder):
            return
        top = home.partition(".")[0]
        root = _root_of(sys.modules[top])
        raise RunError(
            f"{user.name} uses the module {home}, which is a file of yours and is not sent",
            hint=f"Send its folder as well: launch({self.root.__name__}, ..., folder={str(root)!r})",
        )


def _plain_function(function: Callable[..., object]) -> FunctionType:
    """Return the function that was written with def. Raise RunError for every other callable."""
    name = getattr(function, "__name__", type(function).__name__)
    inner = inspect.unwrap(function)
    if inspect.ismethod(inner):
        what, hint = "a method", "Write a function that makes the object and calls the method."
    elif not isinstance(inner, FunctionType):
        what, hint = a_kind(function), "Write a function with def that does it."
    elif _is_lambda(inner):
        what, hint = "a lambda", "Write it as a function with def."
    elif inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        what, hint = "an async function", "Write a def that calls asyncio.run() on it."
    elif inspect.isgeneratorfunction(inner):
        what, hint = "a generator", "Return a list instead of yielding."
    else:
        return inner
    raise RunError(f"{name} is {what} and cannot be sent", hint=hint)


def _definition_of(value: object, inner: FunctionType) -> SourceDefinition:
    name = inner.__name__
    if _is_lambda(inner):
        raise RunError("a lambda cannot be sent", hint="Write it as a function with def.")
    free = inner.__code__.co_freevars
    if free:
        raise RunError(
            f"{name} is a closure: it uses {', '.join(free)} of the function around it",
            hint=f"Pass {' and '.join(free)} as {'arguments' if len(free) > 1 else 'an argument'}, or define "
            f"{name} at the top of the file or cell (a decorator must use functools.wraps).",
        )
    definition = function_definition(inner)
    if inner is not value and not definition.decorated:
        raise RunError(
            f"{name} was wrapped after it was defined, which its source does not show",
            hint="Write the wrapper as a decorator above its def.",
        )
    return definition


def _home(value: Any, name: str, but: set[str]) -> str | None:
    """Return the module from which a value can be imported, under its own name or this one."""
    own = getattr(value, "__name__", name)
    stated = getattr(value, "__module__", None)
    stated = stated if isinstance(stated, str) and stated in sys.modules and stated not in but else None
    if stated is not None and vars(sys.modules[stated]).get(own) is value:
        return stated
    homes = [
        module_name
        for module_name, module in list(sys.modules.items())
        if module_name not in but
        and any(getattr(module, "__dict__", {}).get(known) is value for known in {own, name})
    ]
    # Public ones first, then short ones.
    return min(homes, key=lambda home: ("._" in f".{home}", home.count("."), home), default=None)


def _is_there(home: str, folder: Path | None) -> bool:
    """Tell whether a worker can import a module: it is installed, or lies in the folder that is sent."""
    module = sys.modules.get(home.partition(".")[0])
    root = _root_of(module)
    if module is None or root is None or (folder is not None and root == folder.resolve()):
        return module is not None
    return _is_installed(root) or module.__name__ in importlib.metadata.packages_distributions()


def _root_of(module: ModuleType | None) -> Path | None:
    """Return the folder in which a top module was found; None for a part of Python."""
    if module is None or module.__name__ in sys.stdlib_module_names:
        return None
    paths = list(getattr(module, "__path__", []))
    place = paths[0] if paths else getattr(module, "__file__", None)
    return Path(place).resolve().parent if place else None


@cache
def _is_installed(root: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(root.parts):
        return True
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    return any(root == Path(place).resolve() or root in _linked(Path(place)) for place in places)


def _linked(place: Path) -> set[Path]:
    """Return the folders of packages that were installed in editable mode."""
    folders = set()
    for file in place.glob("*.pth"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        folders |= {Path(line).resolve() for line in lines if line and not line.startswith("import")}
    return folders


def _is_lambda(value: object) -> bool:
    return isinstance(value, FunctionType) and value.__code__.co_name == "<lambda>"


def _advice(name: str, value: object) -> str:
    if hasattr(value, "state_dict"):
        return f"Pass {name}.state_dict() as an argument, and build {name} inside the function."
    if callable(value) and not isinstance(value, type):
        return advice(value)
    return f"Create {name} inside the function, or pass what it is made of as arguments."


def _text(parts: _Parts, name: str) -> str:
    taken = {*parts.imports, *parts.constants, *parts.written, *parts.aliases}
    ours = "remote_main" if "remote_main" not in taken else "barnraise_remote_main"
    alias = "" if ours == "remote_main" else f" as {ours}"
    lines = [
        f'"""Made by barnraise.launch: calls {name} on every rank and keeps what rank 0 returns."""',
        "",
        "from __future__ import annotations",
        "",
        *sorted(dict.fromkeys(parts.imports.values()), key=lambda line: (line.startswith("from"), line)),
        "",
        f"from barnraise.worker.launch import remote_main{alias}",
        "",
    ]
    if parts.constants:
        lines.append("# Plain data, as it was when the function was launched.")
        lines += [f'{each} = {ours}.constant("{each}", beside=__file__)' for each in parts.constants]
        lines.append("")
    for definition in parts.written.values():
        lines += ["", f"# From {definition.place}.", definition.text]
        lines += [f"{alias} = {own}\n" for alias, own in parts.aliases.items() if own == definition.name]
    lines += ["", 'if __name__ == "__main__":', f"    {ours}.main({name}, beside=__file__)", ""]
    return "\n".join(lines)
