"""Figures of updates for the update checks: norms, and sketches under secret keys.

A sketch is a linear projection to a few numbers; its signs follow from a key. A sender that knew the key
could solve for an update with any sketch. So no key leaves the process that drew it. The key of a round is
drawn after its last update has arrived, and used once. The key that finds copies of earlier updates lasts as
long as the process, because the earlier updates themselves are gone.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy

from barnraise.core.errors import ProtocolError
from barnraise.hub.aggregation.aggregate import map_in_order
from barnraise.hub.aggregation.aggregator import RoundFigures
from barnraise.hub.aggregation.update_checks import SKETCH, Sketch
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm

_KEY_BYTES = 32
_LEAST_SKETCHED = 4 * SKETCH  # numbers: fewer do not tell a copy from agreement
_Signs = numpy.ndarray[tuple[int], numpy.dtype[numpy.int8]]


def draw_key() -> bytes:
    """Return a new secret key for sketches."""
    return secrets.token_bytes(_KEY_BYTES)


def measure(path: Path, form: VectorForm, key: bytes) -> RoundFigures:
    """Return the norm of an update, and its sketch under this key.

    Raise ProtocolError if the file does not fit the form or has a number that is not finite.
    """
    square = 0.0
    sketch = numpy.zeros(SKETCH, dtype=numpy.float32)
    for index, values in enumerate(VectorFile(path, form).chunks()):
        numbers = values.numpy()
        square += float(numpy.dot(numbers, numbers))
        sketch += _project(numbers, _kept_signs(key, index, len(numbers)))
    if not math.isfinite(square):
        raise ProtocolError("the update's norm is not finite", not_finite=True)
    return RoundFigures(math.sqrt(square), sketch.tobytes() if form.numel >= _LEAST_SKETCHED else b"")


def sketch_round(files: Sequence[VectorFile], pool: Executor) -> list[Sketch]:
    """Return a sketch of each update of a closed round, under a key that only this call knows.

    Empty if the model is too small for sketches.
    """
    form = files[0].form
    if form.numel < _LEAST_SKETCHED:
        return []
    key = draw_key()

    def work(index: int) -> list[Sketch]:
        signs = _signs(key, index, form.chunk_size(index))
        return [_project(file.chunk(index).numpy(), signs) for file in files]

    totals = [numpy.zeros(SKETCH, dtype=numpy.float32) for _ in files]
    for sketches in map_in_order(pool, work, form.count):
        for total, sketch in zip(totals, sketches, strict=True):
            total += sketch
    return totals


def _project(numbers: Sketch, signs: _Signs) -> Sketch:
    """Return the sketch of a chunk: every number is added to or subtracted from one of the sketch's
    positions."""
    padded = numpy.zeros(-(-len(numbers) // SKETCH) * SKETCH, dtype=numpy.float32)
    numpy.multiply(numbers, signs, out=padded[: len(numbers)])
    total: Sketch = padded.reshape(-1, SKETCH).sum(axis=0, dtype=numpy.float32)
    return total


def _signs(key: bytes, index: int, count: int) -> _Signs:
    """Return 1 or -1 for each number of a chunk."""
    drawn = hashlib.shake_128(key + index.to_bytes(8, "little")).digest(-(-count // 8))
    bits = numpy.unpackbits(numpy.frombuffer(drawn, dtype=numpy.uint8), count=count)
    return (1 - 2 * bits.astype(numpy.int8)).astype(numpy.int8)


_kept_signs = functools.lru_cache(maxsize=256)(_signs)
