"""The port: numbers in, bytes out, and bytes added to a sum.

A codec holds no state. The same numbers, tensor name and step give the same bytes in every run. A payload is
a flat uint8 tensor, its numbers little-endian; how long it is follows from how many numbers it stands for,
which the receiver knows by itself. Decoding is only multiplications and additions of single numbers, so all
receivers get the same bits, whatever their processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from barnraise.core.errors import CollectiveError, ProtocolError, UnsupportedOperation

_TAKEN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CHUNK = 1 << 17  # numbers at once on a CPU, so that what lies between two passes stays in its cache
_NOT_FINITE_HINT = (
    "Look for the step in which the loss became infinite or NaN: lower the learning rate, clip the gradient, "
    "or scale the loss with a torch.amp.GradScaler."
)


class CodecRound(NamedTuple):
    """Which tensor at which step: names it in messages, and is the key of what is drawn at random."""

    name: str
    step: int = 0


class Codec(ABC):
    """Encodes flat tensors. All members of a group must use the same codec with the same parameters."""

    @property
    def grain(self) -> int:
        """A tensor that is cut in shards is best cut at multiples of so many numbers."""
        return 1

    @property
    def item(self) -> int:
        """So many bytes of a payload make one number, the most significant one last."""
        return 1

    @property
    def is_fixed(self) -> bool:
        """Whether `payload_bytes` is the size of every payload, or only the most that one may have."""
        return True

    @property
    def is_sparse(self) -> bool:
        """Whether a sum of payloads has more numbers than one of them, so that it is not encoded again."""
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """As `codec_named` takes it, with every parameter."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Of so many numbers."""

    def encode(self, tensor: torch.Tensor, turn: CodecRound) -> torch.Tensor:
        """Any shape, any of the four float types; CollectiveError if a number is not finite."""
        return self._encode(as_flat(tensor, turn.name), turn)

    def add(self, total: torch.Tensor, payload: torch.Tensor, turn: CodecRound, sign: float = 1.0) -> None:
        """Add what the payload says to a flat float32 tensor, or take it away with ``sign=-1``.

        ProtocolError if the payload is not one of this codec for so many numbers; the sum is spoiled then.
        """
        size, most = payload.numel(), self.payload_bytes(total.numel())
        if (
            payload.dtype != torch.uint8
            or payload.dim() != 1
            or size > most
            or (self.is_fixed and size != most)
        ):
            raise ProtocolError(
                f"{size} bytes came for {total.numel()} numbers in {self.name}, which takes {most}"
            )
        if total.numel():
            self._add(total, payload.contiguous(), turn, sign)

    def decode(self, payload: torch.Tensor, numel: int, turn: CodecRound) -> torch.Tensor:
        """The numbers, float32; ``numel`` is the receiver's own knowledge, never the sender's word."""
        total = torch.zeros(numel, dtype=torch.float32, device=payload.device)
        self.add(total, payload, turn)
        return total

    @abstractmethod
    def _encode(self, flat: torch.Tensor, turn: CodecRound) -> torch.Tensor: ...

    @abstractmethod
    def _add(self, total: torch.Tensor, payload: torch.Tensor, turn: CodecRound, sign: float) -> None: ...


def as_flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Flat, dense and float32; the same memory where it is that already."""
    if tensor.layout is not torch.strided or tensor.dtype not in _TAKEN:
        raise UnsupportedOperation(
            f"{name!r} is a {str(tensor.layout).removeprefix('torch.')} tensor of "
            f"{str(tensor.dtype).removeprefix('torch.')}: only dense float tensors can be compressed",
            hint="Convert it with .to_dense() or .float() first, or let it travel uncompressed.",
        )
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def refuse_unless_finite(values: torch.Tensor, name: str) -> None:
    """CollectiveError that names the tensor; ``values`` may be the extremes of its parts."""
    if not is_finite(values):
        raise CollectiveError(f"{name!r} holds numbers that are not finite in float32", hint=_NOT_FINITE_HINT)


def is_finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    least, most = torch.aminmax(values)  # NaN passes through both; much faster than isfinite().all()
    return bool(torch.isfinite(least)) and bool(torch.isfinite(most))


def require_finite(values: torch.Tensor) -> None:
    """What came from a peer."""
    if not is_finite(values):
        raise ProtocolError("a payload holds numbers that are not finite", not_finite=True)


def read(payload: torch.Tensor, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """So many numbers that begin at a byte of a payload, wherever that lies in memory."""
    data = payload[first : first + count * dtype.itemsize]
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Rows to work on at once; on a GPU all of them, because each launch costs more than the cache saves."""
    at_once = max(1, _CHUNK // max(1, width)) if device.type == "cpu" else max(1, rows)
    for first in range(0, rows, at_once):
        yield slice(first, min(first + at_once, rows))
