"""Files that others read while they are written: the one before, or the new one, and never a part of it."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """A kill leaves the file before, or this one. Whether a power cut does is up to the file system."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(content)
    draft.replace(path)
