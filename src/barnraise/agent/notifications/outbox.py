"""Outbox of notices in SQLite: the targets with their secrets, the watched runs, and what was sent where.

A change of a run and the notices that it calls for are saved in one transaction. So each event makes one
notice for each target, however often the agent restarts.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from barnraise.agent.notifications.notice import Notice
from barnraise.agent_client.notifications.requests import MAX_TARGETS, TargetRow
from barnraise.agent_client.notifications.targets import EventName, Target, kind_of
from barnraise.core.database import open_database, transaction
from barnraise.core.decoding import decode
from barnraise.core.errors import AgentError
from barnraise.identity.private_file import private_directory
from barnraise.runs.record import RunRecord, decode_record, encode_record

FILE_NAME = "notifications.db"
MAX_OF_RUN = 100  # notices of one run for one target, so that a machine that comes and goes sends no flood
_FORM = 1
_targets: msgspec.msgpack.Decoder[Target] = msgspec.msgpack.Decoder(Target)
_notices = msgspec.msgpack.Decoder(Notice)
_TABLES = """
CREATE TABLE IF NOT EXISTS target (
    name TEXT PRIMARY KEY, body BLOB NOT NULL, events TEXT NOT NULL, delivered INTEGER NOT NULL DEFAULT 0,
    delivered_at REAL, dropped INTEGER NOT NULL DEFAULT 0, failure TEXT NOT NULL DEFAULT '', failed_at REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS watched (run TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS notice (
    number INTEGER PRIMARY KEY, target TEXT NOT NULL, run TEXT NOT NULL, key TEXT NOT NULL,
    body BLOB, attempts INTEGER NOT NULL DEFAULT 0, UNIQUE (target, run, key)
);
"""


class KnownTarget(NamedTuple):
    """Target with its name and its events."""

    name: str
    target: Target
    events: frozenset[str]


class WaitingNotice(NamedTuple):
    """Notice that a target has not taken yet. ``attempts``: how many failed."""

    number: int
    target: str
    notice: Notice
    attempts: int


class Outbox:
    """Database of one agent's notifications. A method that writes returns when the data is on disk."""

    def __init__(self, directory: Path) -> None:
        self._path = private_directory(directory) / FILE_NAME
        try:
            self._base = open_database(self._path, _TABLES, _FORM, AgentError)
            self._base.execute("PRAGMA secure_delete=ON")
        except (OSError, sqlite3.Error) as error:
            raise self._broken(error) from error
        self._names = frozenset(str(name) for (name,) in self._rows("SELECT name FROM target"))

    def close(self) -> None:
        self._base.close()

    @property
    def has_targets(self) -> bool:
        """Tell whether there is a target; without one, no run is watched."""
        return bool(self._names)

    # targets

    def targets(self) -> list[KnownTarget]:
        """Return all targets, with their secrets."""
        rows = self._rows("SELECT name, body, events FROM target ORDER BY name")
        return [
            KnownTarget(name, self._target(body), frozenset(events.split())) for name, body, events in rows
        ]

    def table(self) -> list[TargetRow]:
        """Return the targets as people see them."""
        rows = self._rows(
            "SELECT name, body, events, delivered, delivered_at, dropped, failure, failed_at, "
            "(SELECT count(*) FROM notice WHERE notice.target = target.name AND notice.body IS NOT NULL) "
            "FROM target ORDER BY name"
        )
        return [
            TargetRow(
                name=name,
                address=self._target(body).masked,
                events=tuple(events.split()),
                delivered=delivered,
                delivered_at=delivered_at,
                dropped=dropped,
                failure=failure,
                failed_at=failed_at,
                waiting=waiting,
            )
            for name, body, events, delivered, delivered_at, dropped, failure, failed_at, waiting in rows
        ]

    def add(self, target: Target, events: Sequence[EventName], active: dict[str, RunRecord]) -> str:
        """Add a target and return its name; watch the runs that are active from now on."""
        known = self.targets()
        for other in known:
            if other.target == target:
                raise AgentError(
                    f"{other.name} is this target already",
                    hint=f"Remove it: barnraise notify remove {other.name}",
                )
        if len(known) >= MAX_TARGETS:
            raise AgentError(f"there are {MAX_TARGETS} targets already", hint="Remove one that is not used.")
        kind = kind_of(target)
        names = (kind, *(f"{kind}-{number}" for number in range(2, MAX_TARGETS + 2)))
        name = next(name for name in names if name not in self._names)
        with self._transaction():
            self._base.execute(
                "INSERT INTO target (name, body, events) VALUES (?, ?, ?)",
                (name, msgspec.msgpack.encode(target), " ".join(events)),
            )
            rows = [(run, encode_record(record)) for run, record in active.items()]
            self._base.executemany("INSERT OR IGNORE INTO watched VALUES (?, ?)", rows)
        self._names |= {name}
        return name

    def remove(self, name: str) -> None:
        """Remove a target with its secrets and notices; raise AgentError if there is none of this name."""
        if name not in self._names:
            raise AgentError(f"there is no target {name}", hint="List them: barnraise notify list")
        with self._transaction():
            self._base.execute("DELETE FROM target WHERE name = ?", (name,))
            self._base.execute("DELETE FROM notice WHERE target = ?", (name,))
            if len(self._names) == 1:
                self._base.execute("DELETE FROM watched")
        self._names -= {name}
        with self._errors():  # the log still has the secrets
            self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # runs

    def watched(self, run: str) -> RunRecord | None:
        """Return the last version of a run whose events are in the outbox; None if it is not watched."""
        rows = self._rows("SELECT record FROM watched WHERE run = ?", run)
        return decode_record(rows[0][0]) if rows else None

    def save(self, run: str, record: RunRecord | None, notices: Sequence[Notice]) -> bool:
        """Save a version of a run and its notices for all targets that want them; tell whether any is new.

        ``record``: None if only notices are new.
        """
        pairs = [
            (known.name, notice)
            for known in (self.targets() if notices else ())
            for notice in notices
            if notice.event in known.events
        ]
        with self._transaction():
            added = sum(self._insert(name, run, notice) for name, notice in pairs)
            if record is not None:
                row = run, encode_record(record)
                self._base.execute("INSERT OR REPLACE INTO watched VALUES (?, ?)", row)
        return added > 0

    def _insert(self, target: str, run: str, notice: Notice) -> int:
        """Insert a notice unless it is there, and return how many rows that are; an end always has room."""
        query = "SELECT count(*) FROM notice WHERE target = ? AND run = ?"
        (count,) = self._base.execute(query, (target, run)).fetchone()
        if count >= MAX_OF_RUN and notice.event not in ("done", "failed"):
            return 0
        row = target, run, notice.key, msgspec.msgpack.encode(notice)
        insert = "INSERT OR IGNORE INTO notice (target, run, key, body) VALUES (?, ?, ?, ?)"
        return self._base.execute(insert, row).rowcount

    def keep_only(self, runs: Collection[str]) -> None:
        """Forget which events all other runs had, except notices that still wait."""
        known = {str(row[0]) for row in self._rows("SELECT run FROM watched UNION SELECT run FROM notice")}
        forgotten = [(run,) for run in known.difference(runs)]
        if forgotten:
            with self._transaction():
                self._base.executemany("DELETE FROM watched WHERE run = ?", forgotten)
                self._base.executemany("DELETE FROM notice WHERE run = ? AND body IS NULL", forgotten)

    # delivery

    def waiting(self) -> list[WaitingNotice]:
        """Return the notices that wait, the oldest first."""
        rows = self._rows(
            "SELECT number, target, body, attempts FROM notice WHERE body IS NOT NULL ORDER BY number"
        )
        return [
            WaitingNotice(number, target, self._notice(body), attempts)
            for number, target, body, attempts in rows
        ]

    def note_delivered(self, sent: WaitingNotice, at: float) -> None:
        """Note that a target has taken a notice, which is never sent again."""
        with self._transaction():
            self._base.execute("UPDATE notice SET body = NULL WHERE number = ?", (sent.number,))
            self._base.execute(
                "UPDATE target SET delivered = delivered + 1, delivered_at = ?, dropped = 0, failure = ''"
                " WHERE name = ?",
                (at, sent.target),
            )

    def note_failed(self, sent: WaitingNotice, failure: str, at: float, *, gives_up: bool) -> None:
        """Note a failed attempt; with ``gives_up`` the notice is dropped."""
        with self._transaction():
            body = ", body = NULL" if gives_up else ""
            self._base.execute(
                f"UPDATE notice SET attempts = attempts + 1{body} WHERE number = ?",  # noqa: S608
                (sent.number,),
            )
            self._base.execute(
                "UPDATE target SET failure = ?, failed_at = ?, dropped = dropped + ? WHERE name = ?",
                (failure, at, int(gives_up), sent.target),
            )

    def _target(self, body: bytes) -> Target:
        return decode(_targets, body, f"a target in {self._path} cannot be read")

    def _notice(self, body: bytes) -> Notice:
        return decode(_notices, body, f"a notice in {self._path} cannot be read")

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._base.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors(), transaction(self._base):
            yield

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> AgentError:
        return AgentError(
            f"{self._path} cannot be used: {error}",
            hint="Free some disk space if it is full. If the file is damaged, move it away, start the agent "
            "again, and add the targets again.",
        )
