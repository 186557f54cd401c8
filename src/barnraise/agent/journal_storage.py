"""Disk of a durable replica: its promises, a snapshot and the operations after it, in SQLite."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from barnraise.agent_client.kv_messages import Operation
from barnraise.core.database import open_database, transaction
from barnraise.core.errors import MembershipError
from barnraise.identity.private_file import private_directory
from barnraise.kvstore.messages import ReplicaState, SavedReplica, UnsavedChange

FILE_NAME = "journals.db"
_FORM = 1
_COMPACT_BYTES = 8 << 20
_states = msgspec.msgpack.Decoder(ReplicaState)
_operations: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
_TABLES = """
CREATE TABLE IF NOT EXISTS replica (one INTEGER PRIMARY KEY, cluster BLOB NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (one INTEGER PRIMARY KEY, contents BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS operation (number INTEGER PRIMARY KEY, operation BLOB NOT NULL);
"""


class JournalStorage:
    """Database of one agent's durable replica. A method that writes returns when the data is on disk.

    Any thread may call its methods, but only one at a time.
    """

    def __init__(self, directory: Path) -> None:
        self._path = private_directory(directory) / FILE_NAME
        try:
            self._base = open_database(self._path, _TABLES, _FORM, MembershipError, one_thread=False)
            row = self._base.execute("SELECT length(contents) FROM snapshot").fetchone()
            added = self._base.execute("SELECT sum(length(operation)) FROM operation").fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise self.broken(error) from error
        self._snapshot_bytes = 0 if row is None else int(row[0])
        self._added_bytes = int(added or 0)

    def close(self) -> None:
        self._base.close()

    @property
    def wants_snapshot(self) -> bool:
        """Tell whether the operations take more space than a new snapshot would."""
        return self._added_bytes > max(_COMPACT_BYTES, self._snapshot_bytes)

    def load(self, cluster: bytes) -> SavedReplica | None:
        """Return what was saved for this cluster; None if nothing was."""
        try:
            row = self._base.execute("SELECT cluster, state FROM replica").fetchone()
            if row is None or bytes(row[0]) != cluster:
                return None
            contents = self._base.execute("SELECT contents FROM snapshot").fetchone()
            rows = self._base.execute("SELECT number, operation FROM operation ORDER BY number").fetchall()
            return SavedReplica(
                _states.decode(row[1]),
                b"" if contents is None else bytes(contents[0]),
                tuple((int(number), _operations.decode(data)) for number, data in rows),
            )
        except (sqlite3.Error, msgspec.DecodeError, ValueError) as error:
            raise self.broken(error) from error

    def save(self, cluster: bytes, change: UnsavedChange) -> None:
        """Save a change in one transaction. The first change of a cluster must have a snapshot, which removes
        what was saved for another one.
        """
        rows = [(number, msgspec.msgpack.encode(operation)) for number, operation in change.operations]
        with self._transaction():
            self._base.execute(
                "INSERT OR REPLACE INTO replica VALUES (1, ?, ?)",
                (cluster, msgspec.msgpack.encode(change.state)),
            )
            if change.snapshot is not None:
                self._base.execute("DELETE FROM operation")
                self._base.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?)", (change.snapshot,))
            self._base.executemany("INSERT INTO operation VALUES (?, ?)", rows)
        if change.snapshot is not None:
            self._snapshot_bytes, self._added_bytes = len(change.snapshot), 0
        self._added_bytes += sum(len(data) for _, data in rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with transaction(self._base):
                yield
        except (sqlite3.Error, OverflowError) as error:  # of a number that SQLite cannot hold
            raise self.broken(error) from error

    def broken(self, error: Exception | str) -> MembershipError:
        """Return the error for a file that cannot be read or written."""
        return MembershipError(
            f"{self._path} cannot be used: {error}",
            hint="Free some disk space if it is full, then start the agent again. If the file is damaged, "
            "move it away: the journals come back from the other machines.",
        )
