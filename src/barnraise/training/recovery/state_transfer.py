"""State for those who have none: from all who have it at once, each sending its stripe, checked by a hash."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import FlatState, as_bytes, byte_view, digest, shapes
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.training.gradients.reducer import PendingWork

LARGEST_SKELETON = 64 << 20
_CHUNK = 4 << 20
_SKETCH_BYTES = 64 << 10
_WINDOW = 4  # pieces on their way from one donor


class TensorChannel(Protocol):
    """What carries tensors between two members."""

    def begin_send(self, tensor: torch.Tensor, to: int) -> PendingWork: ...

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> PendingWork: ...


class TransferMembers(Protocol):
    def gather(self, data: bytes) -> Sequence[bytes]: ...


class _Head(msgspec.Struct, frozen=True, array_like=True):
    skeleton: int
    digest: bytes


_heads = msgspec.msgpack.Decoder(_Head)


def give_state(
    wire: TensorChannel, me: int, parts: FlatState, donors: Sequence[int], fresh: Sequence[int]
) -> None:
    """Of every chunk that is this donor's."""
    place = donors.index(me)
    head = msgspec.msgpack.encode(_Head(len(parts.skeleton), digest(parts)))
    for rank in fresh:
        if place == 0:
            send_bytes(wire, head, rank)
            send_bytes(wire, parts.skeleton, rank)
        send_stripe(wire, chunks(parts.tensors), rank, place, len(donors))


def receive_state(wire: TensorChannel, donors: Sequence[int], most_bytes: int) -> FlatState:
    """ProtocolError if what came is not what was promised."""
    head = decode(_heads, receive_bytes(wire, donors[0], 4096), "a donor's state cannot be read")
    skeleton = receive_bytes(wire, donors[0], LARGEST_SKELETON)
    tensors = room_for(skeleton, most_bytes)
    receive_stripes(wire, chunks(tensors), donors, lambda number: None)
    parts = FlatState(skeleton, tensors)
    if digest(parts) != head.digest or len(skeleton) != head.skeleton:
        raise ProtocolError("the state that came has another hash than was promised")
    return parts


def room_for(skeleton: bytes, most_bytes: int) -> list[torch.Tensor]:
    """Memory for the tensors of a state; ProtocolError if it is more than this model's can be."""
    found = shapes(skeleton)
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in found)
    if size > most_bytes:
        raise ProtocolError(f"a donor announces a state of {size} bytes, at most {most_bytes} are possible")
    return [torch.empty(shape, dtype=dtype) for dtype, shape in found]


def same_as(members: TransferMembers, fingerprint: bytes, first: int) -> set[int]:
    """Who has the state of ``first`` already, by a fingerprint of each member's."""
    said = members.gather(fingerprint)
    return {rank for rank, one in enumerate(said) if one == said[first]}


def sketch(parts: FlatState, turn: int) -> bytes:
    """A hash of a window of every tensor, another one at each turn.

    Who followed every result differs nowhere, or nearly everywhere.
    """
    hasher = blake3(parts.skeleton)
    for tensor in parts.tensors:
        hasher.update(as_bytes(window_of(tensor, _SKETCH_BYTES, turn)))
    return hasher.digest()


def window_of(tensor: torch.Tensor, size: int, turn: int) -> torch.Tensor:
    """So many bytes of it; as turns go by, all of it."""
    flat = tensor.detach().reshape(-1)
    width = size // flat.element_size()
    first = (turn % max(1, -(-flat.numel() // width))) * width
    return flat[first : first + width]


def chunks(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Their bytes in pieces, in the same order on every member."""
    buffers = [byte_view(tensor.contiguous()) for tensor in tensors]
    return [
        buffer[first : first + _CHUNK] for buffer in buffers for first in range(0, buffer.numel(), _CHUNK)
    ]


def send_stripe(
    wire: TensorChannel, pieces: Sequence[torch.Tensor], to: int, place: int = 0, donors: int = 1
) -> None:
    """Every piece that is this donor's, a few at a time."""
    leaving: deque[PendingWork] = deque()
    for piece in pieces[place::donors]:
        leaving.append(wire.begin_send(piece, to))
        if len(leaving) >= _WINDOW:
            leaving.popleft().wait()
    for one in leaving:
        one.wait()


def receive_stripes(
    wire: TensorChannel,
    pieces: Sequence[torch.Tensor],
    donors: Sequence[int],
    has_come: Callable[[int], None],
) -> None:
    """Piece by piece from the donors in turn; ``has_come`` is told the place of each."""
    coming: deque[tuple[int, PendingWork]] = deque()
    for place, piece in enumerate(pieces):
        coming.append((place, wire.begin_receive(piece, donors[place % len(donors)])))
        if len(coming) >= _WINDOW * len(donors):
            _await_first(coming, has_come)
    while coming:
        _await_first(coming, has_come)


def _await_first(coming: deque[tuple[int, PendingWork]], has_come: Callable[[int], None]) -> None:
    place, travelling = coming.popleft()
    travelling.wait()
    has_come(place)


def send_bytes(wire: TensorChannel, data: bytes, to: int) -> None:
    wire.begin_send(torch.tensor([len(data)]), to).wait()
    wire.begin_send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to).wait()


def receive_bytes(wire: TensorChannel, sender: int, most: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    wire.begin_receive(length, sender).wait()
    if not 0 < int(length) <= most:
        raise ProtocolError(f"a donor announces {int(length)} bytes, at most {most} are possible")
    data = torch.zeros(int(length), dtype=torch.uint8)
    wire.begin_receive(data, sender).wait()
    return bytes(data.numpy())
