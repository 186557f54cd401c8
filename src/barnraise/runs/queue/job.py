"""Job record: the state of a job as the cluster knows it, and what people may change. Pure.

A job record is kept as a run record is: it has a number, and the next version is written by compare-and-set.
An end is final, so each job ends exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from barnraise.agent_client.queue.requests import MAX_PRIORITY, JobState
from barnraise.agent_client.run_options import MAX_MACHINES, Digest
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError
from barnraise.runs.queue.spec import DEVICE, MAX_ATTEMPTS, JobSpec, SignedJob, attempt_run, read_job

_GAP = 1 << 20  # between the places of two jobs, for those that are moved between them
_MAX_PLACE = 1 << 60
_MAX_REASON = 2000
ENDED_STATES = ("done", "failed", "cancelled")

Node = Annotated[bytes, Meta(min_length=32, max_length=32)]
Reason = Annotated[str, Meta(max_length=_MAX_REASON)]
AttemptEnd = Literal["", "done", "failed", "lost", "stopped"]


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt of a job: one run. ``end``: how it ended; empty while it goes on.

    ``at``: the coordinator's wall clock, for people only. ``lost``: its machines went away, or no machine
    sent them its files, which is no failure of the job. ``short_of``: memory that its device had, if that
    was not enough.
    """

    number: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1, max_length=MAX_MACHINES)]
    device: Annotated[str, Meta(pattern=DEVICE, max_length=16)] = ""
    at: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    end: AttemptEnd = ""
    why: Reason = ""
    short_of: Annotated[int, Meta(ge=0, le=1 << 60)] = 0


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the state of a job. ``place``: its position among jobs of its priority.

    ``is_collected``: ``results`` is complete. ``results_note``: why not all files of a done job are there.
    """

    signed: SignedJob
    version: Annotated[int, Meta(ge=1, le=1 << 40)] = 1
    state: JobState = "waiting"
    is_paused: bool = False
    is_cleared: bool = False  # no longer listed, and its files may be removed
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    place: Annotated[int, Meta(ge=-_MAX_PLACE, le=_MAX_PLACE)] = 0
    attempts: Annotated[tuple[JobAttempt, ...], Meta(max_length=MAX_ATTEMPTS)] = ()
    why: Reason = ""
    progress: TrainingProgress | None = None  # the last one of a job that has ended
    results: Digest = b""
    results_at: Annotated[bytes, Meta(max_length=32)] = b""
    is_collected: bool = False
    results_note: Reason = ""
    ended_at: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # wall clock; says which jobs are forgotten first

    @property
    def has_ended(self) -> bool:
        """Tell whether the job is done, failed or cancelled."""
        return self.state in ENDED_STATES

    @property
    def awaits_results(self) -> bool:
        """Tell whether the job is done, and the files that it wrote are not known yet."""
        return self.state == "done" and not self.is_collected and not self.is_cleared

    @property
    def attempt(self) -> JobAttempt | None:
        """Return the attempt that goes on; None if there is none."""
        return self.attempts[-1] if self.attempts and not self.attempts[-1].end else None


class KnownJob(msgspec.Struct, frozen=True):
    """Job record with its spec. ``nodes``: the machines that the user named, with the keys they have now."""

    spec: JobSpec
    record: JobRecord
    nodes: tuple[bytes, ...] = ()
    is_authorized: bool = True  # False: the machine that added it is no longer an owner

    @property
    def number(self) -> int:
        """Return the number of the job."""
        return self.spec.job

    @property
    def run(self) -> str:
        """Return the name of the newest run; empty if there was none."""
        return attempt_run(self.spec, self.record.attempts[-1].number) if self.record.attempts else ""

    @property
    def runs(self) -> dict[str, JobAttempt]:
        """Return all attempts by the names of their runs."""
        return {attempt_run(self.spec, attempt.number): attempt for attempt in self.record.attempts}


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_records = msgspec.msgpack.Decoder(JobRecord)


def new_job(signed: SignedJob, priority: int = 0) -> JobRecord:
    """Return the first version of a job's record."""
    return JobRecord(signed=signed, priority=priority, place=read_job(signed).job * _GAP)


def encode_job(record: JobRecord) -> bytes:
    """Encode a record for the store."""
    return _encoder.encode(record)


def decode_job(data: bytes) -> JobRecord:
    """Decode a record; raise ProtocolError if it is malformed."""
    return decode(_records, data, "the record of a job cannot be read")


def check_successor(record: JobRecord, known: JobRecord) -> None:
    """Raise ProtocolError if a record is of another job, or changes the end of this one."""
    if record.signed.order != known.signed.order:
        raise ProtocolError("two different jobs have the same number")
    if known.has_ended and record.state != known.state:
        raise ProtocolError(f"a job that is {known.state} cannot become {record.state}")


def supersedes(record: JobRecord, known: JobRecord) -> bool:
    """Tell whether a record replaces the known one, in any order in which they arrive.

    A store that lost its contents may have let two histories begin. An end then replaces all that goes on,
    and of two records with the same version every machine takes the same one.
    """
    if record.has_ended != known.has_ended:
        return record.has_ended
    if record.version != known.version:
        return record.version > known.version
    return (len(record.attempts), encode_job(record)) > (len(known.attempts), encode_job(known))


def changed_job(record: JobRecord, **fields: object) -> JobRecord:
    """Return the next version of a record with these fields."""
    if isinstance(why := fields.get("why"), str):
        fields["why"] = why[:_MAX_REASON]
    return replace(record, version=record.version + 1, **fields)


