"""Atomic file replacement, and writes that a power cut cannot undo."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Windows syncs only what is open for writing; elsewhere a file may be read-only by then.
_OPENED = os.O_RDWR if os.name == "nt" else os.O_RDONLY


def sync(descriptor: int) -> None:
    if sys.platform == "darwin":  # there a plain fsync leaves it in the drive's own memory
        import fcntl

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # not every file system knows it
            pass
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """A file, or the names in a directory."""
    if os.name == "nt" and path.is_dir():  # NTFS logs renames by itself, and directories cannot be opened
        return
    descriptor = os.open(path, _OPENED)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes, *, synced: bool = False) -> None:
    """A kill leaves the file before, or this one. ``synced``: so does a power cut, and it takes longer."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(content)
    if synced:
        sync_path(draft)
    draft.replace(path)
    if synced:
        sync_path(path.parent)
