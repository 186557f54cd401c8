"""Dependency scan: the imports of a script, read from its text and never by running it. Pure.

Imports are followed from the script into the modules of its folder. A name is searched beside the script
first, then at the top of the folder. Modules found there, and those of the standard library, are no
dependencies.

- *Required*: imported whenever its module is loaded: at the top level, in a class, in a ``with``, or under
  the script's own ``if __name__ == "__main__"``.
- *Optional*: imported in a function, a loop, another condition, or a ``try`` (or ``suppress``) that handles
  ImportError. If a module is only imported in this way, its imports are optional, too.
- Imports under ``if TYPE_CHECKING`` do not count.

The code *demands CUDA* if the same file has no check for the device and contains one of these::

    x.cuda()                        torch.cuda.set_device(...)
    torch.device("cuda...")         x.to("cuda...")
    f(device="cuda...")             device = "cuda..."

Checks are ``cuda.is_available``, ``cuda.device_count``, and the same of ``mps``, ``xpu`` or
``torch.accelerator``. A line under a condition about cuda or gpu is no demand. Nor is a default value that
the caller may change, or ``init_process_group("nccl")``, which our backend replaces.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import msgspec

from barnraise.agent_client.run_options import MAX_FINDING, MAX_IMPORT_NAME, MAX_IMPORTS, ScriptImports

_MOST_MODULES = 2000
# Parsing needs a hundred times this memory.
_LARGEST_MODULE = 4 * 1024 * 1024
_SHOWN = 80
_NO_NEEDS = sys.stdlib_module_names | {"__main__", "barnraise"}
_CATCHES_IMPORT_ERROR = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_ASKS = {"is_available", "device_count", "current_accelerator"}
_ASKED = {"cuda", "mps", "xpu", "accelerator"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _Import(msgspec.Struct, frozen=True):
    """One imported module by its absolute name, and the folders in which it is searched."""

    name: str
    required: bool
    roots: tuple[str, ...]
    # Of `from name import these`: each may be a module too.
    members: tuple[str, ...] = ()
    relative: bool = False


def scan_imports(files: Mapping[str, bytes], script: str) -> ScriptImports:
    """Return the imports of a script in a folder, whose files are named by relative paths with ``/``."""
    script = str(PurePosixPath(script))
    if script not in files:
        return ScriptImports(syntax=f"{script} is not in the folder of the run"[:MAX_FINDING])
    folder = _Folder(files, script)
    required: dict[str, None] = {}
    optional: dict[str, None] = {}
    demands: dict[str, str] = {}
    seen: dict[str, bool] = {}
    waiting = [(script, True)]
    while waiting and len(seen) < _MOST_MODULES:
        # Required modules come first, so that few modules are read twice.
        path, is_required = waiting.pop(next((i for i, (_, must) in enumerate(waiting) if must), 0))
        if seen.get(path, False) or (path in seen and not is_required):
            continue
        seen[path] = is_required
        tree = _parsed(path, files[path])
        if isinstance(tree, str):
            return ScriptImports(syntax=tree[:MAX_FINDING])
        if tree is None:
            continue
        demand = _cuda_demand(path, files[path], tree)
        if demand is not None:
            demands.setdefault(path, demand)
        for imported in _imports(tree, folder, path, is_script=path == script):
            must = is_required and imported.required
            local = folder.modules(imported)
            waiting += [(module, must) for module in local]
            top = imported.name.partition(".")[0]
            if not local and not imported.relative and not folder.holds(imported) and top not in _NO_NEEDS:
                (required if must else optional).setdefault(top[:MAX_IMPORT_NAME])
    return ScriptImports(
        required=tuple(required)[:MAX_IMPORTS],
        optional=tuple(name for name in optional if name not in required)[:MAX_IMPORTS],
        cuda=demands.get(script) or next(iter(demands.values()), None),
    )


def reached_modules(files: Mapping[str, bytes], script: str) -> dict[str, ast.Module]:
    """Return the modules of the folder that a script may load, parsed, with the script first.

    Return an empty mapping if the script itself cannot be parsed.
    """
    script = str(PurePosixPath(script))
    folder = _Folder(files, script)
    modules: dict[str, ast.Module] = {}
    waiting = [script]
    unreadable: set[str] = set()
    while waiting and len(modules) < _MOST_MODULES:
        path = waiting.pop(0)
        if path in modules or path in unreadable or path not in files:
            continue
        tree = _parsed(path, files[path])
        if not isinstance(tree, ast.Module):
            if path == script:
                return {}
            unreadable.add(path)
            continue
        modules[path] = tree
        for imported in _imports(tree, folder, path, is_script=path == script):
            waiting += folder.modules(imported)
    return modules


class _Folder:
    """Modules of the folder, by path."""

    def __init__(self, files: Mapping[str, bytes], script: str) -> None:
        self._files = files
        beside = _parent(script)
        self.roots = (beside, "") if beside else ("",)
        self._compiled = {path.split(".")[0] for path in files if path.endswith((".so", ".pyd"))}
        self._folders = {
            str(parent) for path in files if path.endswith(".py") for parent in PurePosixPath(path).parents
        }

    def holds(self, imported: _Import) -> bool:
        """Return True if the first part of the name is a module of the folder.

        A folder without ``__init__.py`` does not count: an installed package of that name comes first.
        """
        top = imported.name.partition(".")[0]
        return any(self._module(root, top) or _joined(root, top) in self._compiled for root in imported.roots)

    def modules(self, imported: _Import) -> list[str]:
        """Return the files that an import loads: parent packages, the module, and its members' modules."""
        for root in imported.roots:
            parts = [part for part in imported.name.split(".") if part]
            top = _joined(root, parts[0]) if parts else root
            if parts and not self._module(root, parts[0]) and top not in self._folders:
                continue
            loaded = [self._module(root, *parts[: end + 1]) for end in range(len(parts))]
            if not parts:
                loaded = [_joined(root, "__init__.py")]
            loaded += [self._module(root, *parts, member) for member in imported.members]
            return [path for path in dict.fromkeys(loaded) if path and path in self._files]
        return []

    def _module(self, *parts: str) -> str | None:
        base = _joined(*parts)
        for path in (f"{base}/__init__.py", f"{base}.py"):
            if path in self._files:
                return path
        return None


