"""Rotation of log files: a file that is full becomes ``NAME.1``, and the oldest one is deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

_OUTPUT_BYTES = 5 * 1024 * 1024
_OLDER_FILES = 2
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)


def rotate(path: Path, max_bytes: int, older_files: int) -> None:
    """Rename a file of at least ``max_bytes``, so that the next writer starts a new one."""
    try:
        if path.stat().st_size < max_bytes:
            return
    except FileNotFoundError:
        return
    _shift(path, older_files)
    os.replace(path, _older(path, 1))


def open_output(path: Path) -> BinaryIO:
    """Open the log of a process for appending, for its owner alone; rotate it before if it is full."""
    with contextlib.suppress(OSError):  # Windows, while another process reads it: the log grows a little more
        rotate(path, _OUTPUT_BYTES, _OLDER_FILES)
    return open(path, "ab", opener=open_private)


def rotate_output(descriptor: int, path: Path) -> bool:
    """Rotate the log that this process writes to through an open descriptor; return True if it was full.

    The content is copied, because the descriptor stays with its file.
    """
    try:
        if not os.path.samestat(os.fstat(descriptor), path.stat()) or path.stat().st_size < _OUTPUT_BYTES:
            return False
        _shift(path, _OLDER_FILES)
        with open(path, "rb") as source, open(_older(path, 1), "wb", opener=open_private) as copy:
            shutil.copyfileobj(source, copy)
        os.ftruncate(descriptor, 0)
    except OSError:  # it does not exist, or the disk is full: the log grows a little more
        return False
    return True


def rotated(path: Path, older_files: int) -> list[Path]:
    """Return the files of a log that exist, the oldest first."""
    paths = [*(_older(path, number) for number in range(older_files, 0, -1)), path]
    return [each for each in paths if each.is_file()]


def open_private(path: str, flags: int) -> int:
    """Open a file for its owner alone, as an opener of ``open``; never follow a symbolic link."""
    return os.open(path, flags | _NO_LINKS, 0o600)


def _shift(path: Path, older_files: int) -> None:
    """Make room for a new ``NAME.1``; the oldest file is overwritten."""
    for number in range(older_files - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(_older(path, number), _older(path, number + 1))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
