"""Disk access of the store: objects that appear whole or not at all, and errors for people."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
from pathlib import Path

from barnraise.core.errors import ShippingError
from barnraise.core.files import create_file, discard, replace, write_all
from barnraise.core.units import format_size

_FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])

TEMPORARY = "new-"
_FREE_SOME = "Free some space there, or leave this machine out with `--on`."
_MINE = secrets.token_hex(8)
_serials = itertools.count()


def shipping_error(error: OSError, path: Path | str, doing: str) -> ShippingError:
    """Return an OSError as a ShippingError that names the path."""
    if error.errno in _FULL:
        return ShippingError(f"the disk that holds {path} is full", hint=_FREE_SOME)
    return ShippingError(
        f"{path} cannot be {doing}: {error.strerror or error}",
        hint="Check the disk and the owner of the folder, then run it again.",
    )


def check_room(directory: Path, needed: int, hint: str = "") -> None:
    """Raise ShippingError if the disk does not have ``needed`` free bytes."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ShippingError(
            f"the disk that holds {directory} has {format_size(free)} free, "
            f"and {format_size(needed)} are to come",
            hint=hint or _FREE_SOME,
        )


def new_draft(folder: Path | str) -> str:
    """Return a path in the folder that no other file has."""
    return f"{folder}{os.sep}{TEMPORARY}{_MINE}-{next(_serials)}"


# Not core.files.write_atomically: drafts lie in the store's own folder, for garbage collection, and an
# object that another process has stored meanwhile stays.
def write_object(path: Path | str, content: bytes | memoryview, mode: int, drafts: Path | str) -> None:
    """Write a file that appears with all its bytes or not at all; its draft is in ``drafts``.

    It is not synced: after a power cut a file may be short or empty. Its size or hash shows that, and it is
    fetched again. Syncing tens of thousands of small files would cost more than sending them.
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


def read_up_to(descriptor: int, size: int) -> bytes:
    """Read this many bytes; fewer only at the end of the file."""
    data = os.read(descriptor, size)
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


def put_in_place(draft: Path | str, path: Path | str) -> None:
    """Rename a complete file to its final name, and create its folder if needed."""
    try:
        replace(draft, path)
    except FileNotFoundError:
        Path(path).parent.mkdir(mode=0o700, exist_ok=True)
        replace(draft, path)
    except PermissionError:
        # Windows does not replace a read-only file. The existing file has the same bytes.
        if not os.path.exists(path):
            raise
        discard(Path(draft))
