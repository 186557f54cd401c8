"""Files written whole or not at all, and what a disk's refusal means to a person."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat
import sys
from pathlib import Path

from barnraise.core.errors import ShippingError
from barnraise.core.units import format_size

_BINARY: int = getattr(os, "O_BINARY", 0)
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
_FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])

TEMPORARY = "new-"
_FREE_SOME = "Free some space there, or leave this machine out with `--on`."
_MINE = secrets.token_hex(8)
_serials = itertools.count()


def shipping_error(error: OSError, path: Path | str, doing: str) -> ShippingError:
    """What the disk said, as an error that names it."""
    if error.errno in _FULL:
        return ShippingError(f"the disk that holds {path} is full", hint=_FREE_SOME)
    return ShippingError(
        f"{path} cannot be {doing}: {error.strerror or error}",
        hint="Check the disk and who owns the folder, then run it again.",
    )


def check_room(directory: Path, needed: int, hint: str = "") -> None:
    """ShippingError if its disk cannot hold so many bytes more."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ShippingError(
            f"the disk that holds {directory} has {format_size(free)} free, "
            f"and {format_size(needed)} are to come",
            hint=hint or _FREE_SOME,
        )


def new_draft(folder: Path | str) -> str:
    """A name that no other file has."""
    return f"{folder}{os.sep}{TEMPORARY}{_MINE}-{next(_serials)}"


def create_file(path: Path | str, mode: int) -> int:
    """A descriptor of a file that did not exist before; never follows a symbolic link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINKS | _BINARY, mode)


def write_whole(path: Path | str, content: bytes | memoryview, mode: int, drafts: Path | str) -> None:
    """The file appears under its name with all its bytes, or not at all; until then it is in ``drafts``.

    It is not synced: after a power cut a file may be short or empty; that is noticed by its size or its hash,
    and it is fetched again. Syncing tens of thousands of small files would cost more than shipping them.
    """
    draft = new_draft(drafts)
    try:
        descriptor = create_file(draft, mode)
        try:
            write_all(descriptor, content)
        finally:
            os.close(descriptor)
        put_in_place(draft, path)
    except OSError:
        discard(Path(draft))
        raise


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    written = os.write(descriptor, content)
    rest = memoryview(content)[written:]
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_up_to(descriptor: int, size: int) -> bytes:
    """So many bytes; fewer only at the end of the file."""
    data = os.read(descriptor, size)
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


def put_in_place(draft: Path | str, path: Path | str) -> None:
    """Give a complete file its final name; its folder is made if need be."""
    try:
        os.replace(draft, path)
    except FileNotFoundError:
        Path(path).parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(draft, path)
    except PermissionError:
        # Windows does not replace a read-only file. Whoever made it first wrote the same bytes.
        if not os.path.exists(path):
            raise
        discard(Path(draft))


def discard(path: Path) -> None:
    """Remove a file, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:  # Windows does not remove read-only files
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IWRITE)
            path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Also of read-only folders; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
    for root, folders, files in os.walk(folder):
        for name in (*folders, *(files if sys.platform == "win32" else ())):
            with contextlib.suppress(OSError):
                if not os.path.islink(os.path.join(root, name)):
                    os.chmod(os.path.join(root, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)
