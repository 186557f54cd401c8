"""The contents that a machine holds, by their hashes: whole objects, objects in the making, and manifests.

    objects/ab/cdef...     a file's content, read-only
    partial/abcdef...      one that is being received, with ``.have`` beside it: a byte for each piece
    manifests/abcdef...    encoded manifests; the time of one is when it was last used
    data/abcdef...         data sets as folders, shared by all runs

The agent and the command line of one user share it. Every method may be called from any thread and may take
as long as the disk takes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts.packing.unpack import copy_tree, is_tree_unchanged, is_unchanged, link_tree
from barnraise.artifacts.store.disk import check_room, put_in_place, read_up_to, shipping_error, write_object
from barnraise.artifacts.store.manifest import (
    MOST_FILES,
    PIECE,
    FileEntry,
    FolderLimits,
    FolderManifest,
    decode_manifest,
    encode_manifest,
    manifest_id,
    piece_hash,
)
from barnraise.artifacts.store.stamps import is_stamped, stamp
from barnraise.core.errors import ShippingError
from barnraise.core.files import discard, remove_tree, write_all

READ_ONLY = 0o400
_OWN_LIMITS = FolderLimits(most_bytes=1 << 60, most_files=MOST_FILES)
_TOUCH_AFTER_S = 600.0


class PartialObject(NamedTuple):
    """Piece of an object, with its source."""

    entry: FileEntry
    number: int
    data: bytes | memoryview


class ArtifactStore:
    """Content-addressed store of one machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = directory / "objects"
        self._top = os.fspath(self.objects)
        self.partial = directory / "partial"
        self.manifests = directory / "manifests"
        self.data = directory / "data"
        self._lock = threading.Lock()
        self._have: dict[bytes, bytearray] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.objects, self.partial, self.manifests, self.data):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise shipping_error(error, directory, "made") from error

    def object_path(self, name: bytes) -> Path:
        return Path(self._where(name))

    def _where(self, name: bytes) -> str:
        """Return a path as text: for tens of thousands of files, Path objects cost more than the disk."""
        text = name.hex()
        return f"{self._top}{os.sep}{text[:2]}{os.sep}{text[2:]}"

    # manifests

    def put_manifest(self, manifest: FolderManifest) -> bytes:
        """Store a manifest and return its id."""
        data = encode_manifest(manifest)
        name = manifest_id(data)
        path = self.manifests / name.hex()
        try:
            write_object(path, data, 0o600, self.partial)
        except OSError as error:
            raise shipping_error(error, path, "written") from error
        return name

    def encoded_manifest(self, name: bytes) -> bytes | None:
        """Return the manifest's bytes if it is here and undamaged; this counts as a use."""
        path = self.manifests / name.hex()
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise shipping_error(error, path, "read") from error
        if manifest_id(data) != name:
            discard(path)
            return None
        return data

    def manifest(self, name: bytes) -> FolderManifest | None:
        data = self.encoded_manifest(name)
        return None if data is None else decode_manifest(data, _OWN_LIMITS)

    # what is here

    def has(self, name: bytes, size: int) -> bool:
        """Return True if the object is stored; remove one with a wrong size, which a power cut left."""
        try:
            facts = os.stat(self._where(name))
        except FileNotFoundError:
            return False
        if facts.st_size != size:
            discard(self.object_path(name))
            return False
        return True

    def holds(self, entry: FileEntry) -> bool:
        """Return True if the content is stored and unchanged, and mark it as used now.

        A content that was written since it was stored is hashed, because a program may have changed it
        through a hard link. A changed one is removed, so that it is fetched again.
        """
        name = entry.object
        if not self.has(name, entry.size):
            return False
        path = self._where(name)
        try:
            facts = os.stat(path)
            if not is_unchanged(path, facts, entry):
                discard(Path(path))
                return False
            if not is_stamped(facts, name) or time.time() - facts.st_mtime > _TOUCH_AFTER_S:
                stamp(path, name)
        except FileNotFoundError:  # collected meanwhile
            return False
        return True

    def missing(self, manifest: FolderManifest) -> dict[bytes, list[int]]:
        """Return the missing pieces by object. Pieces received before a restart are hashed again."""
        wanted = {}
        for name, entry in manifest.objects().items():
            if not self.holds(entry):
                have = self._pieces_here(name, entry)
                if all(have):  # a full disk may have kept it from its place
                    self._complete(name)
                else:
                    wanted[name] = [index for index in range(len(entry.pieces)) if not have[index]]
        return wanted

    def check_room(self, needed: int) -> None:
        """Raise ShippingError if the disk does not have ``needed`` free bytes."""
        check_room(self.directory, needed)

    # pieces

    def write_piece(self, entry: FileEntry, index: int, data: bytes | memoryview) -> None:
        """Store a piece; raise ShippingError if it does not match the manifest."""
        if not 0 <= index < len(entry.pieces):
            raise ShippingError(f"{entry.path!r} has no piece {index}", hint="Run it again.")
        if len(data) != entry.piece_size(index) or piece_hash(data) != entry.pieces[index]:
            raise ShippingError(
                f"piece {index} of {entry.path!r} does not have the promised hash",
                hint="Run it again; if it repeats, check the disk and memory of the machine it came from.",
            )
        name = entry.object
        try:
            if self.has(name, entry.size):
                return
            if len(entry.pieces) == 1:
                self.put_object(name, data)
            else:
                self._add_piece(name, entry, index, data)
        except OSError as error:
            raise shipping_error(error, self.directory, "written") from error

    def write_pieces(self, arrivals: Iterable[PartialObject]) -> list[ShippingError | None]:
        """Store many pieces and return the outcome of each; raise ShippingError if the disk is full."""
        outcomes: list[ShippingError | None] = []
        for entry, index, data in arrivals:
            try:
                self.write_piece(entry, index, data)
            except ShippingError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes

    def read_piece(self, name: bytes, index: int) -> bytes | None:
        """Return a piece, also of an incomplete object; None if it is not here."""
        have = self._have.get(name)
        is_partial = have is not None and index < len(have) and have[index]
        whole = self._where(name)
        # A partial object may be completed, and move, while we look.
        for path in (os.fspath(self.partial / name.hex()), whole) if is_partial else (whole,):
            try:
                with open(path, "rb", buffering=0) as file:
                    return _read_at(file.fileno(), index) or None
            except FileNotFoundError:
                continue
            except OSError as error:
                raise shipping_error(error, path, "read") from error
        return None

    def put_object(self, name: bytes, data: bytes | memoryview) -> None:
        """Store a small content whose hash the caller knows."""
        path = self._where(name)
        write_object(path, data, READ_ONLY, self.partial)
        with contextlib.suppress(FileNotFoundError):  # collected meanwhile
            stamp(path, name)

    def adopt(self, draft: Path, name: bytes, mode: int = READ_ONLY) -> None:
        """Make a complete file on the store's disk an object."""
        os.chmod(draft, mode)
        stamp(draft, name)
        put_in_place(draft, self._where(name))

    # folders

    def unpack(self, manifest: FolderManifest, target: Path) -> None:
        """Copy or clone all files to ``target``, which must not exist yet; remove it on failure."""
        copy_tree(manifest, target, self.object_path)

    def link_data(self, manifest: FolderManifest) -> Path:
        """Return the data set as a read-only folder that all runs share; make it again if it was changed."""
        name = manifest_id(encode_manifest(manifest))
        target = self.data / name.hex()
        if target.is_dir() and not is_tree_unchanged(manifest, target):
            remove_tree(target)
        if not target.is_dir():
            link_tree(manifest, target, self.object_path)
        return target

    # objects in the making

    def _add_piece(self, name: bytes, entry: FileEntry, index: int, data: bytes | memoryview) -> None:
        self._pieces_here(name, entry)
        draft, sidecar = self.partial / name.hex(), self.partial / f"{name.hex()}.have"
        with self._lock:
            if self.has(name, entry.size):
                return
            have = self._have.setdefault(name, bytearray(len(entry.pieces)))
            if not have[index]:
                self._write_at(draft, sidecar, have, index, data)
        if all(have):
            self._complete(name)

    def _write_at(
        self, draft: Path, sidecar: Path, have: bytearray, index: int, data: bytes | memoryview
    ) -> None:
        if not sidecar.exists():
            sidecar.write_bytes(bytes(have))
        with open(draft, "r+b" if draft.exists() else "w+b", buffering=0) as file:
            file.seek(index * PIECE)
            write_all(file.fileno(), data)
        with open(sidecar, "r+b", buffering=0) as file:
            file.seek(index)
            file.write(b"\x01")
        have[index] = 1

    def _complete(self, name: bytes) -> None:
        with self._lock:
            if name in self._have:
                try:
                    self.adopt(self.partial / name.hex(), name)
                except OSError as error:
                    raise shipping_error(error, self.directory, "written") from error
                discard(self.partial / f"{name.hex()}.have")
                del self._have[name]

    def drop_partial(self, name: bytes) -> None:
        """Delete the received pieces of an object."""
        with self._lock:
            self._have.pop(name, None)
            discard(self.partial / name.hex())
            discard(self.partial / f"{name.hex()}.have")

    def _pieces_here(self, name: bytes, entry: FileEntry) -> bytearray:
        have = self._have.get(name)
        if have is None:
            verified = self._verified(name, entry)
            with self._lock:
                have = self._have.setdefault(name, verified)
        return have

    def _verified(self, name: bytes, entry: FileEntry) -> bytearray:
        """Return the pieces of an earlier process that the disk really kept."""
        have = bytearray(len(entry.pieces))
        try:
            noted = (self.partial / f"{name.hex()}.have").read_bytes()
            with open(self.partial / name.hex(), "rb", buffering=0) as file:
                for index in range(min(len(have), len(noted))):
                    data = _read_at(file.fileno(), index) if noted[index] else b""
                    have[index] = bool(data) and piece_hash(data) == entry.pieces[index]
        except OSError:  # nothing was kept
            pass
        return have


def _read_at(descriptor: int, index: int) -> bytes:
    # No more than is there: room for a whole piece would cost far more than reading a small file.
    size = min(PIECE, os.fstat(descriptor).st_size - index * PIECE)
    if size <= 0:
        return b""
    os.lseek(descriptor, index * PIECE, os.SEEK_SET)
    return read_up_to(descriptor, size)
