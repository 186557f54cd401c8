"""SQLite databases that survive a power cut and that only their owner can read."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from barnraise.core.errors import BarnraiseError
from barnraise.core.installation import upgrade_hint
from barnraise.core.ownership.check import check_file


def open_database(
    path: Path,
    tables: str,
    form: int,
    newer: type[BarnraiseError],
    *,
    one_thread: bool = True,
    locked_s: float = 5.0,
) -> sqlite3.Connection:
    """Open or create the database with these tables.

    Raise ``newer`` if a later version of Barnraise, with a higher ``form``, wrote the file. Raise
    IdentityError if another user owns the file or may write to it. sqlite3.Error and OSError pass through.
    ``one_thread``: SQLite rejects calls from other threads. ``locked_s``: seconds to
    wait for another process that writes.
    """
    with contextlib.suppress(FileExistsError):  # made for us alone before SQLite opens it
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    check_file(path, os.lstat(path), is_secret=True)
    base = sqlite3.connect(path, isolation_level=None, timeout=locked_s, check_same_thread=one_thread)
    try:
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=FULL")
        if sys.platform == "darwin":  # there a plain fsync leaves data in the drive's own memory
            base.execute("PRAGMA fullfsync=1")
            base.execute("PRAGMA checkpoint_fullfsync=1")
        if base.execute("PRAGMA user_version").fetchone()[0] > form:
            raise newer(
                f"{path} was written by a newer Barnraise",
                hint=upgrade_hint(),
            )
        base.executescript(tables)
        base.execute(f"PRAGMA user_version={form}")
    except BaseException:
        base.close()
        raise
    return base


@contextlib.contextmanager
def transaction(base: sqlite3.Connection) -> Iterator[None]:
    """Commit what the context writes, or roll all of it back if the context raises."""
    base.execute("BEGIN IMMEDIATE")
    try:
        yield
        base.execute("COMMIT")
    except BaseException:
        if base.in_transaction:  # SQLite itself rolls back after some errors of the disk
            base.execute("ROLLBACK")
        raise
