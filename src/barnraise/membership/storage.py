"""Storage of an agent's promises, trust log and runs in SQLite, synced before any reply that depends on them.

A node that loses this file must become a new node: others rely on its promises.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from barnraise.core.database import open_database
from barnraise.core.errors import BarnraiseError, MembershipError
from barnraise.identity.private_file import private_directory
from barnraise.identity.trust import TrustLog, decode_entry
from barnraise.membership.consensus.paxos import AcceptorState

FILE_NAME = "cluster.db"
VIEWS = "views"
_FORM = 1
_records = msgspec.msgpack.Decoder(AcceptorState)
_TABLES = """
CREATE TABLE IF NOT EXISTS chain (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trust (place INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS run (place INTEGER PRIMARY KEY, name TEXT UNIQUE, record BLOB NOT NULL);
"""


class MembershipStorage:
    """Database of one agent. Every method that writes returns only when the data is on disk."""

    def __init__(self, directory: Path) -> None:
        self._path = private_directory(directory) / FILE_NAME
        try:
            self._base = open_database(self._path, _TABLES, _FORM, MembershipError)
        except (OSError, sqlite3.Error) as error:
            raise self._broken(error) from error

    def close(self) -> None:
        self._base.close()

    def record(self, chain: str = VIEWS) -> AcceptorState | None:
        """Return the stored acceptor state of a chain."""
        row = self._row("SELECT record FROM chain WHERE name = ?", chain)
        if row is None:
            return None
        try:
            return _records.decode(row)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._broken(error) from error

    def log(self) -> TrustLog | None:
        """Return the stored trust log, verified again."""
        rows = self._base.execute("SELECT entry FROM trust ORDER BY place").fetchall()
        if not rows:
            return None
        try:
            return TrustLog.read(decode_entry(row[0]) for row in rows)
        except BarnraiseError as error:
            raise self._broken(error) from error

    def save(
        self,
        record: AcceptorState,
        log_from: int | None = None,
        entries: tuple[bytes, ...] = (),
        chain: str = VIEWS,
    ) -> None:
        """Save in one transaction.

        ``entries`` replace the log after its first ``log_from`` entries, unless ``log_from`` is None.
        """
        encoded = msgspec.msgpack.encode(record)
        with self._transaction():
            self._base.execute("INSERT OR REPLACE INTO chain VALUES (?, ?)", (chain, encoded))
            if log_from is not None:
                self._base.execute("DELETE FROM trust WHERE place >= ?", (log_from,))
                places = enumerate(entries, log_from)
                self._base.executemany("INSERT INTO trust VALUES (?, ?)", list(places))

    def replace_cluster(self, record: AcceptorState, entries: tuple[bytes, ...]) -> None:
        """Replace the cluster that this machine was in by another."""
        with self._transaction():
            self._base.execute("DELETE FROM chain")
            self._base.execute("DELETE FROM trust")
            self._base.execute("DELETE FROM run")
            encoded = msgspec.msgpack.encode(record)
            self._base.execute("INSERT INTO chain VALUES (?, ?)", (VIEWS, encoded))
            self._base.executemany("INSERT INTO trust VALUES (?, ?)", list(enumerate(entries)))

    def fact(self, name: str) -> bytes | None:
        """Return a value that is useful after a restart, such as an address."""
        return self._row("SELECT value FROM fact WHERE name = ?", name)

    def keep_fact(self, name: str, value: bytes) -> None:
        with self._transaction():
            self._base.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))

    def runs(self) -> list[tuple[str, bytes]]:
        """Return the stored records of runs, oldest first."""
        rows = self._base.execute("SELECT name, record FROM run ORDER BY place").fetchall()
        return [(str(name), bytes(record)) for name, record in rows]

    def keep_run(self, name: str, record: bytes) -> None:
        upsert = "INSERT INTO run (name, record) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET record = ?"
        with self._transaction():
            self._base.execute(upsert, (name, record, record))

    def forget_run(self, name: str) -> None:
        with self._transaction():
            self._base.execute("DELETE FROM run WHERE name = ?", (name,))

    def _row(self, query: str, *values: object) -> bytes | None:
        row = self._base.execute(query, values).fetchone()
        return None if row is None else bytes(row[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> MembershipError:
        return MembershipError(
            f"{self._path} cannot be used: {error}",
            hint="Free some disk space if it is full. If the file is damaged, move it and node.key away: "
            "this machine then is a new one; unpair the old one and pair again.",
        )
