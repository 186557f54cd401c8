"""Files that hold secrets: created in one step, readable by their owner alone."""

from __future__ import annotations

import os
from pathlib import Path

from barnraise.core.errors import IdentityError
from barnraise.core.files import BINARY, create_atomically
from barnraise.core.ownership.check import check_directory, check_file, home_directory

_LARGEST = 64 * 1024
_NOT_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)


def private_directory(path: Path) -> Path:
    """Create the directory for its owner alone, or check an existing one.

    Raise IdentityError if it belongs to another user, or if another user may write to it or to a parent.
    """
    _make(path)
    check_directory(path)
    return path


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise IdentityError(
            f"the directory {path} cannot be made: {error.strerror}",
            hint=f"Choose a directory inside {home_directory()}, or make this one writable for you only.",
        ) from error


def read_private(path: Path) -> bytes | None:
    """Return the file's bytes, or None if it does not exist.

    Raise IdentityError if the file belongs to another user, or if others may read it.
    """
    try:
        # Not blocking, so that a fifo in the file's place is refused instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | BINARY | _NOT_BLOCKING)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        check_file(path, facts, is_secret=True)
        if facts.st_size > _LARGEST:
            raise IdentityError(f"{path} is too large to be a key or a secret")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_LARGEST)
    finally:
        os.close(descriptor)


def create_private(path: Path, content: bytes) -> bool:
    """Create a file with mode 0600; return False if it exists already.

    The file appears with all its bytes at once, so that a concurrent reader never sees half of it.
    """
    _make(path.parent)
    try:
        return create_atomically(path, content, 0o600)
    except OSError as error:
        raise IdentityError(
            f"{path} cannot be created: {error.strerror}",
            hint=f"Choose a place inside {home_directory()}, or make this directory writable for you only.",
        ) from error


def load_or_create_private(path: Path, fresh: bytes) -> bytes:
    """Return the file's bytes; if it does not exist, create it with ``fresh``.

    If another process creates it first, return the bytes of that process.
    """
    private_directory(path.parent)
    content = read_private(path)
    if content is None and create_private(path, fresh):
        return fresh
    if content is None:
        content = read_private(path)
    if content is None:
        raise IdentityError(f"{path} was deleted while it was being read", hint="Start again.")
    return content
