"""The jobs that this machine knows: their newest records, saved on disk and exchanged between owners.

Records come from owners, and each is as trustworthy as the signature of its spec. Guests receive none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from barnraise.agent.context import AgentContext
from barnraise.agent.queue.messages import JobUpdate, encode
from barnraise.agent.record_store import RecordStore
from barnraise.agent_client.kv_messages import LOBBY, Namespace
from barnraise.core.errors import BarnraiseError, MembershipError, ProtocolError, RunError
from barnraise.identity import NodeId
from barnraise.runs.queue.job import JobRecord, KnownJob, can_forget, check_successor, decode_job, encode_job
from barnraise.runs.queue.spec import read_job

MAX_ACTIVE = 2000  # jobs that have not ended
_MAX_ENDED = 500
_MAX_HELD = 4096
_SCOPE = Namespace("@queue", LOBBY)

_log = logging.getLogger(__name__)


class JobRegistry:
    """Table of the jobs that this machine knows. ``on_job`` is called for each newer version."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._records = RecordStore(context, _SCOPE, "job")
        self._writing = asyncio.Lock()
        self._held: dict[int, tuple[JobRecord, NodeId]] = {}  # records that wait for a quorum
        self.jobs: dict[int, KnownJob] = {}
        self.on_job: Callable[[KnownJob], None] = lambda job: None

    def load(self) -> None:
        """Load the records that were saved before this start."""
        for number, value in self._context.storage.jobs():
            try:
                job = self._read(decode_job(value))
            except BarnraiseError:
                self._context.storage.forget_job(number)  # written by another version
                continue
            self.jobs[job.number] = job

    def view_changed(self) -> None:
        """Follow changes of keys and roles."""
        for number, job in self.jobs.items():
            self.jobs[number] = self._read(job.record)

    def _read(self, record: JobRecord) -> KnownJob:
        spec, log = read_job(record.signed), self._context.log
        nodes = (
            node if log.role(NodeId(node)) is not None else log.current(NodeId(node)).raw
            for node in spec.nodes
        )
        return KnownJob(
            spec,
            record,
            tuple(dict.fromkeys(nodes)),
            is_authorized=log.role(NodeId(spec.by)) == "owner",
        )

    def find(self, number: int) -> KnownJob:
        """Return a job; raise RunError if there is none."""
        job = self.jobs.get(number)
        if job is None or job.record.is_cleared:
            raise RunError(f"there is no job {number}", hint="See all with: barnraise queue")
        return job

    @property
    def next_number(self) -> int:
        """Return the number of the next job."""
        return max(self.jobs, default=0) + 1

    # records

    def apply(self, record: JobRecord, sender: NodeId | None = None) -> bool:
        """Store a record if it is newer than the known one; return False if not.

        Raise ProtocolError if the sender may not change jobs, or if the change is not possible.
        """
        if sender is not None and self._context.log.role(sender) != "owner":
            raise ProtocolError(f"{sender.short} is a guest and cannot add or change a job")
        job = self._read(record)
        known = self.jobs.get(job.number)
        if known is None and not job.is_authorized:
            return False  # its owner is removed or not known here yet: no fault of the sender
        if known is not None:
            if record.version <= known.record.version:
                return False
            try:
                check_successor(record, known.record)
            except ProtocolError as error:  # the store had lost its contents in between: the first one stays
                _log.warning("job %d is not changed: %s", job.number, error.message)
                return False
        if sender is not None and not self._context.member.is_current(self._loop.time()):
            if job.number in self._held or len(self._held) < _MAX_HELD:
                self._held[job.number] = record, sender
            return False
        if known is None and self._is_full():
            _log.warning("job %d is not kept: the queue has %d jobs already", job.number, MAX_ACTIVE)
            return False
        self._context.storage.keep_job(job.number, encode_job(record))
        self.jobs[job.number] = job
        self._forget_old()
        self.on_job(job)
        if sender is not None:
            self._send(job, but=sender)
        return True

    def apply_held(self) -> None:
        """Apply the records that waited, once a quorum confirms this machine's view."""
        if not self._held or not self._context.member.is_current(self._loop.time()):
            return
        held, self._held = self._held, {}
        for record, sender in held.values():
            try:
                self.apply(record, sender)
            except BarnraiseError as error:
                _log.info("a job that waited is rejected: %s", error.message)

    async def write(self, record: JobRecord) -> KnownJob:
        """Write the next version of a record and send it; raise RunError if another version came first."""
        number = read_job(record.signed).job
        known = self.jobs.get(number)
        if known is None and self._is_full():
            raise RunError(
                f"the queue has {MAX_ACTIVE} jobs already", hint="Cancel some: barnraise queue cancel JOB"
            )
        expected = encode_job(known.record) if known is not None else b""
        desired = encode_job(record)
        name = str(number)
        async with self._writing:
            stored = await self._records.compare_set(name, expected, desired)
            if stored == expected and stored != desired:  # the store has expired it
                stored = await self._records.compare_set(name, b"", desired)
            elif stored not in (b"", desired) and _is_outdated(stored, known):
                stored = await self._records.compare_set(name, stored, desired)
        if stored != desired:
            self._apply_stored(number, stored)
            raise RunError(f"job {number} was changed at the same time", hint="Try again.")
        self.apply(record)
        job = self.jobs[number]
        self._send(job)
        return job

    def _apply_stored(self, number: int, stored: bytes) -> None:
        """Apply the version that the store has in place of ours."""
        record = decode_job(stored)
        if read_job(record.signed).job != number:
            raise ProtocolError(f"the store has another job under the number {number}")
        if not self._context.member.is_current(self._loop.time()):
            raise MembershipError(
                f"job {number} was changed elsewhere, and no quorum of this cluster confirms it",
                hint="Wait until most of the machines are here (`barnraise status`), then try again.",
            )
        self.apply(record)

    def link_up(self, node: NodeId) -> None:
        """Send all records to an owner that may have missed some."""
        if self._is_owner(node) and self._is_owner(self._context.me):
            for job in self.jobs.values():
                self._context.send_bulk(node, encode(JobUpdate(job.record)))

    def reset(self) -> None:
        """Forget all jobs of the old cluster."""
        self.jobs.clear()
        self._held.clear()

    def _send(self, job: KnownJob, but: NodeId | None = None) -> None:
        message = encode(JobUpdate(job.record))
        for node in self._context.linked_nodes():
            if node != but and self._is_owner(node):
                self._context.send_bulk(node, message)

    def _is_owner(self, node: NodeId) -> bool:
        return self._context.log.role(node) == "owner"

    def _is_full(self) -> bool:
        return sum(not job.record.has_ended for job in self.jobs.values()) >= MAX_ACTIVE

    def _forget_old(self) -> None:
        for number in can_forget(self.jobs, _MAX_ENDED):
            del self.jobs[number]
            self._context.storage.forget_job(number)


def _is_outdated(stored: bytes, known: KnownJob | None) -> bool:
    """Tell whether the store lost its contents and has an earlier version than the one known here."""
    return known is not None and decode_job(stored).version < known.record.version
