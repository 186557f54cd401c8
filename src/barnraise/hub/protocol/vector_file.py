"""A run's parameters as one flat vector in a file: chunks, each encoded by a codec, one after the other.

A file begins with eight bytes that say what it is; then for each chunk its length (four bytes, little-endian)
and its payload. How many chunks there are, and of how many numbers, is the reader's own knowledge. So whoever
reads works chunk by chunk in constant memory, and starts anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from barnraise.compression import Codec, CodecRound, PowerSGD, codec_named
from barnraise.core.errors import BarnraiseError, ConfigError, HubError, ProtocolError

MAGIC = b"byvec\x00\x01\n"
_LENGTH = 4


class VectorSink(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


class VectorForm:
    """How a vector of so many numbers is cut and encoded. ``version`` keys what a codec draws at random."""

    def __init__(self, numel: int, chunk: int, codec: str, version: int) -> None:
        made = codec_named(codec)
        if isinstance(made, PowerSGD):
            raise ConfigError("powersgd needs all members at once", hint="Take int8, int4 or topk for a hub.")
        self.codec: Codec = made
        self.numel, self.chunk, self.version = numel, chunk, version
        self.count = -(-numel // chunk)

    def sizes(self, index: int) -> int:
        """The numbers of a chunk."""
        return min(self.chunk, self.numel - index * self.chunk)

    def slice(self, index: int) -> slice:
        return slice(index * self.chunk, index * self.chunk + self.sizes(index))

    def turn(self, index: int) -> CodecRound:
        return CodecRound(f"chunk-{index}", self.version)

    @property
    def most_bytes(self) -> int:
        """Of a file."""
        whole, rest = divmod(self.numel, self.chunk)
        payloads = whole * self.codec.payload_bytes(self.chunk)
        return len(MAGIC) + self.count * _LENGTH + payloads + (self.codec.payload_bytes(rest) if rest else 0)

    def encode(self, values: torch.Tensor, index: int) -> bytes:
        """With its length before it."""
        payload = self.codec.encode(values, self.turn(index))
        data = payload.contiguous().numpy().tobytes()
        return len(data).to_bytes(_LENGTH, "little") + data

    def decode(self, payload: bytes, index: int) -> torch.Tensor:
        """Float32 and finite; ProtocolError otherwise."""
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0).byte()
        return self.codec.decode(data, self.sizes(index), self.turn(index))


class VectorFile:
    """A file of a form, opened for as long as a chunk takes: a hub may hold thousands."""

    def __init__(self, path: Path, form: VectorForm) -> None:
        """Reads only the lengths; ProtocolError unless they fit the form."""
        self.form, self._path = form, path
        self._starts: list[int] = []
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ProtocolError("the file does not begin as a vector does")
            at = len(MAGIC)
            for index in range(form.count):
                file.seek(at)
                length = int.from_bytes(file.read(_LENGTH), "little")
                self._starts.append(at + _LENGTH)
                at += _LENGTH + length
                if length > form.codec.payload_bytes(form.sizes(index)) or at > size:
                    raise ProtocolError(f"chunk {index} of the vector has a length that cannot be")
        if at != size:
            raise ProtocolError(f"{size - at} bytes follow the vector's end")
        self._end = at

    def chunk(self, index: int) -> torch.Tensor:
        start = self._starts[index]
        stop = self._starts[index + 1] - _LENGTH if index + 1 < len(self._starts) else self._end
        descriptor = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            os.lseek(descriptor, start, os.SEEK_SET)
            payload = os.read(descriptor, stop - start)
        finally:
            os.close(descriptor)
        if len(payload) != stop - start:
            raise ProtocolError(f"chunk {index} of the vector is short")
        return self.form.decode(payload, index)

    def chunks(self) -> Iterator[torch.Tensor]:
        return map(self.chunk, range(self.form.count))


def encode_vector(
    sink: VectorSink, flat: torch.Tensor, form: VectorForm, residual: torch.Tensor | None = None
) -> None:
    """A whole vector; ``residual`` is added first, and is what the codec lost afterwards."""

    def chunks() -> Iterator[torch.Tensor]:
        for index in range(form.count):
            place = form.slice(index)
            yield flat[place] if residual is None else residual[place].add_(flat[place])

    sink.write(MAGIC)
    for index, values in enumerate(chunks()):
        data = form.encode(values, index)
        sink.write(data)
        if residual is not None:
            payload = torch.frombuffer(bytearray(data[_LENGTH:]), dtype=torch.uint8)
            form.codec.add(residual[form.slice(index)], payload, form.turn(index), sign=-1.0)


def add_vector(path: Path, form: VectorForm, flat: torch.Tensor, *, is_base: bool = False) -> None:
    """A base sets the vector, a delta is added to it: the same bits everywhere."""
    for index, values in enumerate(VectorFile(path, form).chunks()):
        if is_base:
            flat[form.slice(index)].copy_(values)
        else:
            flat[form.slice(index)].add_(values)


def check_codec(name: str) -> None:
    """HubError for a codec that a hub cannot use."""
    try:
        VectorForm(1, 1, name, 0)
    except BarnraiseError as error:
        raise HubError(error.message, hint=error.hint) from error
