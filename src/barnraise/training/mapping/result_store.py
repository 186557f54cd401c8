"""Results of one map by item, encoded, in a file: memory holds only where each of them is.

With a path the file survives the process: a run that restarts keeps what it had finished. It is a header and
then one record for each result; of two records of an item the later one counts. A record that was cut short
ends the file.

A result is confirmed when all workers of a group have received it. Another one, such as a result that was
read from the file, may have been computed again elsewhere, with other bits. So it can be replaced.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy
import numpy.typing
from blake3 import blake3

from barnraise.core.errors import ProtocolError
from barnraise.training.mapping.encoded_values import MAX_RESULT_BYTES

MAX_ITEMS = 1 << 24
_MAGIC = b"barnraise map 1\n"
_RECORD = struct.Struct("<QQ32s")  # item, length, hash
_MEMORY_BYTES = 64 << 20
_DIGESTS = 1 << 256


class ResultStore:
    """Encoded results of the items ``0`` to ``total - 1``. Its methods may be called from any thread.

    ``fingerprint``: what the items are; a file of other items is not read.
    """

    def __init__(self, total: int, fingerprint: bytes, path: Path | None = None) -> None:
        self.total, self.fingerprint = total, fingerprint
        self._lock = threading.Lock()
        self._places: dict[int, tuple[int, int]] = {}  # offset and length
        self._confirmed = numpy.zeros(total, bool)
        self._digest = 0
        header = _MAGIC + blake3(fingerprint + total.to_bytes(8, "little")).digest()
        if path is None:
            self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 - closed by close
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            self._file = os.fdopen(handle, "r+b")
            if self._file.read(len(header)) == header:
                self._read_records()
                return
            self._file.seek(0)
            self._file.truncate()
        self._file.write(header)
        self._end = len(header)

    def __len__(self) -> int:
        """Return the number of results."""
        return len(self._places)

    def __contains__(self, item: int) -> bool:
        return item in self._places

    @property
    def is_complete(self) -> bool:
        return len(self._places) == self.total

    def add(self, item: int, content: bytes) -> None:
        """Keep the result of an item, unless there is one."""
        self._check(item)
        with self._lock:
            if item not in self._places:
                self._write(item, content)

    def replace(self, item: int, content: bytes) -> None:
        """Keep the result of an item instead of one that is not confirmed."""
        self._check(item)
        with self._lock:
            if item in self._places:
                if self._confirmed[item]:
                    return
                old = self._read(item)
                if old == content:
                    return
                self._digest = (self._digest - _mixed(item, blake3(old).digest())) % _DIGESTS
            self._write(item, content)

    def confirm(self, items: Iterable[int]) -> None:
        """Note that all workers of the group have the results of these items."""
        self._confirmed[list(items)] = True

    def _check(self, item: int) -> None:
        if not 0 <= item < self.total:
            raise ProtocolError(f"a map of {self.total} items got a result of item {item}")

    def _write(self, item: int, content: bytes) -> None:
        digest = blake3(content).digest()
        self._file.seek(self._end)
        self._file.write(_RECORD.pack(item, len(content), digest))
        self._file.write(content)
        self._file.flush()
        self._places[item] = (self._end + _RECORD.size, len(content))
        self._digest = (self._digest + _mixed(item, digest)) % _DIGESTS
        self._end += _RECORD.size + len(content)

    def _read(self, item: int) -> bytes:
        offset, length = self._places[item]
        self._file.seek(offset)
        return self._file.read(length)

    def content(self, item: int) -> bytes:
        """Return the encoded result of an item that is here."""
        with self._lock:
            return self._read(item)

    def to_bitmap(self) -> bytes:
        """Return one bit for each item, set if its result is here."""
        bits = numpy.zeros(self.total, bool)
        bits[list(self._places)] = True
        return numpy.packbits(bits).tobytes()

    def confirmed_bitmap(self) -> bytes:
        """Return one bit for each item, set if its result is confirmed."""
        return numpy.packbits(self._confirmed).tobytes()

    def digest(self) -> bytes:
        """Hash all results; equal on workers that hold the same bits, in any order."""
        return self._digest.to_bytes(32, "little")

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __del__(self) -> None:
        """Close the file, with which the results of a temporary one are gone."""
        if hasattr(self, "_file"):
            self._file.close()

    def _read_records(self) -> None:
        """Find the results in the file, and cut off what follows the last whole one."""
        self._end = self._file.tell()
        digests: dict[int, bytes] = {}
        while len(record := self._file.read(_RECORD.size)) == _RECORD.size:
            item, length, digest = _RECORD.unpack(record)
            if item >= self.total or length > MAX_RESULT_BYTES:
                break
            content = self._file.read(length)
            if len(content) != length or blake3(content).digest() != digest:
                break
            self._places[item], digests[item] = (self._end + _RECORD.size, length), digest
            self._end = self._file.tell()
        self._digest = sum(_mixed(item, digest) for item, digest in digests.items()) % _DIGESTS
        self._file.truncate(self._end)


def _mixed(item: int, digest: bytes) -> int:
    """Return the number of a result; the sum of all of them is the digest of a store."""
    return int.from_bytes(blake3(item.to_bytes(8, "little") + digest).digest(), "little")


def bits_of_bitmap(bitmap: bytes, total: int) -> numpy.typing.NDArray[numpy.bool_]:
    """Return the bits of a bitmap. Raise ProtocolError if it is not of ``total`` items."""
    if len(bitmap) != -(-total // 8):
        raise ProtocolError("the list of a worker's results does not fit the map")
    return numpy.unpackbits(numpy.frombuffer(bitmap, numpy.uint8), count=total).astype(bool)
