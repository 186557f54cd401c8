"""The jobs that this machine knows: their newest records, saved on disk and exchanged between owners.

Records come from owners, and each is as trustworthy as the signature of its spec. Guests receive none.
Machines tell each other which records they have on disk, so each knows which ones a quorum has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from barnraise.agent.context import AgentContext
from barnraise.agent.queue.messages import MAX_HELD, FilesHeld, JobsHeld, JobUpdate, QueueMessage, encode
from barnraise.agent.record_store import MAX_UNWANTED, RecordStore
from barnraise.agent_client.kv_messages import LOBBY, Namespace
from barnraise.core.errors import BarnraiseError, MembershipError, ProtocolError, RunError
from barnraise.core.flow.events import ChangeEvent
from barnraise.identity import NodeId
from barnraise.runs.queue.disk_quorum import DiskQuorum
from barnraise.runs.queue.job import (
    JobRecord,
    KnownJob,
    can_forget,
    check_successor,
    decode_job,
    encode_job,
    end_forgotten,
    supersedes,
)
from barnraise.runs.queue.number_ranges import NumberRanges
from barnraise.runs.queue.spec import JobSpec, read_job

MAX_ACTIVE = 2000  # jobs that have not ended
_MAX_KEPT = 2 * MAX_ACTIVE  # several machines may add the last ones at the same time
_MAX_ENDED = 2000  # not fewer than are added at once, so the table and the results of a sweep stay
_MAX_WAITING = 4096
_ASK_S = 1.0  # between two questions about the same jobs
_SAVED_S = 10.0
_SCOPE = Namespace("@queue", LOBBY)
_FREE_SPACE = "Remove ended jobs from the list, and try again after some minutes: barnraise queue clear"

_log = logging.getLogger(__name__)


class JobRegistry:
    """Table of the jobs that this machine knows.

    ``on_job`` is called for each newer version, and ``on_saved`` when a quorum has one on disk. ``on_files``
    gets the manifests whose files another machine has.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._records = RecordStore(context, _SCOPE, "job", _FREE_SPACE)
        self._forgotten = NumberRanges()
        self._writing = asyncio.Lock()
        self._waiting: dict[int, tuple[JobRecord, NodeId]] = {}  # records that wait for a quorum
        self._disks = DiskQuorum(context.me.raw)
        self._saved = ChangeEvent()
        self._asked_at = float("-inf")
        self.jobs: dict[int, KnownJob] = {}
        self.on_job: Callable[[KnownJob], None] = lambda job: None
        self.on_saved: Callable[[], None] = lambda: None
        self.on_files: Callable[[NodeId, Collection[bytes]], None] = lambda node, manifests: None

    def load(self) -> None:
        """Load the records that were saved before this start."""
        self._forgotten = NumberRanges(self._context.storage.forgotten_jobs())
        self._records.forget(map(str, self._forgotten.newest(MAX_UNWANTED)))
        for number, value in self._context.storage.jobs():
            try:
                job = self._read(decode_job(value))
            except BarnraiseError:
                self._context.storage.drop_job(number)  # written by another version
                continue
            self.jobs[job.number] = job
            self._quorum.change(job.number, job.record)
            self._delete_cleared(job)

    def view_changed(self) -> None:
        """Follow changes of keys and roles. The signatures of thousands of jobs are not checked again."""
        for number, job in self.jobs.items():
            self.jobs[number] = self._known(job.spec, job.record)

    def _read(self, record: JobRecord) -> KnownJob:
        return self._known(read_job(record.signed), record)

    def _known(self, spec: JobSpec, record: JobRecord) -> KnownJob:
        log = self._context.log
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
        """Store a record if it replaces the known one; return False if not.

        Raise ProtocolError if the sender may not change jobs, or if the change is not possible.
        """
        self._check_sender(sender)
        job = self._read(record)
        known = self.jobs.get(job.number)
        if known is None and (job.number in self._forgotten or not job.is_authorized):
            return False  # of the latter, the owner is removed or not known here yet: no fault of the sender
        if known is not None and not self._replaces(job, known, sender):
            return False
        if sender is not None and not self._context.member.is_current(self._loop.time()):
            if job.number in self._waiting or len(self._waiting) < _MAX_WAITING:
                self._waiting[job.number] = record, sender
            return False
        if known is None and sender is not None and self._is_full(_MAX_KEPT):
            _log.warning("job %d is not kept: the queue has %d jobs already", job.number, _MAX_KEPT)
            return False
        self._context.storage.keep_job(job.number, encode_job(record))
        self.jobs[job.number] = job
        self._quorum.change(job.number, record)
        self._delete_cleared(job)
        self._forget_old()
        self.on_job(job)
        if sender is not None:
            self._send(job, but=sender)
        return True

    def _check_sender(self, sender: NodeId | None) -> None:
        if sender is not None and not self._is_owner(sender):
            raise ProtocolError(f"{sender.short} is a guest and cannot add or change a job")

    def _replaces(self, job: KnownJob, known: KnownJob, sender: NodeId | None) -> bool:
        """Tell whether a record replaces the known one."""
        record = job.record
        if not supersedes(record, known.record) and not _contradicts(record, known.record):
            return False
        try:
            check_successor(record, known.record)
        except ProtocolError as error:  # the store had lost its contents in between
            is_same_job = record.signed.order == known.record.signed.order
            claim = record.state.encode() if is_same_job else record.signed.order
            is_real = sender is not None and self._quorum.contradict(job.number, claim, sender.raw)
            if is_real:
                _log.warning("job %d gets the record of most machines: %s", job.number, error.message)
            else:
                _log.info("job %d is not changed: %s", job.number, error.message)
            return is_real and (is_same_job or job.is_authorized)
        return True

    def apply_waiting(self) -> None:
        """Apply the records that waited, once a quorum confirms this machine's view."""
        if not self._waiting or not self._context.member.is_current(self._loop.time()):
            return
        waiting, self._waiting = self._waiting, {}
        for record, sender in waiting.values():
            try:
                self.receive(sender, JobUpdate(record))
            except BarnraiseError as error:
                _log.info("a job that waited is rejected: %s", error.message)

    async def write(self, record: JobRecord) -> KnownJob:
        """Write the next version of a record and send it; raise RunError if another version came first.

        It replaces a record that a quorum has on disk. So the store may have lost its contents.
        """
        number = read_job(record.signed).job
        known = self.jobs.get(number)
        if known is None and self._is_full(MAX_ACTIVE):
            raise RunError(
                f"the queue has {MAX_ACTIVE} jobs already", hint="Cancel some: barnraise queue cancel JOB"
            )
        if known is not None and (unsaved := await self.wait_until_saved([number])):
            raise MembershipError(
                f"job {number} cannot be changed now: {unsaved}",
                hint="Wait until most of the machines are here (`barnraise status`), then try again.",
            )
        known = self.jobs.get(number) if known is not None else None
        expected = encode_job(known.record) if known is not None else b""
        desired = encode_job(record)
        name = str(number)
        async with self._writing:
            if known is not None and record.version != known.record.version + 1:
                raise RunError(f"job {number} was changed at the same time", hint="Try again.")
            stored = await self._records.compare_set(name, expected, desired)
            if stored == expected and stored != desired:  # the store has expired it
                stored = await self._records.compare_set(name, b"", desired)
            elif stored not in (b"", desired) and _is_outdated(stored, known):
                stored = await self._records.compare_set(name, stored, desired)
        if stored != desired:
            self._apply_stored(number, stored)
            raise RunError(f"job {number} was changed at the same time", hint="Try again.")
        self.apply(record)
        job = self.jobs.get(number) or self._read(record)
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

    # what is on disks

    @property
    def unsaved(self) -> Collection[int]:
        """Return the jobs whose newest record is not known to be on the disks of a quorum."""
        return self._quorum.unsaved

    @property
    def _quorum(self) -> DiskQuorum:
        self._disks.set_voters(self._context.member.view.voters)
        return self._disks

    def receive(self, sender: NodeId, message: QueueMessage) -> None:
        """Handle a message of another machine; raise ProtocolError if that machine may not send it."""
        self._check_sender(sender)
        match message:
            case JobUpdate():
                self._receive_record(sender, message.record)
            case JobsHeld():
                self._compare(sender, message)
            case FilesHeld():
                self.on_files(sender, message.manifests)

    def _receive_record(self, sender: NodeId, record: JobRecord) -> None:
        """Apply a record, and tell the sender what is on this machine's disk now."""
        self.apply(record, sender)
        number = read_job(record.signed).job
        known = self.jobs.get(number)
        if known is None:
            if number in self._forgotten and not record.has_ended:  # the sender was away meanwhile
                self._records.forget([str(number)])  # the sender may have written it again
                self._context.send_bulk(sender, encode(JobUpdate(end_forgotten(record))))
            return
        if known.record == record:
            self._note_held(known.number, self._quorum.digest(known.number), sender)
            held = ((known.number, self._quorum.digest(known.number)),)
            self._context.send_bulk(sender, encode(JobsHeld(held)))
        elif known.record.signed.order == record.signed.order and supersedes(known.record, record):
            self._context.send_bulk(sender, encode(JobUpdate(known.record)))

    def _compare(self, sender: NodeId, message: JobsHeld) -> None:
        """Note what another machine has on disk, and send it the records that it lacks."""
        theirs = dict(message.jobs)
        missing = self.jobs.keys() - theirs.keys() if message.is_all else ()
        for number in (*theirs, *missing):
            if number in self.jobs and not self._note_held(number, theirs.get(number, b""), sender):
                self._context.send_bulk(sender, encode(JobUpdate(self.jobs[number].record)))
        if message.asks:
            self._context.send_bulk(sender, encode(self._held(theirs)))

    def _note_held(self, number: int, digest: bytes, node: NodeId) -> bool:
        was_unsaved = number in self.unsaved
        is_same = self._quorum.confirm(number, digest, node.raw)
        if was_unsaved and number not in self.unsaved:
            self._saved.announce()
            self.on_saved()
        return is_same

    def _held(self, numbers: Iterable[int], *, asks: bool = False, is_all: bool = False) -> JobsHeld:
        jobs = tuple((number, self._quorum.digest(number)) for number in numbers)[:MAX_HELD]
        return JobsHeld(jobs, asks=asks, is_all=is_all)

    def ask_unsaved(self) -> None:
        """Ask the other machines which of the unsaved jobs they have on disk; at most once a second."""
        now = self._loop.time()
        if self.unsaved and now - self._asked_at >= _ASK_S:
            self._asked_at = now
            self._send_to_owners(self._held(sorted(self.unsaved), asks=True))

    async def wait_until_saved(self, numbers: Collection[int]) -> str:
        """Wait until a quorum has these jobs on disk; return a sentence about what is missing, or nothing."""
        deadline = self._loop.time() + _SAVED_S
        while waiting := [number for number in numbers if number in self.unsaved]:
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                names = " and ".join(
                    self._context.name_of(NodeId(node)) for node in self._quorum.missing(waiting[0])
                )
                return f"most machines must save it, and {names} did not answer within {_SAVED_S:g} s"
            self.ask_unsaved()
            await self._saved.wait(min(left_s, _ASK_S))
        return ""

    # links

    def compare_all(self) -> None:
        """Exchange everything with all owners: they tell what is saved, and send what is missing here."""
        self._send_to_owners(self._held(self.jobs, asks=True, is_all=True))

    def send_files(self, manifests: Collection[bytes], node: NodeId | None = None) -> None:
        """Tell the owners, or one of them, which files of jobs are all here."""
        message = FilesHeld(tuple(sorted(manifests))[:MAX_HELD])
        if node is None:
            self._send_to_owners(message)
        elif self._is_owner(node) and self._is_owner(self._context.me):
            self._context.send_bulk(node, encode(message))

    def link_up(self, node: NodeId) -> None:
        """Tell an owner which records are here; each then sends the other what that one lacks."""
        if self._is_owner(node) and self._is_owner(self._context.me):
            self._context.send_bulk(node, encode(self._held(self.jobs, is_all=True)))

    def reset(self) -> None:
        """Forget all jobs of the old cluster."""
        self.jobs.clear()
        self._waiting.clear()
        self._quorum.clear()
        self._records.reset()
        self._forgotten = NumberRanges()

    def _send(self, job: KnownJob, but: NodeId | None = None) -> None:
        self._send_to_owners(JobUpdate(job.record), but)

    def _send_to_owners(self, message: QueueMessage, but: NodeId | None = None) -> None:
        data = encode(message)
        for node in self._context.linked_nodes():
            if node != but and self._is_owner(node):
                self._context.send_bulk(node, data)

    def _is_owner(self, node: NodeId) -> bool:
        return self._context.log.role(node) == "owner"

    def _is_full(self, limit: int) -> bool:
        return sum(not job.record.has_ended for job in self.jobs.values()) >= limit

    # what is not kept any more

    def _forget_old(self) -> None:
        numbers = can_forget(self.jobs, _MAX_ENDED)
        if not numbers:
            return
        for number in numbers:
            del self.jobs[number]
            self._quorum.forget(number)
            self._forgotten.add(number)
        self._context.storage.forget_jobs(numbers, self._forgotten)
        self._records.forget(map(str, numbers))

    def _delete_cleared(self, job: KnownJob) -> None:
        """Let the coordinator delete the key of a job that is no longer listed.

        Its end is on the disks of a quorum, and a later write would create the key again.
        """
        if job.record.is_cleared:
            self._records.forget([str(job.number)])

    def _needs_key(self, name: str) -> bool:
        """Tell whether a key must stay; that of the newest job keeps its number from being used again."""
        job = self.jobs.get(int(name))
        return job is not None and (not job.record.is_cleared or job.number == max(self.jobs))

    async def delete_forgotten(self) -> None:
        """Delete the store's records of old jobs while this machine coordinates, until cancelled."""
        await self._records.delete_forgotten(self._needs_key)


def _contradicts(record: JobRecord, known: JobRecord) -> bool:
    """Tell whether two records can never become one: they are of two jobs, or have two ends."""
    if record.signed.order != known.signed.order:
        return True
    return record.has_ended and known.has_ended and record.state != known.state


def _is_outdated(stored: bytes, known: KnownJob | None) -> bool:
    """Tell whether the store lost its contents, and has a record that the known one replaces.

    A quorum has the known one on disk, so another job under its number counts for nothing.
    """
    if known is None:
        return False
    record = decode_job(stored)
    return record.signed.order != known.record.signed.order or supersedes(known.record, record)
