"""Write-behind database: SQLite in memory, and a file that has the same contents when the disk takes them.

What is in memory counts. So a disk that is full for a while loses no change, and repeats none.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from barnraise.core.database import open_database, transaction
from barnraise.core.errors import AgentError

_LOCKED_S = 0.2  # the agent's loop stands still meanwhile

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]


class WriteBehindDatabase:
    """Database in memory with its file. A change is applied to both, and must not depend on anything else.

    ``tables``: statements that create them; ``names``: their names. sqlite3.Error and OSError pass through.
    """

    def __init__(self, path: Path, tables: str, form: int, names: Sequence[str]) -> None:
        self._names = names
        self._failure: sqlite3.Error | None = None
        self._file = open_database(path, tables, form, AgentError, locked_s=_LOCKED_S)
        self._memory = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._file.execute("PRAGMA secure_delete=ON")
            self._file.backup(self._memory)
        except BaseException:
            self._close()
            raise

    @property
    def failure(self) -> sqlite3.Error | None:
        """Return why the file lacks the newest changes; None if it has them all."""
        return self._failure

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return what is in memory."""
        return self._memory.execute(query, values).fetchall()

    def change(self, change: Change[T]) -> T:
        """Apply a change and return its result. If the disk rejects it, it is saved later."""
        with transaction(self._memory):
            result = change(self._memory)
        if self._failure is None:
            self._save(change)
        else:
            self.save_all()
        return result

    def change_on_disk(self, change: Change[T]) -> T:
        """Apply a change and return its result; raise sqlite3.Error, without a change, if it is not saved."""
        self.save_all()
        if self._failure is not None:
            raise self._failure
        with transaction(self._memory):
            result = change(self._memory)
            with transaction(self._file):
                change(self._file)
        return result

    def save_all(self) -> None:
        """Save what the file lacks, if the disk takes it now."""
        if self._failure is not None:
            self._save(self._copy)

    def empty_log(self) -> None:
        """Remove what the write-ahead log of the file still has, such as deleted secrets."""
        self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Save what the file lacks, if the disk takes it, and close the database."""
        self.save_all()
        self._close()

    def _save(self, change: Change[Any]) -> None:
        try:
            with transaction(self._file):
                change(self._file)
            self._failure = None
        except sqlite3.Error as error:
            self._failure = error

    def _copy(self, file: sqlite3.Connection) -> None:
        for name in self._names:
            rows = self.rows(f"SELECT * FROM {name}")
            file.execute(f"DELETE FROM {name}")
            if rows:
                places = ", ".join("?" * len(rows[0]))
                file.executemany(f"INSERT INTO {name} VALUES ({places})", rows)

    def _close(self) -> None:
        self._memory.close()
        self._file.close()
