"""Files that others read while they are written: the one before, or the new one, and never a part of it."""

from __future__ import annotations

from pathlib import Path

from backyard.core.syncing import sync_path


def write_whole(path: Path, content: bytes) -> None:
    """A kill or a power cut leaves the file before, or this one; once it returns, this one."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(content)
    sync_path(draft)
    draft.replace(path)
    sync_path(path.parent)
