"""Folder of a tracker, and the lock that keeps a second feeder of the same run out."""

from __future__ import annotations

from pathlib import Path

from barnraise.core.errors import RunError
from barnraise.core.file_lock import FileLock


def lock_folder(folder: Path, lock: str, kind: str) -> FileLock:
    """Make a folder, and lock a file in it; raise RunError if another process feeds it.

    ``kind``: the tracker, for messages.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the folder {folder} of the tracker cannot be made: {error.strerror}",
            hint=f"Name a folder that you may write: --to {kind}=FOLDER",
        ) from error
    held = FileLock(folder / lock)
    if not held.try_acquire():
        raise RunError(f"another process feeds {kind} in {folder}", hint="Stop the other `barnraise track`.")
    return held
