"""Manifest of a folder: names, sizes and the hashes of pieces. Pure.

A manifest fits into one message. Its id is the hash of its bytes. So the id is enough to check the manifest,
and the manifest to check every piece, from any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from barnraise.artifacts.packing.portable_names import MOST_PATH_BYTES, check_names
from barnraise.core.errors import ShippingError
from barnraise.core.units import format_size

PIECE = 4 << 20
MOST_FILES = 50_000
MOST_ENCODED = (8 << 20) - 4096
_MOST_SIZE = 1 << 50

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


def piece_hash(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3 hash, which is several times as fast as Python's own; hashing limits a fast link."""
    return blake3(data).digest()


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """File of a manifest. The last piece may be short; an empty file has none."""

    path: Annotated[str, Meta(min_length=1, max_length=MOST_PATH_BYTES)]
    size: Annotated[int, Meta(ge=0, le=_MOST_SIZE)]
    executable: bool
    pieces: tuple[Digest, ...]

    @property
    def object(self) -> bytes:
        """Return the hash that names the content, independent of the file's name."""
        return hashlib.sha256(self.size.to_bytes(8, "big") + b"".join(self.pieces)).digest()

    def piece_size(self, index: int) -> int:
        return min(PIECE, self.size - index * PIECE)


class FolderManifest(msgspec.Struct, frozen=True, array_like=True):
    """All files of a folder, sorted by path."""

    files: Annotated[tuple[FileEntry, ...], Meta(max_length=MOST_FILES)]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    def objects(self) -> dict[bytes, FileEntry]:
        """Return each non-empty content once, in the order of the paths, which is the same on every
        machine.
        """
        objects: dict[bytes, FileEntry] = {}
        for entry in self.files:
            if entry.pieces:
                objects.setdefault(entry.object, entry)
        return objects


class FolderLimits(msgspec.Struct, frozen=True):
    """Limits of one folder or data set."""

    most_bytes: int
    most_files: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FolderManifest)


def make_manifest(entries: Iterable[FileEntry]) -> FolderManifest:
    return FolderManifest(tuple(sorted(entries, key=lambda entry: entry.path)))


def encode_manifest(manifest: FolderManifest) -> bytes:
    """Encode a manifest with the same bytes for the same files; raise ShippingError if it is too large."""
    data = _encoder.encode(manifest)
    if len(data) > MOST_ENCODED or len(manifest.files) > MOST_FILES:
        raise ShippingError(
            f"{len(manifest.files)} files are too many to send: their list takes {format_size(len(data))}, "
            f"at most {format_size(MOST_ENCODED)} and {MOST_FILES} files are possible",
            hint="Put small files together into archives, or list what the run does not need in "
            "`.barnraiseignore`.",
        )
    return data


def manifest_id(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def decode_manifest(data: bytes | memoryview, limits: FolderLimits) -> FolderManifest:
    """Decode untrusted bytes; raise ShippingError unless every machine could hold the folder."""
    if len(data) > MOST_ENCODED:
        raise _refused(f"it has {len(data)} bytes, at most {MOST_ENCODED} are possible")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _refused(str(error)) from error
    if len(manifest.files) > limits.most_files:
        raise _refused(f"it has {len(manifest.files)} files, at most {limits.most_files} are allowed")
    if manifest.size > limits.most_bytes:
        total, max_size = format_size(manifest.size), format_size(limits.most_bytes)
        raise _refused(f"it describes {total}, at most {max_size} are allowed")
    previous = ""
    for entry in manifest.files:
        if entry.path <= previous:
            raise _refused("its paths are not in order")
        if len(entry.pieces) != -(-entry.size // PIECE):
            raise _refused(f"{entry.path!r} has {len(entry.pieces)} pieces for {entry.size} bytes")
        previous = entry.path
    check_names(entry.path for entry in manifest.files)
    return manifest


def _refused(why: str) -> ShippingError:
    return ShippingError(
        f"the list of files was rejected: {why}",
        hint="Install the same Barnraise version on both machines; if they agree already, run it again "
        "with less data.",
    )
