"""Files that others read while they are written: the one before, or the new one, and never a part of it."""

from __future__ import annotations

from pathlib import Path

from barnraise.core.syncing import sync_path


def write_whole(path: Path, content: bytes, *, synced: bool = False) -> None:
    """A kill leaves the file before, or this one. ``synced``: so does a power cut, and it takes longer."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(content)
    if synced:
        sync_path(draft)
    draft.replace(path)
    if synced:
        sync_path(path.parent)
