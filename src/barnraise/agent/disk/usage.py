"""Measured disk use of folders. A file with several names counts once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 512


def used_bytes(folder: Path, counted: set[tuple[int, int]] | None = None) -> int:
    """Return the bytes on disk below a folder; files in ``counted`` do not count, and are added to it."""
    seen = counted if counted is not None else set()
    total = 0
    for facts in _files(os.fspath(folder)):
        key = (facts.st_dev, facts.st_ino)
        if facts.st_nlink > 1:
            if key in seen:
                continue
            seen.add(key)
        total += _on_disk(facts)
    return total


def _on_disk(facts: os.stat_result) -> int:
    blocks = getattr(facts, "st_blocks", None)  # Windows does not tell them
    return facts.st_size if blocks is None else int(blocks) * _BLOCK


def _files(folder: str) -> Iterator[os.stat_result]:
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        # Not entry.stat: on Windows it does not tell the number of links.
                        yield os.stat(entry.path, follow_symlinks=False)
                    except OSError:  # gone meanwhile
                        continue
        except OSError:
            continue
