"""State transfer: all donors send at once, each its stripe of the chunks; a hash verifies the result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import FlatState, byte_view, digest, shapes, tensor_bytes
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.training.group.interface import ByteGatherer, PendingWork, TensorChannel

MAX_SKELETON = 64 << 20
_CHUNK = 4 << 20
_SKETCH_BYTES = 64 << 10
_WINDOW = 4  # chunks in flight from one donor


class _StateHeader(msgspec.Struct, frozen=True, array_like=True):
    skeleton: int
    digest: bytes


_headers = msgspec.msgpack.Decoder(_StateHeader)


def send_state(
    channel: TensorChannel, rank: int, parts: FlatState, donors: Sequence[int], receivers: Sequence[int]
) -> None:
    """Send this donor's stripe of the state to every receiver."""
    place = donors.index(rank)
    header = msgspec.msgpack.encode(_StateHeader(len(parts.skeleton), digest(parts)))
    for receiver in receivers:
        if place == 0:
            send_bytes(channel, header, receiver)
            send_bytes(channel, parts.skeleton, receiver)
        send_stripe(channel, chunks(parts.tensors), receiver, place, len(donors))


def receive_state(channel: TensorChannel, donors: Sequence[int], max_bytes: int) -> FlatState:
    """Receive the state from all donors. Raise ProtocolError if its hash is wrong."""
    header = decode(_headers, receive_bytes(channel, donors[0], 4096), "a donor's state cannot be read")
    skeleton = receive_bytes(channel, donors[0], MAX_SKELETON)
    tensors = allocate(skeleton, max_bytes)
    receive_stripes(channel, chunks(tensors), donors, lambda number: None)
    parts = FlatState(skeleton, tensors)
    if digest(parts) != header.digest or len(skeleton) != header.skeleton:
        raise ProtocolError("the received state does not have the hash that was announced")
    return parts


def allocate(skeleton: bytes, max_bytes: int) -> list[torch.Tensor]:
    """Allocate the tensors of a state. Raise ProtocolError if they exceed ``max_bytes``."""
    forms = shapes(skeleton)
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in forms)
    if size > max_bytes:
        raise ProtocolError(f"a donor announces a state of {size} bytes, at most {max_bytes} are possible")
    return [torch.empty(shape, dtype=dtype) for dtype, shape in forms]


def ranks_with_same_state(group: ByteGatherer, fingerprint: bytes, reference: int) -> set[int]:
    """Return the ranks whose fingerprint equals that of rank ``reference``."""
    fingerprints = group.all_gather_bytes(fingerprint)
    return {rank for rank, other in enumerate(fingerprints) if other == fingerprints[reference]}


def sketch(parts: FlatState, turn: int) -> bytes:
    """Hash a window of every tensor, a different one at each turn.

    That suffices for a worker that replayed every step: it differs nowhere, or nearly everywhere.
    """
    hasher = blake3(parts.skeleton)
    for tensor in parts.tensors:
        hasher.update(tensor_bytes(window_of(tensor, _SKETCH_BYTES, turn)))
    return hasher.digest()


def window_of(tensor: torch.Tensor, size: int, turn: int) -> torch.Tensor:
    """Return ``size`` bytes of a tensor; successive turns cover all of it."""
    flat = tensor.detach().reshape(-1)
    width = size // flat.element_size()
    first = (turn % max(1, -(-flat.numel() // width))) * width
    return flat[first : first + width]


def chunks(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split the bytes of tensors into chunks, in the same order on every worker."""
    buffers = [byte_view(tensor.contiguous()) for tensor in tensors]
    return [
        buffer[first : first + _CHUNK] for buffer in buffers for first in range(0, buffer.numel(), _CHUNK)
    ]


def send_stripe(
    channel: TensorChannel, pieces: Sequence[torch.Tensor], to: int, place: int = 0, donors: int = 1
) -> None:
    """Send every chunk of this donor's stripe, a few at a time."""
    in_flight: deque[PendingWork] = deque()
    for piece in pieces[place::donors]:
        in_flight.append(channel.send_async(piece, to))
        if len(in_flight) >= _WINDOW:
            in_flight.popleft().wait()
    for work in in_flight:
        work.wait()


def receive_stripes(
    channel: TensorChannel,
    pieces: Sequence[torch.Tensor],
    donors: Sequence[int],
    on_received: Callable[[int], None],
) -> None:
    """Receive the chunks from the donors in turn; ``on_received`` gets the index of each."""
    in_flight: deque[tuple[int, PendingWork]] = deque()
    for index, piece in enumerate(pieces):
        in_flight.append((index, channel.receive_async(piece, donors[index % len(donors)])))
        if len(in_flight) >= _WINDOW * len(donors):
            _wait_for_first(in_flight, on_received)
    while in_flight:
        _wait_for_first(in_flight, on_received)


def _wait_for_first(in_flight: deque[tuple[int, PendingWork]], on_received: Callable[[int], None]) -> None:
    index, work = in_flight.popleft()
    work.wait()
    on_received(index)


def send_bytes(channel: TensorChannel, data: bytes, to: int) -> None:
    """Send bytes with a length prefix."""
    channel.send_async(torch.tensor([len(data)]), to).wait()
    channel.send_async(torch.frombuffer(bytearray(data), dtype=torch.uint8), to).wait()


def receive_bytes(channel: TensorChannel, sender: int, max_bytes: int) -> bytes:
    """Receive bytes with a length prefix. Raise ProtocolError if there are too many."""
    length = torch.zeros(1, dtype=torch.int64)
    channel.receive_async(length, sender).wait()
    if not 0 < int(length) <= max_bytes:
        raise ProtocolError(f"a donor announces {int(length)} bytes, at most {max_bytes} are possible")
    data = torch.zeros(int(length), dtype=torch.uint8)
    channel.receive_async(data, sender).wait()
    return bytes(data.numpy())
