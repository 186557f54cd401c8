"""Files that hold secrets: created whole and once, readable by their owner alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
from pathlib import Path

from barnraise.core.errors import IdentityError
from barnraise.core.files import sync

_LARGEST = 64 * 1024
_BINARY: int = getattr(os, "O_BINARY", 0)
_NOT_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)


def private_directory(path: Path) -> Path:
    """Create the directory for its owner alone; a directory that exists keeps its mode."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise IdentityError(
            f"the directory {path} cannot be made: {error.strerror}",
            hint="Choose another state directory, or make this one writable for you.",
        ) from error
    return path


def read_private(path: Path) -> bytes | None:
    """The file's bytes, or None if there is no such file; refuses a file that others may read."""
    try:
        # Not blocking, so that a fifo in the file's place is refused instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | _BINARY | _NOT_BLOCKING)
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
    """Write a new file of mode 0600; False if somebody else created it first.

    The file appears under its name only when it is complete, so that a racing reader never sees half.
    """
    private_directory(path.parent)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        if sys.platform == "win32":
            os.rename(draft, path)  # refuses an existing target there
        else:
            os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise IdentityError(
            f"{path} cannot be created: {error.strerror}",
            hint="Choose another state directory, or make this one writable for you.",
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    return True


def load_or_create_private(path: Path, fresh: bytes) -> bytes:
    """The file's bytes; if there is none yet, ``fresh`` or what a faster process wrote."""
    content = read_private(path)
    if content is None and create_private(path, fresh):
        return fresh
    if content is None:
        content = read_private(path)
    if content is None:
        raise IdentityError(f"{path} was deleted while it was being read", hint="Start again.")
    return content
