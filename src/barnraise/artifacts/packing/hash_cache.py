"""Hash cache of files that have not changed since they were last packed, in a small SQLite file.

It only saves time: if anything fails, the files are hashed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FILE_NAME = "hashes.db"
_FORGET_AFTER_S = 90 * 86400
# A file may change again within one tick of the disk's clock, and nothing but its content would show it.
_SETTLED_NS = 2_000_000_000
_TABLE = """
CREATE TABLE IF NOT EXISTS hashed (
    path TEXT PRIMARY KEY, size INTEGER, modified INTEGER, changed INTEGER, inode INTEGER,
    pieces BLOB NOT NULL, seen INTEGER NOT NULL
) WITHOUT ROWID
"""
_log = logging.getLogger(__name__)


class HashedFile(NamedTuple):
    """State of a file and its hashes at that time."""

    path: str
    facts: os.stat_result
    pieces: tuple[bytes, ...]


class HashCache:
    """Cached hashes of the files below one folder; use it as a context manager."""

    def __init__(self, directory: Path, folder: str) -> None:
        self._known: dict[str, tuple[int, int, int, int, bytes]] = {}
        self._base: sqlite3.Connection | None = None
        try:
            self._base = sqlite3.connect(directory / FILE_NAME, isolation_level=None, timeout=5.0)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.execute(_TABLE)
            # In the order of code points, "0" follows "/", which ends the paths below the folder.
            rows = self._base.execute(
                "SELECT path, size, modified, changed, inode, pieces FROM hashed "
                "WHERE path >= ? AND path < ?",
                (folder + os.sep, folder + chr(ord(os.sep) + 1)),
            )
            self._known = {row[0]: row[1:] for row in rows}
        except (sqlite3.Error, UnicodeError) as error:
            _log.warning("known hashes cannot be read and will be computed: %s", error)

    def __enter__(self) -> HashCache:
        return self

    def __exit__(self, *_: object) -> None:
        if self._base is not None:
            self._base.close()

    def pieces(self, path: str, facts: os.stat_result) -> tuple[bytes, ...] | None:
        """Return the hashes of a file that has not changed; None if they are unknown."""
        known = self._known.get(path)
        return None if known is None or known[:4] != _state(facts) else _split(known[4])

    def last_pieces(self, path: str) -> tuple[bytes, ...] | None:
        """Return the hashes that a file had when it was last packed, also if it has changed."""
        known = self._known.get(path)
        return None if known is None else _split(known[4])

    def learn(self, files: Iterable[HashedFile]) -> None:
        """Store hashes in one transaction, and note which files were seen again."""
        if self._base is None:
            return
        now = time.time_ns()
        rows = [
            (file.path, *_state(file.facts), b"".join(file.pieces), now // 10**9)
            for file in files
            if now - max(file.facts.st_mtime_ns, file.facts.st_ctime_ns) > _SETTLED_NS
        ]
        try:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.executemany("INSERT OR REPLACE INTO hashed VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._base.execute("DELETE FROM hashed WHERE seen < ?", (now // 10**9 - _FORGET_AFTER_S,))
            self._base.execute("COMMIT")
        except (sqlite3.Error, UnicodeError) as error:
            _log.warning("hashes could not be kept: %s", error)
            with contextlib.suppress(sqlite3.Error):
                self._base.execute("ROLLBACK")


def _split(pieces: bytes) -> tuple[bytes, ...]:
    return tuple(pieces[start : start + 32] for start in range(0, len(pieces), 32))


def _state(facts: os.stat_result) -> tuple[int, int, int, int]:
    """Return the file's state with an inode that SQLite can hold: some on Windows are unsigned 64-bit."""
    inode = facts.st_ino & 0x7FFF_FFFF_FFFF_FFFF
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, inode
