"""Sharing of large files: the store gets a clone or a hard link of a file of the user instead of a copy."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts.store.clone import Cloner
from barnraise.artifacts.store.disk import new_draft, read_up_to
from barnraise.artifacts.store.manifest import PIECE, piece_hash
from barnraise.artifacts.store.store import READ_ONLY, ArtifactStore

_WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class Sharing(NamedTuple):
    """Ways in which the store may share a file. ``links``: hard links, for files that never change."""

    cloner: Cloner
    links: bool


class SharedDraft(NamedTuple):
    """Draft in the store that shares its blocks with a file of the user."""

    path: Path
    is_link: bool

    def adopt(self, store: ArtifactStore, name: bytes) -> None:
        """Make the draft an object. A linked file keeps its readers and loses its writers."""
        mode = os.stat(self.path).st_mode & 0o777 & ~_WRITE_BITS if self.is_link else READ_ONLY
        store.adopt(self.path, name, mode)


def share(real: str, facts: os.stat_result, store: ArtifactStore, sharing: Sharing) -> SharedDraft | None:
    """Return a draft that shares its blocks with a file; None if the disk or the owner does not allow it.

    A hard link has one owner and one mode with the file, so only an own file is linked. Not on Windows:
    there the user could not delete the file any more, because it would be read-only.
    """
    draft = Path(new_draft(store.partial))
    if sharing.cloner.clone(real, draft, 0o600):
        return SharedDraft(draft, is_link=False)
    if not sharing.links or sys.platform == "win32" or facts.st_uid != os.getuid():
        return None
    try:
        os.link(real, draft)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without hard links
        return None
    return SharedDraft(draft, is_link=True)


def hash_pieces(path: Path | str) -> tuple[int, tuple[bytes, ...]]:
    """Return the size of a file and the hashes of its pieces."""
    pieces = []
    size = 0
    with open(path, "rb", buffering=0) as file:
        while data := read_up_to(file.fileno(), PIECE):
            pieces.append(piece_hash(data))
            size += len(data)
    return size, tuple(pieces)