def _imports(tree: ast.Module, folder: _Folder, path: str, *, is_script: bool) -> Iterator[_Import]:
    """Yield every import of a module, in the order of the text."""
    waiting: list[tuple[ast.AST, bool]] = [(node, True) for node in reversed(tree.body)]
    while waiting:
        node, required = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name, required, folder.roots)
        elif isinstance(node, ast.ImportFrom):
            members = tuple(alias.name for alias in node.names)
            root = path
            for _ in range(node.level):
                root = _parent(root)
            roots = (root,) if node.level else folder.roots
            yield _Import(node.module or "", required, roots, members, node.level > 0)
        else:
            inside = list(_inside(node, required, is_script))
            waiting += reversed(inside)


def _inside(node: ast.AST, required: bool, is_script: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the parts of a statement, and whether each is reached whenever the statement is."""
    if isinstance(node, ast.If):
        always, never = _known_outcome(node.test, is_script)
        if not never:
            yield from ((each, required and always) for each in node.body)
        if not always:
            yield from ((each, required and never) for each in node.orelse)
    elif isinstance(node, ast.Try | ast.TryStar):
        survives = any(_catches(handler.type) for handler in node.handlers)
        yield from ((each, required and not survives) for each in (*node.body, *node.orelse))
        yield from ((handler, False) for handler in node.handlers)
        yield from ((each, required) for each in node.finalbody)
    elif isinstance(node, ast.With | ast.AsyncWith):
        survives = any(_suppresses(item.context_expr) for item in node.items)
        yield from ((each, required and not survives) for each in node.body)
    elif isinstance(node, ast.ClassDef):
        yield from ((each, required) for each in node.body)
    else:
        yield from ((each, False) for each in ast.iter_child_nodes(node))


def _known_outcome(test: ast.expr, is_script: bool) -> tuple[bool, bool]:
    """Return whether a condition is (always, never) true, for the two common patterns."""
    if last_name(test) == "TYPE_CHECKING":
        return False, True
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = (test.left, test.comparators[0])
        names_main = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
        if names_main and any(last_name(side) == "__name__" for side in sides):
            return is_script, not is_script
    return False, False


def _catches(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(last_name(kind) in _CATCHES_IMPORT_ERROR for kind in kinds)


def _suppresses(context: ast.expr) -> bool:
    return (
        isinstance(context, ast.Call)
        and last_name(context.func) == "suppress"
        and any(_catches(kind) for kind in context.args)
    )


def _cuda_demand(path: str, text: bytes, tree: ast.Module) -> str | None:
    """Return a sentence about the first line that needs CUDA; None if there is none, or a check."""
    lines: list[int] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if _is_guard(node):
            return None
        if isinstance(node, ast.If | ast.IfExp) and _speaks_of_cuda(node.test):
            # A check anywhere in the file counts.
            if any(_is_guard(each) for each in ast.walk(node)):
                return None
            continue
        if isinstance(node, _Function):
            # The caller may change a default value.
            inside = node.body if isinstance(node.body, list) else [node.body]
            waiting += [*inside, *getattr(node, "decorator_list", [])]
            continue
        if _demands_cuda(node):
            lines.append(getattr(node, "lineno", 1))
        waiting += ast.iter_child_nodes(node)
    if not lines:
        return None
    first = min(lines)
    shown = text.splitlines()[first - 1 : first] or [b""]
    code = shown[0].decode("utf-8", "replace").strip()[:_SHOWN]
    return f"{path[:200]} line {first} requires CUDA without a check for it: {code}"[:MAX_FINDING]


def _is_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _ASKS and last_name(node.value) in _ASKED
    if isinstance(node, ast.ImportFrom) and node.module:
        is_torch = node.module.rpartition(".")[2] in _ASKED
        return is_torch and any(alias.name in _ASKS for alias in node.names)
    return False


def _speaks_of_cuda(test: ast.expr) -> bool:
    for node in ast.walk(test):
        words = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None)
        if isinstance(words, str) and any(word in words.lower() for word in ("cuda", "gpu")):
            return True
    return False


def _demands_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        names = [last_name(target) or "" for target in node.targets]
        return _says_cuda(node.value) and any(name.lower().endswith("device") for name in names)
    if not isinstance(node, ast.Call):
        return False
    if any(keyword.arg == "device" and _says_cuda(keyword.value) for keyword in node.keywords):
        return True
    called = last_name(node.func)
    if called in {"device", "to"}:
        return any(_says_cuda(argument) for argument in node.args[:1])
    if called == "set_device" and isinstance(node.func, ast.Attribute):
        return last_name(node.func.value) == "cuda"
    return called == "cuda" and isinstance(node.func, ast.Attribute)


def _says_cuda(value: ast.expr) -> bool:
    """Return True for ``"cuda"``, ``"cuda:1"``, or a formatted text that starts with them."""
    if isinstance(value, ast.JoinedStr) and value.values:
        value = value.values[0]
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
        return False
    return value.value.partition(":")[0] == "cuda"


def _parsed(path: str, text: bytes) -> ast.Module | str | None:
    """Return the module's tree, a sentence about its syntax error, or None if it cannot be judged."""
    if len(text) > _LARGEST_MODULE:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text, filename=path)
        except SyntaxError as error:
            line = f" line {error.lineno}" if error.lineno else ""
            code = (error.text or "").strip()[:_SHOWN]
            shown = f" `{code}`" if code else ""
            version = ".".join(map(str, sys.version_info[:2]))
            return f"{path[:200]}{line}: invalid syntax: {error.msg[:200]}{shown} (read by Python {version})"
        except ValueError:
            return f"{path[:200]}: invalid syntax: it contains null bytes, so it is not text"
        except (RecursionError, MemoryError):
            return None


def last_name(node: ast.expr) -> str | None:
    """Return ``c`` for ``a.b.c``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _parent(path: str) -> str:
    parent = str(PurePosixPath(path).parent)
    return "" if parent == "." else parent


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)
