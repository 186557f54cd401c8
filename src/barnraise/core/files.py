"""File operations that survive a kill or a power cut: atomic replacement, fsync, exclusive creation."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

BINARY: int = getattr(os, "O_BINARY", 0)
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
# Windows syncs only files that are open for writing; elsewhere a file may be read-only by then.
_IN_USE_S = 1.0
_POLL_S = 0.02
_SYNC_MODE = os.O_RDWR if os.name == "nt" else os.O_RDONLY


def replace(source: Path | str, target: Path | str) -> None:
    """Rename a file over another one.

    Windows rejects this while another process has one of the two open. So it is retried for a second.
    """
    _retry_while_in_use(lambda: os.replace(source, target))


def _retry_while_in_use(action: Callable[[], None]) -> None:
    deadline = time.monotonic() + _IN_USE_S
    while True:
        try:
            return action()
        except PermissionError:
            if os.name != "nt" or time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def sync(descriptor: int) -> None:
    """Write the file's data to the disk, not only to the system's cache."""
    if sys.platform == "darwin":  # there a plain fsync leaves data in the drive's cache
        import fcntl

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # some file systems do not support it
            pass
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a directory."""
    if os.name == "nt" and path.is_dir():  # NTFS logs renames by itself, and directories cannot be opened
        return
    descriptor = os.open(path, _SYNC_MODE)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, synced: bool = False, shared: bool = False
) -> None:
    """Replace a file in one step, so that a kill leaves either the old content or the new.

    ``synced``: a power cut leaves one of them, too; this takes longer.
    ``shared``: several processes may write the file at once, so each uses a draft of its own.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}" if shared else f"{path.name}.new")
    try:
        with open(draft, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        if synced:
            sync_path(draft)
        replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            discard(draft)
        raise
    if synced:
        sync_path(path.parent)


def create_file(path: Path | str, mode: int) -> int:
    """Create a file that does not exist and return its descriptor; never follow a symbolic link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINKS | BINARY, mode)


def create_atomically(path: Path, content: bytes, mode: int) -> bool:
    """Create a synced file that appears with all its bytes at once; return False if it exists already."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(create_file(draft, mode), "wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        if sys.platform == "win32":
            os.rename(draft, path)  # rejects an existing target there
        else:
            os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    return True


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes, however many calls that takes."""
    written = os.write(descriptor, content)
    rest = memoryview(content)[written:]
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def discard(path: Path) -> None:
    """Remove a file if it exists, also a read-only one."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:  # Windows does not remove read-only files, or files that another process reads
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IWRITE)
            _retry_while_in_use(lambda: path.unlink(missing_ok=True))


def remove_tree(folder: Path) -> None:
    """Remove a folder, also with read-only folders in it; leave what cannot be removed."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
    for root, folders, files in os.walk(folder):
        for name in (*folders, *(files if sys.platform == "win32" else ())):
            with contextlib.suppress(OSError):
                if not os.path.islink(os.path.join(root, name)):
                    os.chmod(os.path.join(root, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)
