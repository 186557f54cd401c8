"""Find the places in the source where bytes become values: each needs a parser in the fuzzer, or a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
_CALLS = {
    "Decoder",
    "b64decode",
    "decompressobj",
    "from_bytes",
    "frombuffer",
    "load_der_x509_certificate",
    "load_file",
    "loads",
    "unpack",
    "unpack_from",
}


def decoding_sites(source: Path = SOURCE) -> set[str]:
    """Return each place as ``module:function``, or ``module:name`` of a decoder that a module keeps."""
    return {
        f"{'.'.join(file.relative_to(source).with_suffix('').parts)}:{'.'.join(where)}"
        for file in source.rglob("*.py")
        for where in _calls(ast.parse(file.read_text(encoding="utf-8")), ())
    }


def _calls(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*where, child.name)
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not where:
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            inner = (ast.unparse(target),)
        if isinstance(child, ast.Call) and _decodes(child.func):
            yield inner
        yield from _calls(child, inner)


def _decodes(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    text = ast.unparse(function)
    if text.startswith("store."):  # unpacks a folder whose list was checked
        return False
    return name in _CALLS or text in ("msgspec.msgpack.decode", "msgspec.json.decode")
