"""topk codecs: the largest numbers of each block, with about 8 bits for each position.

`topk` has 2 bits for each value: a sign and one of two magnitudes. Each block has its own two, the means of
its kept numbers above and below their mean. `topk-fp32` has the values themselves.

Positions are sorted and stored as an Elias-Fano code: low bits as they are, high bits as distances between
ones in a bit row. All choices of positions take the same space, which is close to the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch

from barnraise.compression.allreduce.deterministic_sum import sum_rows
from barnraise.compression.codecs.codec import (
    Codec,
    CodecRound,
    check_input_finite,
    check_payload_finite,
    chunks,
    read,
)
from barnraise.core.errors import ConfigError, ProtocolError

MAX_BLOCK = 1 << 20
_LEVELS = 2
_LEVEL_BYTES = 2 * _LEVELS
_CODE_BITS = 2
_FLOAT_BYTES = 4

Bits = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]
Numbers = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]


class _Rows(NamedTuple):
    """Equal blocks as rows, their first position in tensor and payload, and the number of kept values.

    ``code_bits``: of each value; 0 if the values stand before the positions as float32.
    """

    first: int
    first_byte: int
    rows: int
    width: int
    k: int
    code_bits: int

    @property
    def last(self) -> int:
        return self.first + self.rows * self.width

    @property
    def low_bits(self) -> int:
        return (self.width // self.k).bit_length() - 1

    @property
    def high_bits(self) -> int:
        return ((self.width - 1) >> self.low_bits) + self.k

    @property
    def bits(self) -> int:
        return self.high_bits + self.k * (self.low_bits + self.code_bits)

    @property
    def head_bytes(self) -> int:
        return _LEVEL_BYTES if self.code_bits else _FLOAT_BYTES * self.k

    @property
    def row_bytes(self) -> int:
        return self.head_bytes + -(-self.bits // 8)

    @property
    def last_byte(self) -> int:
        return self.first_byte + self.rows * self.row_bytes


@dataclass(frozen=True)
class TopK(Codec):
    """The largest numbers of each block, in a few bits each."""

    k: int = 64
    block: int = 4096
    is_sparse = True
    has_values = False

    @classmethod
    def of(cls, ratio: float | None = None, **counts: int) -> TopK:
        """Create a codec that keeps ``k`` numbers of each block, or a share of them."""
        if ratio is None:
            return cls(**counts)
        if "k" in counts:
            raise ConfigError("topk is given both k and ratio", hint="Give one of them.")
        if not 0 < ratio <= 1:
            raise ConfigError(
                f"topk cannot keep a share of {ratio:g}",
                hint="Give a ratio above 0 and up to 1, such as 0.01.",
            )
        return cls(k=max(1, round(ratio * counts.get("block", cls.block))), **counts)

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.block <= MAX_BLOCK:
            raise ConfigError(
                f"topk cannot keep {self.k} numbers of each {self.block}",
                hint=f"Give a block of at most {MAX_BLOCK} and a k from 1 to the block, such as "
                "topk:k=64,block=4096.",
            )

    @property
    def name(self) -> str:
        return f"topk:k={self.k},block={self.block}"

    @property
    def grain(self) -> int:
        return self.block

    def payload_bytes(self, numel: int) -> int:
        return max((part.last_byte for part in self._parts(numel)), default=0)

    def _parts(self, numel: int) -> Iterator[_Rows]:
        """Yield the full blocks, then the shorter one, which keeps the same share rounded up."""
        whole, rest = divmod(numel, self.block)
        code_bits = 0 if self.has_values else _CODE_BITS
        full = _Rows(0, 0, whole, self.block, self.k, code_bits)
        if whole:
            yield full
        if rest:
            k = -(-rest * self.k // self.block)
            yield _Rows(whole * self.block, full.last_byte, 1, rest, k, code_bits)

    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        check_input_finite(flat, codec_round.name)
        device, flat = flat.device, flat.cpu()
        payload = torch.empty(self.payload_bytes(flat.numel()), dtype=torch.uint8)
        for part in self._parts(flat.numel()):
            rows = flat[part.first : part.last].view(part.rows, part.width)
            positions = torch.cat(
                [
                    _largest(rows[rows_slice], part.k)
                    for rows_slice in chunks(part.rows, part.width, rows.device)
                ]
            )
            values = rows.gather(1, positions)
            head, codes = self._split(values)
            target = payload[part.first_byte : part.last_byte].view(part.rows, part.row_bytes)
            target[:, : part.head_bytes] = head.view(torch.uint8)
            target[:, part.head_bytes :] = torch.from_numpy(_pack(positions.numpy(), codes.numpy(), part))
        return payload.to(device)

    def _add(self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float) -> None:
        payload = payload.cpu()
        for part in self._parts(total.numel()):
            source = payload[part.first_byte : part.last_byte].view(part.rows, part.row_bytes)
            positions, codes = _unpack(source[:, part.head_bytes :].numpy(), part)
            values = self._join(source[:, : part.head_bytes].reshape(-1), codes)
            rows = total[part.first : part.last].view(part.rows, part.width)
            # Positions of a row are distinct, so the order of these additions does not matter.
            rows.scatter_add_(1, positions.to(total.device), values.mul_(sign).to(total.device))

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what stands before the positions of each row, and the codes after them."""
        levels, is_high = _levels_of(values.abs())
        return levels, is_high.to(torch.uint8).mul_(2).add_(values < 0)

    def _join(self, head: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the values of each row. Raise ProtocolError if one is not a number."""
        rows = codes.shape[0]
        levels = read(head, 0, rows * _LEVELS, torch.bfloat16).to(torch.float32).view(rows, _LEVELS)
        if not (float(levels.min()) >= 0 and float(levels.max()) < float("inf")):  # this form rejects NaN
            raise ProtocolError("a payload holds a magnitude that is negative or not finite", not_finite=True)
        return levels.gather(1, codes >> 1).mul_(1.0 - 2.0 * (codes & 1))


@dataclass(frozen=True)
class TopKFp32(TopK):
    """The largest numbers of each block, without any rounding of them."""

    has_values = True

    @property
    def name(self) -> str:
        return f"topk-fp32:k={self.k},block={self.block}"

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values.contiguous(), torch.zeros(values.shape, dtype=torch.uint8)

    def _join(self, head: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        values = read(head, 0, codes.numel(), torch.float32).clone()
        check_payload_finite(values)
        return values.view(codes.shape)


def _largest(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Return the sorted positions of the ``k`` largest magnitudes of each row.

    Of equal ones the first win.
    """
    width = rows.shape[1]
    keys = rows.abs().view(torch.int32).numpy()  # magnitudes sort like their bits
    threshold = numpy.partition(keys, width - k, axis=1)[:, width - k : width - k + 1]
    is_taken = keys >= threshold
    surplus = numpy.count_nonzero(is_taken, axis=1) - k
    for row in numpy.flatnonzero(surplus):
        is_taken[row, numpy.flatnonzero(keys[row] == threshold[row])[-surplus[row] :]] = False
    return torch.from_numpy(numpy.flatnonzero(is_taken).reshape(-1, k) % width)


def _levels_of(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two magnitudes for each row, and a mask of the numbers with the higher one."""
    by_row = magnitudes.double().t().contiguous()
    whole = sum_rows(by_row.clone())
    is_high = by_row * by_row.shape[0] > whole
    highs = is_high.sum(0)
    above = sum_rows(by_row * is_high)
    lows = by_row.shape[0] - highs  # never 0: some value is not above the mean
    low = (whole - above).clamp_(min=0.0) / lows
    high = torch.where(highs > 0, above / highs.clamp(min=1), low)
    max_value = torch.finfo(torch.bfloat16).max
    levels = torch.stack([low, high], dim=1).clamp_(max=max_value).to(torch.bfloat16)
    return levels, is_high.t()


def _pack(positions: Numbers, codes: Bits, part: _Rows) -> Bits:
    """Return one row of bytes for each block: high bits, low bits, codes if there are any."""
    bits = numpy.zeros((part.rows, part.bits), dtype=numpy.uint8)
    ones = (positions >> part.low_bits) + numpy.arange(part.k)
    numpy.put_along_axis(bits, ones, 1, axis=1)
    lows = bits[:, part.high_bits : part.high_bits + part.k * part.low_bits]
    lows[:] = _spread(positions, part.low_bits).reshape(part.rows, -1)
    bits[:, part.high_bits + part.k * part.low_bits :] = _spread(codes, part.code_bits).reshape(part.rows, -1)
    return numpy.packbits(bits, axis=1, bitorder="little")


def _unpack(data: Bits, part: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and codes.

    Raise ProtocolError unless there are ``k`` increasing positions within the block.
    """
    bits = numpy.unpackbits(data, axis=1, count=part.bits, bitorder="little")
    highs, rest = bits[:, : part.high_bits], bits[:, part.high_bits :]
    if not (highs.sum(axis=1, dtype=numpy.int64) == part.k).all():
        raise ProtocolError("a payload holds a wrong number of positions")
    ones = numpy.nonzero(highs)[1].reshape(part.rows, part.k)
    lows = _gathered(rest[:, : part.k * part.low_bits], part, part.low_bits)
    positions = ((ones - numpy.arange(part.k)) << part.low_bits) | lows
    if positions.max() >= part.width or not (numpy.diff(positions, axis=1) > 0).all():
        raise ProtocolError("a payload holds positions that are out of their block or out of order")
    codes = _gathered(rest[:, part.k * part.low_bits :], part, part.code_bits)
    return torch.from_numpy(positions), torch.from_numpy(codes)


def _spread(values: Numbers | Bits, bits: int) -> Bits:
    """Return the lowest bits of each number, one by one."""
    wide = values.astype(numpy.int64)[..., None]
    spread: Bits = (wide >> numpy.arange(bits, dtype=numpy.int64) & 1).astype(numpy.uint8)
    return spread


def _gathered(bits: Bits, part: _Rows, width: int) -> Numbers:
    split = bits.reshape(part.rows, part.k, width).astype(numpy.int64)
    gathered: Numbers = (split << numpy.arange(width)).sum(axis=2)
    return gathered
