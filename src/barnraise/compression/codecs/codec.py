"""Codec interface: encodes numbers into bytes, and adds decoded bytes to a sum.

A codec holds no state. The same numbers, tensor name and step give the same bytes in every run. A payload
is a flat uint8 tensor with little-endian numbers. Its length follows from the number of encoded values,
which the receiver knows by itself. Decoding uses only multiplications and additions of single numbers, so
all receivers get the same bits on any processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from barnraise.core.errors import CollectiveError, ProtocolError, UnsupportedOperation

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CHUNK = 1 << 17  # numbers at once on a CPU, so that intermediate values stay in the cache
_NOT_FINITE_HINT = (
    "Look for the step in which the loss became infinite or NaN: lower the learning rate, clip the gradient, "
    "or scale the loss with a torch.amp.GradScaler."
)


class CodecRound(NamedTuple):
    """Tensor name and step of one encoding. Error messages name it, and it seeds random choices."""

    name: str
    step: int = 0


class Codec(ABC):
    """Encoder of flat tensors. All members of a group must use the same codec with the same parameters."""

    @property
    def grain(self) -> int:
        """Return the block size at whose multiples a tensor should be cut into shards."""
        return 1

    @property
    def item(self) -> int:
        """Return the number of payload bytes that form one number, the most significant byte last."""
        return 1

    @property
    def is_fixed(self) -> bool:
        """Return True if every payload has `payload_bytes` bytes, False if that is only the maximum."""
        return True

    @property
    def is_sparse(self) -> bool:
        """Return True if a sum of payloads has more numbers than one payload.

        Such a sum is not encoded again.
        """
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name that `codec_named` accepts, with every parameter."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Return the payload size of ``numel`` numbers."""

    def encode(self, tensor: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        """Encode a tensor of any shape and float type. Raise CollectiveError if a number is not finite."""
        return self._encode(as_flat(tensor, codec_round.name), codec_round)

    def add(
        self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float = 1.0
    ) -> None:
        """Add the decoded payload to a flat float32 tensor, or subtract it with ``sign=-1``.

        Raise ProtocolError if the payload does not fit this codec and size. The sum is invalid then.
        """
        size, max_bytes = payload.numel(), self.payload_bytes(total.numel())
        if (
            payload.dtype != torch.uint8
            or payload.dim() != 1
            or size > max_bytes
            or (self.is_fixed and size != max_bytes)
        ):
            raise ProtocolError(
                f"received {size} bytes for {total.numel()} numbers in {self.name}, expected {max_bytes}"
            )
        if total.numel():
            self._add(total, payload.contiguous(), codec_round, sign)

    def decode(self, payload: torch.Tensor, numel: int, codec_round: CodecRound) -> torch.Tensor:
        """Decode ``numel`` numbers to float32.

        The receiver knows ``numel`` and never takes it from the sender.
        """
        total = torch.zeros(numel, dtype=torch.float32, device=payload.device)
        self.add(total, payload, codec_round)
        return total

    @abstractmethod
    def _encode(self, flat: torch.Tensor, codec_round: CodecRound) -> torch.Tensor: ...

    @abstractmethod
    def _add(
        self, total: torch.Tensor, payload: torch.Tensor, codec_round: CodecRound, sign: float
    ) -> None: ...


def as_flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a flat, dense float32 tensor. It shares memory with the input if possible."""
    if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
        raise UnsupportedOperation(
            f"{name!r} is a {str(tensor.layout).removeprefix('torch.')} tensor of "
            f"{str(tensor.dtype).removeprefix('torch.')}: only dense float tensors can be compressed",
            hint="Convert it with .to_dense() or .float() first, or send it uncompressed.",
        )
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def check_input_finite(values: torch.Tensor, name: str) -> None:
    """Raise CollectiveError with the tensor's name if a value is not finite.

    ``values`` may be the extremes of the tensor's blocks.
    """
    if not is_finite(values):
        raise CollectiveError(f"{name!r} holds numbers that are not finite in float32", hint=_NOT_FINITE_HINT)


def is_finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    smallest, largest = torch.aminmax(values)  # NaN propagates to both; much faster than isfinite().all()
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))


def check_payload_finite(values: torch.Tensor) -> None:
    """Raise ProtocolError if values of a peer are not finite."""
    if not is_finite(values):
        raise ProtocolError("a payload holds numbers that are not finite", not_finite=True)


def read(payload: torch.Tensor, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Read ``count`` numbers from byte ``first`` of a payload, at any alignment."""
    data = payload[first : first + count * dtype.itemsize]
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of rows that fit the CPU cache.

    On a GPU one slice has all rows, because launches cost more.
    """
    at_once = max(1, _CHUNK // max(1, width)) if device.type == "cpu" else max(1, rows)
    for first in range(0, rows, at_once):
        yield slice(first, min(first + at_once, rows))
