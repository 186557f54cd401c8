"""Files that hold secrets: created in one step, readable by their owner alone."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from barnraise.core.errors import IdentityError
from barnraise.core.files import BINARY, create_atomically

_LARGEST = 64 * 1024
_NOT_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)


def private_directory(path: Path) -> Path:
    """Create the directory for its owner alone; an existing directory keeps its mode."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise IdentityError(
            f"the directory {path} cannot be made: {error.strerror}",
            hint="Choose another state directory, or make this one writable for you.",
        ) from error
    return path


def read_private(path: Path) -> bytes | None:
    """Return the file's bytes, or None if it does not exist.

    Raise IdentityError if others may read the file.
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
        if not stat.S_ISREG(facts.st_mode):
            raise IdentityError(f"{path} is not a file", hint="Move it away; a new one will be created.")
        if sys.platform != "win32" and facts.st_mode & 0o077:
            raise IdentityError(
                f"{path} holds a secret and others may read or change it (mode {facts.st_mode & 0o777:04o})",
                hint=f"Run `chmod 600 {path}`; if anyone could have read it, delete it and pair again.",
            )
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
    private_directory(path.parent)
    try:
        return create_atomically(path, content, 0o600)
    except OSError as error:
        raise IdentityError(
            f"{path} cannot be created: {error.strerror}",
            hint="Choose another state directory, or make this one writable for you.",
        ) from error


def load_or_create_private(path: Path, fresh: bytes) -> bytes:
    """Return the file's bytes; if it does not exist, create it with ``fresh``.

    If another process creates it first, return the bytes of that process.
    """
    content = read_private(path)
    if content is None and create_private(path, fresh):
        return fresh
    if content is None:
        content = read_private(path)
    if content is None:
        raise IdentityError(f"{path} was deleted while it was being read", hint="Start again.")
    return content
