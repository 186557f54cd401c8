"""Inputs that differ by rank, element and call, and the expected results, computed in a wider type.

Floating inputs are small whole numbers, or powers of two for products. So sums in any order are exact in
the type itself, and results can be compared bit for bit. ``rough_inputs`` are ordinary numbers, compared
within rounding. Integers use their whole range and wrap.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
INTEGERS = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
}
COMPLEXES = {"complex64": torch.complex64, "complex128": torch.complex128}
DTYPES = {**FLOATS, **INTEGERS, "bool": torch.bool, **COMPLEXES}
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
PREMULTIPLIER = 0.5

# The largest whole number of which five may be added exactly.
_EXACT = {
    "float64": 10**9,
    "float32": 10**6,
    "float16": 400,
    "bfloat16": 50,
    "float8_e4m3fn": 3,
    "float8_e5m2": 1,
    "complex64": 10**6,
    "complex128": 10**9,
}


def meaningful(dtype: str, operation: str) -> bool:
    """Return True if this reduction has one sensible meaning for this type."""
    if dtype in FLOATS:
        return operation not in ("BAND", "BOR", "BXOR")
    if dtype in COMPLEXES:
        return operation in ("SUM", "PRODUCT", "AVG", "PREMUL_SUM")
    averaged = dtype in ("int32", "int64")
    return operation != "PREMUL_SUM" and (averaged or operation != "AVG")


def inputs(dtype: str, operation: str, count: int, rank: int, call: int) -> torch.Tensor:
    """The 1-D input of one rank for one call."""
    bits = _bits(rank, count, call)
    if dtype == "bool":
        return torch.from_numpy((bits & np.uint64(1)).astype(np.bool_))
    if dtype in INTEGERS:
        return _integers(dtype, bits | np.uint64(1) if operation == "PRODUCT" else bits)
    if dtype in COMPLEXES:
        real = _whole(dtype, operation, bits)
        imaginary = _whole(dtype, operation, _bits(rank, count, call + 7919))
        return torch.from_numpy(real + 1j * imaginary).to(DTYPES[dtype])
    return torch.from_numpy(_whole(dtype, operation, bits)).to(DTYPES[dtype])


def rough_inputs(dtype: str, count: int, rank: int, call: int) -> torch.Tensor:
    """Ordinary numbers between -1 and 1, whose sums round."""
    scaled = (_bits(rank, count, call) >> np.uint64(11)).astype(np.float64) / 2.0**53 * 2 - 1
    return torch.from_numpy(scaled).to(DTYPES[dtype])


def raw_inputs(dtype: str, count: int, rank: int, call: int) -> torch.Tensor:
    """Any bit pattern, for operations that only move data."""
    if dtype == "bool":
        return inputs(dtype, "MAX", count, rank, call)
    width = DTYPES[dtype].itemsize
    words = np.stack([_bits(rank, count, call), _bits(rank, count, call + 104729)], axis=1)
    data = np.ascontiguousarray(words.view(np.uint8).reshape(count, 16)[:, :width])
    return torch.from_numpy(data.reshape(-1)).view(DTYPES[dtype]).reshape(count)


def reduced(dtype: str, operation: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    """Return the expected reduction, computed in a wider type and cast down at the end."""
    if dtype == "bool":
        return _reduced_bools(operation, contributions)
    if dtype in INTEGERS:
        return _reduced_integers(dtype, operation, contributions)
    wide = torch.complex128 if dtype in COMPLEXES else torch.float64
    stack = torch.stack([contribution.to(wide) for contribution in contributions])
    if operation == "SUM":
        result = stack.sum(0)
    elif operation == "AVG":
        result = stack.sum(0) / len(contributions)
    elif operation == "PREMUL_SUM":
        result = (stack * PREMULTIPLIER).sum(0)
    elif operation == "PRODUCT":
        result = stack.prod(0)
    else:
        result = stack.amin(0) if operation == "MIN" else stack.amax(0)
    return result.to(DTYPES[dtype])


def rounding(dtype: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    """Return the maximum rounding error of a sum in this type, element by element."""
    wide = torch.complex128 if dtype in COMPLEXES else torch.float64
    magnitude = torch.stack([contribution.to(wide).abs() for contribution in contributions]).sum(0)
    return magnitude * (len(contributions) + 2) * torch.finfo(DTYPES[dtype]).eps


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shapes, types and bytes: for numbers and for patterns that are not numbers."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def digest(tensor: torch.Tensor) -> str:
    """A short fingerprint, to compare results between ranks."""
    return hashlib.sha256(_bytes(tensor).numpy().tobytes()).hexdigest()[:12]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # fresh: sums of nothing have odd strides
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def _bits(rank: int, count: int, call: int) -> np.ndarray:
    """64 well-mixed bits per element (the finaliser of splitmix64)."""
    start = (rank + 1) * 0x9E3779B97F4A7C15 + (call + 1) * 0xD1B54A32D192ED03
    x = np.arange(count, dtype=np.uint64) * np.uint64(0xA24BAED4963EE407) + np.uint64(start & (2**64 - 1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _whole(dtype: str, operation: str, bits: np.ndarray) -> np.ndarray:
    if operation == "PRODUCT" and dtype in COMPLEXES:
        return (bits % np.uint64(5)).astype(np.float64) - 2
    if operation == "PRODUCT":
        sign = (bits & np.uint64(1)).astype(np.float64) * 2 - 1
        return sign * 2.0 ** ((bits >> np.uint64(1)) % np.uint64(3)).astype(np.float64) / 2
    limit = _EXACT[dtype]
    return (bits % np.uint64(2 * limit + 1)).astype(np.float64) - limit


def _integers(dtype: str, bits: np.ndarray) -> torch.Tensor:
    width = DTYPES[dtype].itemsize
    data = np.ascontiguousarray(bits.view(np.uint8).reshape(len(bits), 8)[:, :width])
    return torch.from_numpy(data.reshape(-1)).view(DTYPES[dtype]).reshape(len(bits))


def _reduced_bools(operation: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    """A sum of bools is "any", a product "all": there is nothing else a bool can hold."""
    stack = torch.stack(contributions)
    if operation in ("SUM", "MAX", "BOR"):
        return stack.any(0)
    if operation == "BXOR":
        return (stack.sum(0) % 2).bool()
    return stack.all(0)


def _reduced_integers(dtype: str, operation: str, contributions: list[torch.Tensor]) -> torch.Tensor:
    """Reduce modulo 2**64 and truncate at the end; wrapping in the type itself has the same result."""
    arrays = [contribution.numpy() for contribution in contributions]
    if operation in ("MIN", "MAX"):
        stack = np.stack(arrays)
        return torch.from_numpy(stack.min(0) if operation == "MIN" else stack.max(0))
    reduce = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }[operation]
    result = arrays[0].astype(np.uint64)
    for other in arrays[1:]:
        result = reduce(result, other.astype(np.uint64))
    total = _integers(dtype, result)
    return total.div(len(arrays), rounding_mode="trunc") if operation == "AVG" else total
