"""Vector file: a run's parameters as one flat vector, in chunks that a codec encodes.

A file starts with eight magic bytes. Each chunk follows with its length (four bytes, little-endian) and its
payload. The reader knows the number and the sizes of the chunks. So it can work in constant memory and start
at any chunk.
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
    """A target that bytes are written to."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class VectorForm:
    """Chunking and encoding of a vector. ``version`` seeds the random numbers of a codec."""

    def __init__(self, numel: int, chunk: int, codec: str, version: int) -> None:
        made = codec_named(codec)
        if isinstance(made, PowerSGD):
            raise ConfigError("powersgd needs all members at once", hint="Take int8, int4 or topk for a hub.")
        self.codec: Codec = made
        self.numel, self.chunk, self.version = numel, chunk, version
        self.count = -(-numel // chunk)

    def chunk_size(self, index: int) -> int:
        """Return how many numbers a chunk has."""
        return min(self.chunk, self.numel - index * self.chunk)

    def slice(self, index: int) -> slice:
        """Return the part of the vector that a chunk covers."""
        return slice(index * self.chunk, index * self.chunk + self.chunk_size(index))

    def codec_round(self, index: int) -> CodecRound:
        return CodecRound(f"chunk-{index}", self.version)

    @property
    def max_bytes(self) -> int:
        """Return the maximum size of a file."""
        whole, rest = divmod(self.numel, self.chunk)
        payloads = whole * self.codec.payload_bytes(self.chunk)
        return len(MAGIC) + self.count * _LENGTH + payloads + (self.codec.payload_bytes(rest) if rest else 0)

    def encode(self, values: torch.Tensor, index: int) -> bytes:
        """Encode a chunk, with its length in front."""
        payload = self.codec.encode(values, self.codec_round(index))
        data = payload.contiguous().numpy().tobytes()
        return len(data).to_bytes(_LENGTH, "little") + data

    def decode(self, payload: bytes, index: int) -> torch.Tensor:
        """Decode a payload to finite float32 numbers. Raise ProtocolError if that fails."""
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0).byte()
        return self.codec.decode(data, self.chunk_size(index), self.codec_round(index))


class VectorFile:
    """A vector file, opened only while a chunk is read: a hub may hold thousands."""

    def __init__(self, path: Path, form: VectorForm) -> None:
        """Read the lengths of the chunks. Raise ProtocolError unless they fit the form."""
        self.form, self._path = form, path
        self._starts: list[int] = []
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ProtocolError("the file is not a vector file")
            at = len(MAGIC)
            for index in range(form.count):
                file.seek(at)
                length = int.from_bytes(file.read(_LENGTH), "little")
                self._starts.append(at + _LENGTH)
                at += _LENGTH + length
                if length > form.codec.payload_bytes(form.chunk_size(index)) or at > size:
                    raise ProtocolError(f"chunk {index} of the vector has an impossible length")
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
            raise ProtocolError(f"chunk {index} of the vector is truncated")
        return self.form.decode(payload, index)

    def chunks(self) -> Iterator[torch.Tensor]:
        return map(self.chunk, range(self.form.count))


def encode_vector(
    sink: VectorSink, flat: torch.Tensor, form: VectorForm, residual: torch.Tensor | None = None
) -> None:
    """Write a whole vector.

    ``residual`` (error feedback) is added first, and set to the new quantization error.
    """

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
            form.codec.add(residual[form.slice(index)], payload, form.codec_round(index), sign=-1.0)


def add_vector(path: Path, form: VectorForm, flat: torch.Tensor, *, is_base: bool = False) -> None:
    """Add a delta to the vector, or set it to a base. The result has the same bits on every machine."""
    for index, values in enumerate(VectorFile(path, form).chunks()):
        if is_base:
            flat[form.slice(index)].copy_(values)
        else:
            flat[form.slice(index)].add_(values)


def check_codec(name: str) -> None:
    """Raise HubError for a codec that a hub cannot use."""
    try:
        VectorForm(1, 1, name, 0)
    except BarnraiseError as error:
        raise HubError(error.message, hint=error.hint) from error
