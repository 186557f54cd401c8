"""Outbox of notices in SQLite: the targets with their secrets, the watched runs, and what was sent where.

A change of a run and the notices that it calls for are saved in one transaction. So each event makes one
notice for each target, however often the agent restarts. While the disk takes nothing, the agent's memory has
what was queued and sent.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from barnraise.agent.notifications.notice import Notice
from barnraise.agent.notifications.write_behind import Change, T, WriteBehindDatabase
from barnraise.agent_client.notifications.requests import MAX_TARGETS, TargetRow
from barnraise.agent_client.notifications.targets import EventName, Target, kind_of
from barnraise.core.decoding import decode
from barnraise.core.errors import AgentError
from barnraise.identity.private_file import private_directory
from barnraise.runs.record import RunRecord, decode_record, encode_record

FILE_NAME = "notifications.db"
MAX_OF_RUN = 100  # notices of one run for one target, so that a machine that comes and goes sends no flood
_KEPT_EVENTS = 10_000  # of runs that are forgotten, so that none is told again
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
    """Database of one agent's notifications.

    Targets are on disk when they are added or removed. All else is saved at once if the disk takes it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = private_directory(directory) / FILE_NAME
        try:
            self._base = WriteBehindDatabase(self._path, _TABLES, _FORM, ("target", "watched", "notice"))
        except (OSError, sqlite3.Error) as error:
            raise self._broken(error) from error
        rows = self._base.rows("SELECT name, events FROM target")
        self._events = {str(name): frozenset(str(events).split()) for name, events in rows}

    def close(self) -> None:
        self._base.close()

    @property
    def problem(self) -> str:
        """Return why the file lacks the newest notices; empty if it has them all."""
        failure = self._base.failure
        return f"{self._path} cannot be written: {failure}" if failure is not None else ""

    def save_again(self) -> None:
        """Save what the disk did not take before."""
        self._base.save_all()

    @property
    def has_targets(self) -> bool:
        """Tell whether there is a target; without one, no run is watched."""
        return bool(self._events)

    def takes(self, event: EventName) -> bool:
        """Tell whether a target wants notices of an event."""
        return any(event in events for events in self._events.values())

    # targets

    def targets(self) -> list[KnownTarget]:
        """Return all targets, with their secrets."""
        rows = self._base.rows("SELECT name, body, events FROM target ORDER BY name")
        return [
            KnownTarget(name, self._target(body), frozenset(events.split())) for name, body, events in rows
        ]

    def table(self) -> list[TargetRow]:
        """Return the targets as people see them."""
        rows = self._base.rows(
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
        name = next(name for name in names if name not in self._events)
        row = name, msgspec.msgpack.encode(target), " ".join(events)
        runs = [(run, encode_record(record)) for run, record in active.items()]

        def insert(base: sqlite3.Connection) -> None:
            base.execute("INSERT INTO target (name, body, events) VALUES (?, ?, ?)", row)
            base.executemany("INSERT OR IGNORE INTO watched VALUES (?, ?)", runs)

        self._change_on_disk(insert)
        self._events[name] = frozenset(events)
        return name

    def remove(self, name: str) -> None:
        """Remove a target with its secrets and notices; raise AgentError if there is none of this name."""
        if name not in self._events:
            raise AgentError(f"there is no target {name}", hint="List them: barnraise notify list")
        is_last = len(self._events) == 1

        def delete(base: sqlite3.Connection) -> None:
            base.execute("DELETE FROM target WHERE name = ?", (name,))
            base.execute("DELETE FROM notice WHERE target = ?", (name,))
            if is_last:
                base.execute("DELETE FROM watched")

        self._change_on_disk(delete)
        del self._events[name]
        with self._errors():
            self._base.empty_log()

    # runs

    def watched(self, run: str) -> RunRecord | None:
        """Return the last version of a run whose events are in the outbox; None if it is not watched."""
        rows = self._base.rows("SELECT record FROM watched WHERE run = ?", run)
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
        encoded = encode_record(record) if record is not None else None

        def insert(base: sqlite3.Connection) -> int:
            if encoded is not None:
                base.execute("INSERT OR REPLACE INTO watched VALUES (?, ?)", (run, encoded))
            return sum(_insert(base, name, run, notice) for name, notice in pairs)

        return self._base.change(insert) > 0

    def keep_only(self, runs: Collection[str]) -> None:
        """Forget the records of all other runs, and which events they had except the newest.

        A machine may send the record of an old run again. Then its events must still be known.
        """
        known = {str(run) for (run,) in self._base.rows("SELECT run FROM watched")}
        forgotten = [(run,) for run in known.difference(runs)]
        old = (
            "DELETE FROM notice WHERE body IS NULL AND number <= (SELECT max(number) FROM notice) - ?"
            " AND run NOT IN (SELECT run FROM watched)"
        )

        def delete(base: sqlite3.Connection) -> None:
            base.executemany("DELETE FROM watched WHERE run = ?", forgotten)
            base.execute(old, (_KEPT_EVENTS,))

        if forgotten:
            self._base.change(delete)

    # delivery

    def waiting(self) -> list[WaitingNotice]:
        """Return the notices that wait, the oldest first."""
        rows = self._base.rows(
            "SELECT number, target, body, attempts FROM notice WHERE body IS NOT NULL ORDER BY number"
        )
        return [
            WaitingNotice(number, target, self._notice(body), attempts)
            for number, target, body, attempts in rows
        ]

    def note_delivered(self, sent: WaitingNotice, at: float) -> None:
        """Note that a target has taken a notice, which is never sent again."""
        update = (
            "UPDATE target SET delivered = delivered + 1, delivered_at = ?, dropped = 0, failure = ''"
            " WHERE name = ?"
        )

        def note(base: sqlite3.Connection) -> None:
            base.execute("UPDATE notice SET body = NULL WHERE number = ?", (sent.number,))
            base.execute(update, (at, sent.target))

        self._base.change(note)

    def note_failed(self, sent: WaitingNotice, failure: str, at: float, *, gives_up: bool) -> None:
        """Note a failed attempt; with ``gives_up`` the notice is dropped."""
        update = "UPDATE target SET failure = ?, failed_at = ?, dropped = dropped + ? WHERE name = ?"

        def note(base: sqlite3.Connection) -> None:
            base.execute("UPDATE notice SET attempts = attempts + 1 WHERE number = ?", (sent.number,))
            if gives_up:
                base.execute("UPDATE notice SET body = NULL WHERE number = ?", (sent.number,))
            base.execute(update, (failure, at, int(gives_up), sent.target))

        self._base.change(note)

    def _target(self, body: bytes) -> Target:
        return decode(_targets, body, f"a target in {self._path} cannot be read")

    def _notice(self, body: bytes) -> Notice:
        return decode(_notices, body, f"a notice in {self._path} cannot be read")

    def _change_on_disk(self, change: Change[T]) -> T:
        with self._errors():
            return self._base.change_on_disk(change)

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


def _insert(base: sqlite3.Connection, target: str, run: str, notice: Notice) -> int:
    """Insert a notice unless it is there, and return how many rows that are; an end always has room."""
    query = "SELECT count(*) FROM notice WHERE target = ? AND run = ?"
    (count,) = base.execute(query, (target, run)).fetchone()
    if count >= MAX_OF_RUN and notice.event not in ("done", "failed"):
        return 0
    row = target, run, notice.key, msgspec.msgpack.encode(notice)
    insert = "INSERT OR IGNORE INTO notice (target, run, key, body) VALUES (?, ?, ?, ?)"
    return base.execute(insert, row).rowcount
