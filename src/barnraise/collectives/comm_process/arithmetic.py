"""Sums and other reductions on shared memory, with numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from barnraise.collectives.ops.dtypes import by_code, numpy_dtype
from barnraise.core.errors import UnsupportedOperation

Combine = Callable[[memoryview, memoryview, bool], None]

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_LOGICAL: dict[str, Any] = {"sum": np.maximum, "product": np.minimum, "min": np.minimum, "max": np.maximum}


def supported(code: int, reduction: str) -> bool:
    """Return True if this reduction exists for this element type."""
    element = by_code(code)
    if reduction in ("band", "bor", "bxor"):
        return element.kind in ("int", "bool")
    if element.kind == "complex":
        return reduction in ("sum", "product")
    return reduction in _UFUNCS


@cache
def combiner(code: int, reduction: str) -> Combine:
    """Return ``combine(own, received, received_first)``, which reduces both in this order into ``own``."""
    if not supported(code, reduction):
        raise UnsupportedOperation(f"{reduction} does not exist for {by_code(code).name}")
    dtype = numpy_dtype(code)
    ufunc = (
        _LOGICAL.get(reduction, _UFUNCS[reduction]) if by_code(code).kind == "bool" else _UFUNCS[reduction]
    )

    def combine(own: memoryview, received: memoryview, received_first: bool) -> None:
        target, other = np.frombuffer(own, dtype), np.frombuffer(received, dtype)
        if received_first:
            ufunc(other, target, out=target)
        else:
            ufunc(target, other, out=target)

    return combine
