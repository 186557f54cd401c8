"""Storage of an agent's promises, trust log and runs in SQLite, synced before any reply that depends on them.

A node that loses this file must become a new node: others rely on its promises.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from barnraise.core.database import open_database, transaction
from barnraise.core.errors import BarnraiseError, MembershipError
from barnraise.identity.private_file import private_directory
from barnraise.identity.trust import TrustLog, decode_entry
from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import AcceptorState
from barnraise.membership.effects import SaveState
from barnraise.membership.history import MOST_LINKS, StoredHistory

FILE_NAME = "cluster.db"
VIEWS = "views"
MOST_FORGOTTEN = 4096  # runs
_FORM = 2
_links = msgspec.msgpack.Decoder(CertifiedDecision)
_records = msgspec.msgpack.Decoder(AcceptorState)
_TABLES = """
CREATE TABLE IF NOT EXISTS chain (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decision (number INTEGER PRIMARY KEY, link BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS removed (node BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trust (place INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS run (place INTEGER PRIMARY KEY, name TEXT UNIQUE, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS job (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS removal (run TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS forgotten_run (place INTEGER PRIMARY KEY, name TEXT UNIQUE, digest BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS forgotten_job (first INTEGER PRIMARY KEY, last INTEGER NOT NULL);
"""
_OF_ONE_CLUSTER = (
    "chain",
    "decision",
    "removed",
    "trust",
    "run",
    "job",
    "removal",
    "forgotten_run",
    "forgotten_job",
)


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

    def history(self) -> StoredHistory | None:
        """Return everything about the cluster that was stored, or None if this machine is new."""
        log, record = self.log(), self.record()
        if log is None or record is None:
            return None
        links = self._base.execute("SELECT link FROM decision ORDER BY number").fetchall()
        nodes = self._base.execute("SELECT node FROM removed").fetchall()
        try:
            chain = tuple(_links.decode(row[0]) for row in links)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._broken(error) from error
        return StoredHistory(record, log, chain, frozenset(bytes(row[0]) for row in nodes))

    def log(self) -> TrustLog | None:
        """Return the stored trust log, verified again."""
        rows = self._base.execute("SELECT entry FROM trust ORDER BY place").fetchall()
        if not rows:
            return None
        try:
            return TrustLog.read(decode_entry(row[0]) for row in rows)
        except BarnraiseError as error:
            raise self._broken(error) from error

    def save(self, state: SaveState, chain: str = VIEWS) -> None:
        """Save in one transaction."""
        with self._transaction():
            self._save_record(state.record, chain)
            if state.log_from is not None:
                self._base.execute("DELETE FROM trust WHERE place >= ?", (state.log_from,))
                places = enumerate(state.entries, state.log_from)
                self._base.executemany("INSERT INTO trust VALUES (?, ?)", list(places))
            if state.links:
                self._save_links(state.links)
            removed = [(node,) for node in sorted(state.removed)]
            self._base.executemany("INSERT OR IGNORE INTO removed VALUES (?)", removed)

    def replace_cluster(self, record: AcceptorState, entries: tuple[bytes, ...]) -> None:
        """Replace the cluster that this machine was in by another."""
        with self._transaction():
            for table in _OF_ONE_CLUSTER:
                self._base.execute(f"DELETE FROM {table}")  # names of our own
            self._save_record(record, VIEWS)
            if record.decided.number:
                self._save_links((CertifiedDecision(record.decided),))
            self._base.executemany("INSERT INTO trust VALUES (?, ?)", list(enumerate(entries)))

    def _save_record(self, record: AcceptorState, chain: str) -> None:
        self._base.execute(
            "INSERT OR REPLACE INTO chain VALUES (?, ?)", (chain, msgspec.msgpack.encode(record))
        )

    def _save_links(self, links: tuple[CertifiedDecision, ...]) -> None:
        first, last = links[0].decision.number, links[-1].decision.number
        self._base.execute(
            "DELETE FROM decision WHERE number >= ? OR number <= ?", (first, last - MOST_LINKS)
        )
        rows = [(link.decision.number, msgspec.msgpack.encode(link)) for link in links]
        self._base.executemany("INSERT INTO decision VALUES (?, ?)", rows)

    def fact(self, name: str) -> bytes | None:
        """Return a value that is useful after a restart, such as an address."""
        return self._row("SELECT value FROM fact WHERE name = ?", name)

    def keep_fact(self, name: str, value: bytes) -> None:
        with self._transaction():
            self._base.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))

    def runs(self) -> list[tuple[str, bytes]]:
        """Return the stored records of runs, in the order of their last changes."""
        rows = self._base.execute("SELECT name, record FROM run ORDER BY place").fetchall()
        return [(str(name), bytes(record)) for name, record in rows]

    def keep_run(self, name: str, record: bytes) -> None:
        with self._transaction():
            self._base.execute("INSERT OR REPLACE INTO run (name, record) VALUES (?, ?)", (name, record))

    def drop_run(self, name: str) -> None:
        """Delete the record of a run that cannot be read."""
        with self._transaction():
            self._base.execute("DELETE FROM run WHERE name = ?", (name,))

    def forget_run(self, name: str, digest: bytes) -> None:
        """Delete the record of a run, and remember the hash of its spec; only the newest hashes are kept."""
        with self._transaction():
            self._base.execute("DELETE FROM run WHERE name = ?", (name,))
            self._base.execute(
                "INSERT OR REPLACE INTO forgotten_run (name, digest) VALUES (?, ?)", (name, digest)
            )
            self._base.execute(
                "DELETE FROM forgotten_run WHERE place <= (SELECT MAX(place) FROM forgotten_run) - ?",
                (MOST_FORGOTTEN,),
            )

    def forgotten_runs(self) -> list[tuple[str, bytes]]:
        """Return the names of forgotten runs and the hashes of their specs, oldest first."""
        rows = self._base.execute("SELECT name, digest FROM forgotten_run ORDER BY place").fetchall()
        return [(str(name), bytes(digest)) for name, digest in rows]

    def jobs(self) -> list[tuple[int, bytes]]:
        """Return the stored records of jobs, by number."""
        rows = self._base.execute("SELECT number, record FROM job ORDER BY number").fetchall()
        return [(int(number), bytes(record)) for number, record in rows]

    def keep_job(self, number: int, record: bytes) -> None:
        with self._transaction():
            self._base.execute("INSERT OR REPLACE INTO job VALUES (?, ?)", (number, record))

    def drop_job(self, number: int) -> None:
        """Delete the record of a job that cannot be read."""
        with self._transaction():
            self._base.execute("DELETE FROM job WHERE number = ?", (number,))

    def forget_jobs(self, numbers: Iterable[int], forgotten: Iterable[tuple[int, int]]) -> None:
        """Delete the records of jobs. ``forgotten``: all numbers that are forgotten then, as ranges."""
        with self._transaction():
            self._base.executemany("DELETE FROM job WHERE number = ?", [(number,) for number in numbers])
            self._base.execute("DELETE FROM forgotten_job")
            self._base.executemany("INSERT INTO forgotten_job VALUES (?, ?)", list(forgotten))

    def forgotten_jobs(self) -> list[tuple[int, int]]:
        """Return the numbers of forgotten jobs, as ranges."""
        rows = self._base.execute("SELECT first, last FROM forgotten_job ORDER BY first").fetchall()
        return [(int(first), int(last)) for first, last in rows]

    def removals(self) -> list[tuple[float, str]]:
        """Return the stored removals of runs' records: their times and the runs."""
        rows = self._base.execute("SELECT at, run FROM removal").fetchall()
        return [(float(at), str(run)) for at, run in rows]

    def keep_removals(self, removals: Iterable[tuple[float, str]]) -> None:
        """Replace the stored removals."""
        with self._transaction():
            self._base.execute("DELETE FROM removal")
            self._base.executemany("INSERT INTO removal (at, run) VALUES (?, ?)", list(removals))

    def _row(self, query: str, *values: object) -> bytes | None:
        row = self._base.execute(query, values).fetchone()
        return None if row is None else bytes(row[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with transaction(self._base):
                yield
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> MembershipError:
        return MembershipError(
            f"{self._path} cannot be used: {error}",
            hint="Free some disk space if it is full. If the file is damaged, move it and node.key away: "
            "this machine then is a new one; unpair the old one and pair again.",
        )
