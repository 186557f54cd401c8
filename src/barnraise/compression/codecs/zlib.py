"""zlib on top of another codec, for planes of bytes that compress well.

A payload of halves or floats is cut into planes first: all lowest bytes, ..., all highest bytes. Signs and
exponents of gradients repeat and shrink to about a third; the lowest mantissa bits never shrink. A few
samples decide if a plane is compressed. A byte before each plane stores the decision.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy
import torch

from barnraise.compression.codecs.codec import Codec, CodecRound
from barnraise.core.errors import ProtocolError

_PLAIN, _DEFLATED = 0, 1
_LENGTH_BYTES = 8
_SAMPLE = 16 << 10
_SAMPLES = 3
_MAX_RATIO = 0.97


@dataclass(frozen=True)
class ZlibCodec(Codec):
    """zlib payload, for each plane: a byte; if it is 1, a length and deflated bytes, else the plane."""

    inner: Codec
    is_fixed = False

    def __post_init__(self) -> None:
        if not self.inner.is_fixed:
            raise ValueError("a packed codec cannot be packed again")

    @property
    def name(self) -> str:
        return f"{self.inner.name}+zlib"

    @property
    def grain(self) -> int:
        return self.inner.grain

    @property
    def is_sparse(self) -> bool:
        return self.inner.is_sparse

    def payload_bytes(self, numel: int) -> int:
        return self.inner.payload_bytes(numel) + self.inner.item

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        plain = self.inner.encode(flat, codec_round).cpu().numpy()
        planes = []
        for number in range(self.inner.item):
            data = plain[number :: self.inner.item].tobytes()
            deflated = _deflate(data) if _is_compressible(data) else data
            if len(deflated) + _LENGTH_BYTES < len(data):
                planes += [bytes([_DEFLATED]), len(deflated).to_bytes(_LENGTH_BYTES, "little"), deflated]
            else:
                planes += [bytes([_PLAIN]), data]
        return torch.frombuffer(bytearray(b"".join(planes)), dtype=torch.uint8).to(flat.device)

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        size = self.inner.payload_bytes(total.numel()) // self.inner.item
        rest = payload.cpu().numpy().data
        plain = numpy.empty((size, self.inner.item), dtype=numpy.uint8)
        for number in range(self.inner.item):
            data, rest = _next_plane(rest, size)
            plain[:, number] = numpy.frombuffer(data, dtype=numpy.uint8)
        if len(rest):
            raise ProtocolError("a packed payload is longer than its header says")
        self.inner.add(total, torch.from_numpy(plain.reshape(-1)).to(total.device), codec_round, sign)


def _next_plane(rest: memoryview, size: int) -> tuple[bytes | memoryview, memoryview]:
    """Return one plane of ``size`` bytes, and the rest of the payload."""
    if len(rest) and rest[0] == _PLAIN and len(rest) > size:
        return rest[1 : 1 + size], rest[1 + size :]
    start = 1 + _LENGTH_BYTES
    if len(rest) < start or rest[0] != _DEFLATED:
        raise ProtocolError("a packed payload is truncated or starts with an unknown mark")
    last = start + int.from_bytes(rest[1:start], "little")
    if last > len(rest):
        raise ProtocolError("a packed payload is shorter than it says")
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflater.decompress(rest[start:last], size + 1)  # never more than the expected size
    except zlib.error as error:
        raise ProtocolError(f"a packed payload cannot be inflated: {error}") from error
    if len(data) != size or not inflater.eof or inflater.unused_data:
        raise ProtocolError("a packed payload has a wrong number of bytes")
    return data, rest[last:]


def _deflate(data: bytes) -> bytes:
    # Bytes of gradients repeat, sequences do not: run lengths and frequencies are enough.
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflater.compress(data) + deflater.flush()


def _is_compressible(data: bytes) -> bool:
    if len(data) <= _SAMPLES * _SAMPLE:
        return True
    step = (len(data) - _SAMPLE) // (_SAMPLES - 1)
    sample = b"".join(data[place : place + _SAMPLE] for place in range(0, _SAMPLES * step, step))
    return len(_deflate(sample)) < _MAX_RATIO * len(sample)
