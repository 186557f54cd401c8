"""Event log of a hub in SQLite (WAL, synced). An event that is not in the log did not happen.

One thread writes. It combines all waiting changes into one transaction, so that a thousand leases cost a few
disk syncs. If a transaction fails, its changes and those waiting behind it are lost, and the hub reloads its
state.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from barnraise.core.database import open_database
from barnraise.core.errors import HubError
from barnraise.hub.protocol.invites import InviteGrant
from barnraise.hub.protocol.messages import Role, SampleSpan, VersionStep
from barnraise.hub.rounds.leases import ActiveLease, PendingUpdate
from barnraise.hub.rounds.sample_pool import SamplePool
from barnraise.hub.rounds.state_machine import DropUpdate, Effect, GrantLease, QueueUpdate, ReleaseLease
from barnraise.hub.server.health import DiskLatency
from barnraise.hub.storage.blobs import FREE_SPACE_HINT

FILE_NAME = "hub.db"
_FORM = 1
_LOCKED_S = 60.0  # while another process creates an invite on a slow disk
MOST_REFUSALS = 500
MOST_SEEN = 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS grants (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS member (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS arrived (name TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS version (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS contribution (number INTEGER, place INTEGER, record BLOB NOT NULL,
    PRIMARY KEY (number, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS refusal (place INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS seen (place INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
"""


class RegionSeat(msgspec.Struct, frozen=True, array_like=True):
    """Seat of a member at a region, with its id there."""

    region: str
    member: str
    is_over: bool = False  # it was expelled, or trains elsewhere


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the run, with its contribution and refusals."""

    node: str
    name: str
    role: Role
    since: float
    accepted: int = 0
    samples: int = 0
    refusals: int = 0  # that count; some acceptances take one away
    usual: int = 0  # samples of its last update
    quarantine: str = ""  # why
    invite: str = ""  # the public key of the one that it came with
    seats: tuple[RegionSeat, ...] = ()  # that this hub gave it, the newest last


class AcceptedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted update: a blob that waits for its round."""

    update: PendingUpdate
    sha256: str
    size: int
    spans: tuple[SampleSpan, ...]
    norm: float
    scale: float  # what it is multiplied with if it is compared with those before it alone
    loss: float | None = None
    merged: int = 1
    has_strangers: bool = False  # among the updates that were merged


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """One member's part in a version."""

    node: str
    lease: str
    samples: int
    spans: tuple[SampleSpan, ...]
    behind: int
    weight: float
    scale: float
    sha256: str
    loss: float | None = None
    merged: int = 1  # updates that a region made this one of


class CommittedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version of the model."""

    number: int
    step: VersionStep
    base: VersionStep | None = None  # a whole state of the same version, now and then
    momentum: str | None = None  # blobs of the hub's own: the outer optimizer's and the error feedback's
    feedback: str | None = None
    time: float = 0.0
    rule: str = ""
    members: int = 0
    samples: int = 0
    loss: float | None = None  # as the members said it


class RefusedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal, for the status page."""

    node: str
    kind: str
    reason: str
    time: float


class UpdateFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprint of an accepted update, to recognize copies and to learn the usual norms."""

    node: str
    lease: str
    sha256: str
    norm: float  # per square root of a sample; 0 while it teaches nothing
    sketch: bytes = b""  # under a key of this process, so it is neither written nor copied
    merged: int = 1


class HubSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a hub starts from."""

    facts: dict[str, bytes]
    members: dict[str, MemberRecord]
    leases: tuple[ActiveLease, ...]
    arrivals: tuple[AcceptedUpdate, ...]
    versions: tuple[CommittedRound, ...]
    refusals: tuple[RefusedUpdate, ...]
    seen: tuple[UpdateFingerprint, ...]


class LogReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Copy of the log for a mirror: `GET /v1/replica?after=V`, for mirrors and the owner."""

    facts: dict[str, bytes]
    members: tuple[MemberRecord, ...]
    grants: tuple[InviteGrant, ...]
    leases: tuple[ActiveLease, ...]  # also those of pending updates, so that their samples return
    versions: tuple[CommittedRound, ...]  # after V, as far back as their blobs are kept
    seen: tuple[UpdateFingerprint, ...]


_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class HubLog:
    """One connection to the log, for one thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        try:
            self._base = open_database(
                self.path, _TABLES, _FORM, HubError, one_thread=False, locked_s=_LOCKED_S
            )
        except (OSError, sqlite3.Error) as error:
            raise broken(error) from error

    def close(self) -> None:
        self._base.close()

    def transact(self, changes: Iterable[Callable[[HubLog], None]]) -> None:
        """Apply all changes or none. Raise HubError if the disk fails."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
            for change in changes:
                change(self)
            self._base.execute("COMMIT")
        except BaseException as error:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise broken(error) from error
            raise

    @contextlib.contextmanager
    def _read_transaction(self) -> Iterator[None]:
        """Read from one snapshot, although other connections may commit meanwhile."""
        try:
            self._base.execute("BEGIN")
            yield
        finally:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")  # nothing was written

    def read(self) -> HubSnapshot:
        return self.read_with_grants()[0]

    def read_with_grants(self) -> tuple[HubSnapshot, tuple[InviteGrant, ...]]:
        try:
            with self._read_transaction():
                snapshot = HubSnapshot(
                    facts=self.read_facts(),
                    members={member.node: member for member in self._all("member", "name", MemberRecord)},
                    leases=self._all("lease", "name", ActiveLease),
                    arrivals=self._all("arrived", "name", AcceptedUpdate),
                    versions=self._all("version", "number", CommittedRound),
                    refusals=self._all("refusal", "place", RefusedUpdate),
                    seen=self._all("seen", "place", UpdateFingerprint),
                )
                return snapshot, self._all("grants", "name", InviteGrant)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise broken(error) from error

    def read_facts(self) -> dict[str, bytes]:
        """Return the facts, also inside a transaction."""
        return dict(self._base.execute("SELECT name, record FROM fact").fetchall())

    def set_fact(self, name: str, value: msgspec.Struct | bytes) -> None:
        record = value if isinstance(value, bytes) else _encoder.encode(value)
        self._put("fact", name, record)

    def put_pool(self, pool: SamplePool) -> None:
        self.set_fact("pool", pool)

    def put_grant(self, grant: InviteGrant) -> None:
        """Store the record of an invite. It stays withdrawn if another process has withdrawn it meanwhile."""
        known = self.grant(grant.key)
        if known is not None and known.withdrawn:
            grant = msgspec.structs.replace(grant, withdrawn=known.withdrawn)
        self._put("grants", grant.key, _encoder.encode(grant))

    def withdraw_grant(self, key: str, why: str) -> None:
        """Mark an invite as withdrawn; nothing happens if it is unknown or withdrawn already."""
        known = self.grant(key)
        if known is not None and not known.withdrawn:
            self._put("grants", key, _encoder.encode(msgspec.structs.replace(known, withdrawn=why)))

    def withdraw_used_by(self, node: str, why: str) -> None:
        """Mark every invite that this member used as withdrawn."""
        for grant in self._all("grants", "name", InviteGrant):
            if node in grant.used_by:
                self.withdraw_grant(grant.key, why)

    def put_member(self, member: MemberRecord) -> None:
        self._put("member", member.node, _encoder.encode(member))

    def put_lease(self, lease: ActiveLease) -> None:
        self._put("lease", lease.id, _encoder.encode(lease))

    def delete_lease(self, name: str) -> None:
        self._base.execute("DELETE FROM lease WHERE name = ?", (name,))

    def put_arrival(self, arrival: AcceptedUpdate) -> None:
        self._put("arrived", arrival.update.id, _encoder.encode(arrival))

    def delete_arrival(self, name: str) -> None:
        self._base.execute("DELETE FROM arrived WHERE name = ?", (name,))

    def put_version(self, version: CommittedRound, parts: Sequence[Contribution] = ()) -> None:
        """Store a version with its contributions. Fails if its number exists: no round is committed twice."""
        record = _encoder.encode(version)
        self._base.execute("INSERT INTO version VALUES (?, ?)", (version.number, record))
        rows = [(version.number, place, _encoder.encode(part)) for place, part in enumerate(parts)]
        self._base.executemany("INSERT INTO contribution VALUES (?, ?, ?)", rows)

    def contributions(self, number: int) -> tuple[Contribution, ...]:
        rows = self._base.execute(
            "SELECT record FROM contribution WHERE number = ? ORDER BY place", (number,)
        ).fetchall()
        return tuple(msgspec.msgpack.decode(row[0], type=Contribution) for row in rows)

    def clear_for_replica(self) -> None:
        """Delete the tables that a replica replaces completely."""
        for table in ("member", "grants", "lease", "arrived", "seen"):
            self._base.execute(f"DELETE FROM {table}")

    def grant(self, key: str) -> InviteGrant | None:
        row = self._base.execute("SELECT record FROM grants WHERE name = ?", (key,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=InviteGrant)

    def put_refusal(self, refusal: RefusedUpdate) -> None:
        self._append("refusal", refusal, MOST_REFUSALS)

    def put_seen(self, seen: UpdateFingerprint) -> None:
        """Store a fingerprint without its sketch."""
        self._append("seen", msgspec.structs.replace(seen, sketch=b""), MOST_SEEN)

    def put_norms(self, norms: Mapping[str, float]) -> None:
        """Set the norms of known fingerprints, by hash."""
        for place, record in self._base.execute("SELECT place, record FROM seen").fetchall():
            seen = msgspec.msgpack.decode(record, type=UpdateFingerprint)
            if seen.sha256 in norms:
                learned = msgspec.structs.replace(seen, norm=norms[seen.sha256])
                self._base.execute(
                    "UPDATE seen SET record = ? WHERE place = ?", (_encoder.encode(learned), place)
                )

    def _put(self, table: str, name: str, record: bytes) -> None:
        self._base.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (name, record))

    def _append(self, table: str, record: msgspec.Struct, max_records: int) -> None:
        place = self._base.execute(
            f"INSERT INTO {table} (record) VALUES (?)", (_encoder.encode(record),)
        ).lastrowid
        self._base.execute(f"DELETE FROM {table} WHERE place <= ?", ((place or 0) - max_records,))

    def _all(self, table: str, order: str, kind: type[T]) -> tuple[T, ...]:
        rows = self._base.execute(f"SELECT record FROM {table} ORDER BY {order}").fetchall()
        decoder = msgspec.msgpack.Decoder(kind)
        return tuple(decoder.decode(row[0]) for row in rows)


def read_fact(facts: dict[str, bytes], name: str, kind: type[T]) -> T | None:
    record = facts.get(name)
    return None if record is None else msgspec.msgpack.decode(record, type=kind)


def broken(error: Exception) -> HubError:
    return HubError(f"the hub's log failed: {error}", hint=FREE_SPACE_HINT)


Changes = list[Callable[[HubLog], None]]
_Waiting = tuple[Changes, "asyncio.Future[None]"]


class HubLogWriter:
    """Writer thread of the log, for a hub that runs in an event loop."""

    def __init__(self, log: HubLog, disk: DiskLatency) -> None:
        self._log, self._disk = log, disk
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._failed: HubError | None = None
        self._thread = threading.Thread(target=self._work, name="hub-log", daemon=True)
        self._thread.start()

    async def write(self, changes: Changes) -> None:
        """Write changes and return when they are on disk.

        Raise HubError if none was written; see `resume`.
        """
        if self._failed is not None:
            raise self._failed
        if changes:
            done: asyncio.Future[None] = self._loop.create_future()
            self._queue.put((changes, done))
            await done

    def resume(self) -> None:
        """Accept writes again after a failure, once the state has been reloaded."""
        self._failed = None

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(10.0)

    def _work(self) -> None:
        while True:
            first = self._queue.get()
            batch = [first]
            while not self._queue.empty():
                batch.append(self._queue.get())
            waiting = [write for write in batch if write is not None]
            if waiting:
                self._write(waiting)
            if None in batch:
                return

    def _write(self, waiting: list[_Waiting]) -> None:
        error = self._failed
        if error is None:
            self._disk.start_commit()
            try:
                self._log.transact([change for changes, _ in waiting for change in changes])
            except Exception as failure:  # noqa: BLE001  # every waiting caller must get the error
                error = self._failed = failure if isinstance(failure, HubError) else broken(failure)
            self._disk.end_commit()
        for _, done in waiting:
            self._loop.call_soon_threadsafe(_settle, done, error)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def change(method: Callable[..., None], *arguments: Any) -> Callable[[HubLog], None]:
    """Return a change for a `HubLogWriter`: ``change(HubLog.put_lease, lease)``."""
    return lambda log: method(log, *arguments)


def changes_of(effects: Iterable[Effect]) -> Changes:
    """Return the changes for the effects of a decision, without its pool."""
    changes: Changes = []
    for effect in effects:
        if isinstance(effect, GrantLease):
            changes.append(change(HubLog.put_lease, effect.lease))
        elif isinstance(effect, ReleaseLease):
            changes.append(change(HubLog.delete_lease, effect.lease))
        elif isinstance(effect, DropUpdate):
            changes.append(change(HubLog.delete_arrival, effect.update))
        elif isinstance(effect, QueueUpdate):
            changes.append(change(HubLog.delete_lease, effect.update.lease))
    return changes
