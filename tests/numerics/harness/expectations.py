"""Known errors and limits of Gloo, so that the same suite runs on it."""

from __future__ import annotations

from tests.numerics.harness.values import COMPLEXES, FLOATS, meaningful

GLOO_DTYPES = frozenset(
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "uint8",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
    ]
)

RIGHT, RAISES, WRONG, RIGHT_OR_RAISES = "right", "raises", "wrong", "right or raises"


def reduction(backend: str, dtype: str, operation: str) -> str:
    """Return the expected behaviour of this backend with this reduction."""
    if dtype in COMPLEXES and operation == "PRODUCT":
        return RIGHT_OR_RAISES  # torch's own all_reduce refuses it before any backend is asked
    if backend != "gloo":
        return RIGHT if meaningful(dtype, operation) else RAISES
    if dtype not in GLOO_DTYPES or operation == "PREMUL_SUM":
        return RAISES
    if dtype == "bool" and operation in ("SUM", "AVG"):
        return WRONG  # stores the byte 2 for true + true
    if operation == "AVG":
        return RIGHT if dtype in FLOATS or dtype in COMPLEXES else RAISES
    if operation in ("BAND", "BOR", "BXOR"):
        return RAISES if dtype in FLOATS or dtype in COMPLEXES else RIGHT
    if dtype in COMPLEXES and operation in ("MIN", "MAX"):
        return RAISES
    return RIGHT


def movement(backend: str, dtype: str, collective: str) -> str:
    """Return the expected behaviour of this backend when it moves data of this type."""
    if backend != "gloo":
        return RIGHT
    if dtype in COMPLEXES and collective == "gather":
        return RAISES
    return RIGHT if dtype in GLOO_DTYPES else RIGHT_OR_RAISES


def uneven_lists(backend: str) -> bool:
    """Return True if all_gather and all_to_all accept lists of tensors of different sizes."""
    return backend != "gloo"