def end_attempt(
    record: JobRecord, end: AttemptEnd, why: str, *, short_of: int = 0, **fields: object
) -> JobRecord:
    """Return the next version, with the current attempt ended."""
    last = replace(record.attempts[-1], end=end, why=why[:_MAX_REASON], short_of=short_of)
    return changed_job(record, attempts=(*record.attempts[:-1], last), why=why, **fields)


def with_results(
    record: JobRecord, results: bytes, results_at: bytes, note: str, *, is_collected: bool
) -> JobRecord:
    """Return the same version of a record, with what is known about the files that the job wrote."""
    return replace(
        record,
        results=results,
        results_at=results_at,
        is_collected=is_collected,
        results_note=note[:_MAX_REASON],
    )


# what people change


def cancel_job(record: JobRecord, requester: str, *, at: float = 0.0) -> JobRecord | None:
    """Return the record of a job that a person cancels; None if it has ended. ``at``: the wall clock."""
    if record.has_ended:
        return None
    why = f"cancelled from {requester}"
    if record.attempt is not None:
        return end_attempt(record, "stopped", why, state="cancelled", ended_at=at)
    return changed_job(record, state="cancelled", why=why, ended_at=at)


def end_forgotten(record: JobRecord) -> JobRecord:
    """Return the end of a job for a machine that was away while the others forgot the job.

    How it ended is not known any more, so it is not listed.
    """
    why = "it ended while this machine was away"
    ended = cancel_job(record, "") or record
    return replace(ended, why=why, is_cleared=True)


def pause_job(record: JobRecord, *, is_paused: bool) -> JobRecord | None:
    """Return the record of a job that starts only after a resume; None if that changes nothing.

    A running job goes on: only its next attempt waits.
    """
    if record.has_ended or record.is_paused == is_paused:
        return None
    return changed_job(record, is_paused=is_paused)


def clear_job(record: JobRecord) -> JobRecord | None:
    """Return the record of an ended job that is no longer listed; None if that changes nothing."""
    return changed_job(record, is_cleared=True) if record.has_ended and not record.is_cleared else None


def queue_order(jobs: Iterable[KnownJob]) -> list[KnownJob]:
    """Return jobs in the order in which they start."""
    return sorted(jobs, key=lambda job: (-job.record.priority, job.record.place, job.number))


def move_job(
    jobs: Mapping[int, KnownJob], number: int, before: int, *, to_end: bool = False
) -> JobRecord | None:
    """Return the record of a job at its new place; None if nothing changes. ``before`` 0: the front.

    Raise RunError if that is not possible.
    """
    job = _waiting(jobs, number)
    others = [other for other in queue_order(jobs.values()) if _waits(other) and other is not job]
    if not others:
        return None
    if before == number:
        raise RunError("a job cannot be moved before itself", hint="Name another job.")
    low: int | None
    high: int | None
    if to_end:
        record, low, high = others[-1].record, others[-1].record.place, None
    else:
        target = _waiting(jobs, before) if before else others[0]
        index = others.index(target)
        previous = others[index - 1].record if index else None
        record, high = target.record, target.record.place
        is_between = previous is not None and previous.priority == record.priority
        low = previous.place if is_between and previous is not None else None
    place = _place_between(low, high)
    if (record.priority, place) == (job.record.priority, job.record.place):
        return None
    return changed_job(job.record, priority=record.priority, place=place)


def prioritize_job(jobs: Mapping[int, KnownJob], number: int, priority: int) -> JobRecord | None:
    """Return the record of a job with another priority; None if it has it already."""
    record = _waiting(jobs, number).record
    return changed_job(record, priority=priority) if record.priority != priority else None


def _waits(job: KnownJob) -> bool:
    return job.record.state == "waiting"


def _waiting(jobs: Mapping[int, KnownJob], number: int) -> KnownJob:
    job = jobs.get(number)
    if job is None:
        raise RunError(f"there is no job {number}", hint="See all with: barnraise queue")
    if not _waits(job):
        raise RunError(f"job {number} is {job.record.state}", hint="Only a waiting job has a place.")
    return job


def _place_between(low: int | None, high: int | None) -> int:
    if low is None or high is None:
        place = high - _GAP if high is not None else (low or 0) + _GAP
        if abs(place) > _MAX_PLACE:
            raise RunError("there is no place left there", hint="Use priorities: --priority 1")
        return place
    place = (low + high) // 2
    if place == low:
        raise RunError("there is no place left between these jobs", hint="Move one of them first.")
    return place


def can_forget(jobs: Mapping[int, KnownJob], keep: int) -> list[int]:
    """Return the jobs that ended first and that no other job needs, if more than ``keep`` have ended.

    Jobs whose results are still awaited are counted on their own. The newest job stays, because the next
    number follows from it.
    """
    settled: list[tuple[float, int]] = []
    awaiting: list[tuple[float, int]] = []
    for number, job in jobs.items():
        if job.record.has_ended:
            rows = awaiting if job.record.awaits_results else settled
            rows.append((job.record.ended_at, number))
    if max(len(settled), len(awaiting)) <= keep:
        return []
    needed = {max(jobs)}
    for job in jobs.values():
        if not job.record.has_ended:
            needed.update(job.spec.job_options.after)
    forgotten: list[int] = []
    for rows in (settled, awaiting):
        surplus = max(0, len(rows) - keep)
        forgotten += [number for _, number in sorted(rows) if number not in needed][:surplus]
    return forgotten


def check_after(jobs: Collection[int], after: Iterable[int]) -> None:
    """Raise RunError if a job is to start after one that does not exist."""
    for number in after:
        if number not in jobs:
            raise RunError(f"there is no job {number} to start after", hint="See all with: barnraise queue")
