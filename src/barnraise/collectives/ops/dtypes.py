"""Element types on the wire: a number for each dtype, and its numpy type. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from barnraise.core.errors import UnsupportedOperation


@dataclass(frozen=True, slots=True)
class ElementType:
    """Dtype of the wire.

    ``code`` is part of the wire format and never reused; ``kind`` decides which reductions exist.
    """

    code: int
    name: str
    size: int
    kind: str  # float, int, bool, complex


_ALL = (
    ElementType(1, "float32", 4, "float"),
    ElementType(2, "float64", 8, "float"),
    ElementType(3, "float16", 2, "float"),
    ElementType(4, "bfloat16", 2, "float"),
    ElementType(5, "int8", 1, "int"),
    ElementType(6, "uint8", 1, "int"),
    ElementType(7, "int16", 2, "int"),
    ElementType(8, "int32", 4, "int"),
    ElementType(9, "int64", 8, "int"),
    ElementType(10, "uint16", 2, "int"),
    ElementType(11, "uint32", 4, "int"),
    ElementType(12, "uint64", 8, "int"),
    ElementType(13, "bool", 1, "bool"),
    ElementType(14, "complex64", 8, "complex"),
    ElementType(15, "complex128", 16, "complex"),
    ElementType(16, "float8_e4m3fn", 1, "float"),
    ElementType(17, "float8_e5m2", 1, "float"),
    ElementType(18, "float8_e4m3fnuz", 1, "float"),
    ElementType(19, "float8_e5m2fnuz", 1, "float"),
    ElementType(20, "float8_e8m0fnu", 1, "float"),
)
_BY_CODE = {element.code: element for element in _ALL}
_BY_NAME = {element.name: element for element in _ALL}


def by_code(code: int) -> ElementType:
    element = _BY_CODE.get(code)
    if element is None:
        raise UnsupportedOperation(f"no element type has the number {code}")
    return element


def by_name(name: str) -> ElementType:
    element = _BY_NAME.get(name)
    if element is None:
        raise UnsupportedOperation(f"tensors of dtype {name} cannot be moved between machines")
    return element


@cache
def numpy_dtype(code: int) -> np.dtype[np.generic]:
    """Return the numpy type that computes with this element."""
    element = by_code(code)
    if element.name == "bool":
        return np.dtype(np.uint8)  # logical, on bytes 0 and 1
    if element.name == "bfloat16" or element.name.startswith("float8"):
        import ml_dtypes

        narrow: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, element.name))
        return narrow
    return np.dtype(element.name)
