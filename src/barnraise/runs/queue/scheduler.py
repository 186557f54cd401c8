"""Scheduler of the queue: jobs, machines and runs in; changed records and runs to start or stop out. Pure.

The coordinator calls it after each change. Another coordinator decides the same from the same facts. A record
is on the disks of a quorum before its run starts, and the run's name follows from the record. So neither a
change of the coordinator nor a power cut loses an attempt or starts it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.core.units import counted, format_size
from barnraise.runs.queue.job import (
    JobAttempt,
    JobRecord,
    KnownJob,
    changed_job,
    end_attempt,
    queue_order,
    with_results,
)
from barnraise.runs.queue.spec import MAX_ATTEMPTS, attempt_run

AWAY_S = 15.0  # a machine that comes back within this time goes on with its attempt
COLLECT_S = 60.0  # after this time a job is done also if the files that it wrote are not packed yet
_WAITS_FOR_OTHERS = "waits for a free machine"


class FreeDevice(NamedTuple):
    """Device of a machine. 0 bytes: unknown. ``speed``: measured, in TFLOP/s; 0: not measured."""

    name: str
    memory_bytes: int = 0
    speed: float = 0.0


class QueueMachine(NamedTuple):
    """Machine that is present and takes work. ``paused``: why runs may not use it now."""

    node: bytes
    devices: tuple[FreeDevice, ...]
    paused: str = ""

    @property
    def speed(self) -> float:
        """Return the speed of all devices together."""
        return sum(device.speed for device in self.devices)


class QueueRun(NamedTuple):
    """Run as the scheduler sees it. ``device``: the only one that it uses; empty: all of its machines.

    ``is_collected``: the files that it wrote are packed, or ``results_note`` says why they cannot be.
    ``lacks_memory`` and ``lacks_files``: it failed for that reason. ``is_stopped``: a person stopped it.
    """

    nodes: tuple[bytes, ...]
    device: str = ""
    code: int | None = None  # None: it has not ended
    sentence: str = ""
    progress: TrainingProgress | None = None
    is_collected: bool = True
    results: bytes = b""
    results_at: bytes = b""
    results_note: str = ""
    lacks_memory: bool = False
    lacks_files: bool = False
    is_stopped: bool = False
    ended_s: float = 0.0  # seconds since its end was seen


class QueueFacts(NamedTuple):
    """All inputs of one decision. ``away_s``: for how long machines have been absent.

    ``unsaved``: jobs whose record is not yet on the disks of a quorum. ``at``: wall clock, which people see
    and which orders ended jobs.
    ``absent_files``: jobs with files that no present machine has, and the machines known to have them.
    """

    jobs: Mapping[int, KnownJob]
    machines: Sequence[QueueMachine]
    runs: Mapping[str, QueueRun]
    away_s: Mapping[bytes, float]
    name: Callable[[bytes], str]
    unsaved: Collection[int] = ()
    at: float = 0.0
    absent_files: Mapping[int, Sequence[bytes]] = {}


class RunToStart(NamedTuple):
    """Attempt whose run is not known yet."""

    job: KnownJob
    attempt: JobAttempt


@dataclass
class QueueDecision:
    """Decision of the scheduler. ``waits``: for each job that does not start or go on, what it waits for."""

    changed: dict[int, JobRecord] = field(default_factory=dict)
    started: list[RunToStart] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    waits: dict[int, str] = field(default_factory=dict)


class _Placement(NamedTuple):
    nodes: tuple[bytes, ...]
    device: str


class _Demand(NamedTuple):
    """Needs of a job that decide where it fits. Most of a thousand jobs have the same ones."""

    each: str
    nodes: tuple[bytes, ...]
    min_nodes: int
    needs_bytes: int
    failed: tuple[tuple[bytes, ...], ...]
    short_of: int


def decide(facts: QueueFacts) -> QueueDecision:
    """Return the changes of all jobs. At most one change of each job is returned at a time.

    A job whose record is not saved is neither changed nor followed by others.
    """
    decision = QueueDecision()
    for job in facts.jobs.values():
        if job.number in facts.unsaved:
            continue
        decision.stopped += [
            run
            for run, attempt in job.runs.items()
            if attempt.end and run in facts.runs and facts.runs[run].code is None
        ]
        if not job.record.has_ended:
            _follow(job, facts, decision)
        elif job.record.awaits_results and job.run in facts.runs and facts.runs[job.run].is_collected:
            decision.changed[job.number] = _with_results(changed_job(job.record), facts.runs[job.run], "")
    for number, record in decision.changed.items():
        if record.has_ended and not facts.jobs[number].record.has_ended:
            decision.changed[number] = replace(record, ended_at=facts.at)
    _place(facts, decision)
    return decision


# attempts that go on


def _follow(job: KnownJob, facts: QueueFacts, decision: QueueDecision) -> None:
    """Decide for a job that has not ended, except where its next attempt runs."""
    record, attempt = job.record, job.record.attempt
    if not job.is_authorized:
        why = f"{facts.name(job.spec.by)}, where it was added, is no longer an owner of this cluster"
        _cancel(job, why, decision)
    elif attempt is not None:
        _follow_attempt(job, attempt, facts, decision)
    elif failed := _failed_dependency(job, facts):
        _cancel(job, f"job {failed}, after which it was to start, is not done", decision)
    elif len(record.attempts) >= MAX_ATTEMPTS:
        why = f"{counted(MAX_ATTEMPTS, 'attempt')} did not finish; the last: {record.why}"
        decision.changed[job.number] = changed_job(record, state="failed", why=why)


def _cancel(job: KnownJob, why: str, decision: QueueDecision) -> None:
    record = job.record
    if record.attempt is not None:
        decision.changed[job.number] = end_attempt(record, "stopped", why, state="cancelled")
    else:
        decision.changed[job.number] = changed_job(record, state="cancelled", why=why)


def _failed_dependency(job: KnownJob, facts: QueueFacts) -> int:
    """Return a job after which this one was to start, and that will never be done; 0 if there is none."""
    for number in job.spec.job_options.after:
        other = facts.jobs.get(number)
        is_over = other is not None and other.record.state in ("failed", "cancelled")
        if is_over and number not in facts.unsaved:
            return number
    return 0


def _follow_attempt(job: KnownJob, attempt: JobAttempt, facts: QueueFacts, decision: QueueDecision) -> None:
    run = facts.runs.get(attempt_run(job.spec, attempt.number))
    away_s = min(facts.away_s.get(node, 0.0) for node in attempt.nodes)
    names = " and ".join(map(facts.name, attempt.nodes))
    if run is None or run.code is None:
        if away_s > AWAY_S:
            decision.changed[job.number] = end_attempt(
                job.record, "lost", f"{names} went away", state="waiting"
            )
        elif away_s > 0.0:
            decision.waits[job.number] = (
                f"{names} is away; after {AWAY_S:g} s the job waits for a device again"
            )
        else:
            paused = {machine.node: machine.paused for machine in facts.machines if machine.paused}
            if all(node in paused for node in attempt.nodes):
                decision.waits[job.number] = f"{names} is paused: {paused[attempt.nodes[0]]}"
            if run is None:
                decision.started.append(RunToStart(job, attempt))
        return
    if run.code == 0:
        if run.is_collected or away_s > AWAY_S or run.ended_s > COLLECT_S:
            done = end_attempt(job.record, "done", run.sentence, state="done", progress=run.progress)
            missing = f"its files are not packed yet, and {names} must be online for that"
            decision.changed[job.number] = _with_results(done, run, missing)
    elif run.is_stopped:
        decision.changed[job.number] = end_attempt(
            job.record, "stopped", run.sentence, state="cancelled", progress=run.progress
        )
    elif away_s > 0.0 or run.lacks_files:
        decision.changed[job.number] = end_attempt(job.record, "lost", run.sentence, state="waiting")
    else:
        decision.changed[job.number] = _failed(job, attempt, run, facts)


def _with_results(record: JobRecord, run: QueueRun, missing: str) -> JobRecord:
    """Return a record with what is known of its files; ``missing``: why nothing is known."""
    note = run.results_note if run.is_collected else missing
    return with_results(record, run.results, run.results_at, note, is_collected=run.is_collected)


def _failed(job: KnownJob, attempt: JobAttempt, run: QueueRun, facts: QueueFacts) -> JobRecord:
    """Return the record of a job whose attempt failed: it waits for another machine, or has failed."""
    memory = _memory_of(attempt, facts.machines) if run.lacks_memory else 0
    tried = end_attempt(job.record, "failed", run.sentence, short_of=memory, state="waiting")
    is_on_all = job.spec.job_options.each == "all"
    if memory and not is_on_all:
        return tried  # each attempt needs a larger device than the last one, so this has an end
    failures = sum(other.end == "failed" and (is_on_all or not other.short_of) for other in tried.attempts)
    again = KnownJob(job.spec, tried, job.nodes)
    has_other = any(_placements(again, machine) for machine in facts.machines)
    if failures <= job.spec.job_options.retries and has_other:
        return tried
    why = run.sentence if failures == 1 else f"{run.sentence} (the last of {failures} failures)"
    if failures <= job.spec.job_options.retries:
        why = f"{why}; no other machine can try it now"
    return end_attempt(job.record, "failed", why, short_of=memory, state="failed", progress=run.progress)


def _memory_of(attempt: JobAttempt, machines: Sequence[QueueMachine]) -> int:
    return max(
        (
            device.memory_bytes
            for machine in machines
            if machine.node in attempt.nodes
            for device in machine.devices
            if attempt.device in ("", device.name)
        ),
        default=0,
    )


# placement of waiting jobs


class _Occupancy:
    """Devices that attempts and other runs use, and machines that are kept for a job."""

    def __init__(self, facts: QueueFacts) -> None:
        self._used: dict[bytes, set[str]] = {}  # the empty name stands for all devices of the machine
        self._reserved: set[bytes] = set()
        for job in facts.jobs.values():
            if job.record.attempt is not None and not _has_ended(job.run, facts):
                self.use(_Placement(job.record.attempt.nodes, job.record.attempt.device))
        for run in facts.runs.values():
            if run.code is None:
                self.use(_Placement(run.nodes, run.device))

    def use(self, placement: _Placement) -> None:
        """Mark the devices of a placement as used."""
        for node in placement.nodes:
            self._used.setdefault(node, set()).add(placement.device)

    def reserve(self, nodes: Collection[bytes]) -> None:
        """Keep machines for a job that waits for them, so that later jobs do not delay it for long."""
        self._reserved.update(nodes)

    def is_reserved(self, machine: QueueMachine) -> bool:
        """Tell whether an earlier job waits for this machine."""
        return machine.node in self._reserved

    def busy(self, machine: QueueMachine) -> int:
        """Return the number of devices in use."""
        used = self._used.get(machine.node, set())
        return len(machine.devices) if "" in used else sum(device.name in used for device in machine.devices)

    def is_free(self, placement: _Placement) -> bool:
        """Tell whether no run uses these devices."""
        for node in placement.nodes:
            used = self._used.get(node, set())
            if "" in used or (used if not placement.device else placement.device in used):
                return False
        return True


def _has_ended(run: str, facts: QueueFacts) -> bool:
    return run in facts.runs and facts.runs[run].code is not None


def _place(facts: QueueFacts, decision: QueueDecision) -> None:
    """Start as many waiting jobs as fit, in their order."""
    occupancy = _Occupancy(facts)
    rejected: dict[_Demand, str] = {}
    for job in queue_order(facts.jobs.values()):
        if job.record.state != "waiting" or job.number in decision.changed:
            continue
        reason = _not_ready(job, facts)
        placement = None
        if not reason:
            demand = _demand(job)
            reason = rejected.get(demand, "")
            if not reason:
                placement, reason = _choose(job, facts, occupancy)
            # Nothing becomes free in between. But each job for a whole machine may reserve another one.
            if placement is None and (demand.each != "machine" or reason == _WAITS_FOR_OTHERS):
                rejected[demand] = reason
        if placement is None:
            decision.waits[job.number] = reason
            continue
        occupancy.use(placement)
        attempts = job.record.attempts
        attempt = JobAttempt(
            number=len(attempts) + 1, nodes=placement.nodes, device=placement.device, at=facts.at
        )
        where = ", ".join(map(facts.name, placement.nodes))
        decision.changed[job.number] = changed_job(
            job.record, state="running", attempts=(*attempts, attempt), why=f"started on {where}"
        )


def _not_ready(job: KnownJob, facts: QueueFacts) -> str:
    """Return what a job waits for before it may start; empty if it may."""
    if job.record.is_paused:
        return "is paused"
    if job.number in facts.unsaved:
        return "waits until most machines have saved it"
    for number in job.spec.job_options.after:
        other = facts.jobs.get(number)
        if other is None:  # it may have failed: other machines know
            return f"waits for job {number}, which no connected machine knows"
        if other.record.state != "done" or number in facts.unsaved:
            return f"waits for job {number}"
    if job.number in facts.absent_files:
        holders = facts.absent_files[job.number]
        has = "has" if len(holders) == 1 else "have"
        return f"waits for its files, which only {' and '.join(map(facts.name, holders))} {has}"
    return ""


def _demand(job: KnownJob) -> _Demand:
    options, attempts = job.spec.job_options, job.record.attempts
    return _Demand(
        options.each,
        job.nodes,
        job.spec.options.min_nodes,
        options.needs_bytes,
        tuple(attempt.nodes for attempt in attempts if _excludes_machines(attempt)),
        _short_of(job),
    )


def _choose(job: KnownJob, facts: QueueFacts, occupancy: _Occupancy) -> tuple[_Placement | None, str]:
    """Return the fastest free placement, or why there is none."""
    allowed = [machine for machine in facts.machines if _is_allowed(job, machine)]
    usable = [machine for machine in allowed if not machine.paused]
    if not usable:
        return None, _no_machine(job, allowed, facts)
    if job.spec.job_options.each == "all":
        return _choose_all(job, usable, occupancy, facts)
    fitting = [machine for machine in usable if _placements(job, machine)]
    if not fitting:
        return None, _too_small(job, usable)
    choices = [
        (device_speed, -memory, placement)
        for machine in fitting
        if not occupancy.is_reserved(machine)
        for device_speed, memory, placement in _placements(job, machine)
        if occupancy.is_free(placement)
    ]
    if choices:
        return max(choices, key=lambda choice: choice[:2])[2], ""
    if job.spec.job_options.each == "machine":
        free = [machine for machine in fitting if not occupancy.is_reserved(machine)]
        target = min(free, key=lambda machine: (occupancy.busy(machine), -machine.speed), default=None)
        if target is not None:
            occupancy.reserve([target.node])
            return None, f"waits until all of {facts.name(target.node)} is free"
    return None, _WAITS_FOR_OTHERS


def _choose_all(
    job: KnownJob, usable: Sequence[QueueMachine], occupancy: _Occupancy, facts: QueueFacts
) -> tuple[_Placement | None, str]:
    fitting = [machine for machine in usable if _placements(job, machine)]
    minimum = job.spec.options.min_nodes
    if len(fitting) < minimum:
        reason = f"needs {counted(minimum, 'machine')}; {len(fitting)} can be used now"
        return None, reason if len(fitting) == len(usable) else _too_small(job, usable)
    busy = [machine for machine in fitting if occupancy.busy(machine) or occupancy.is_reserved(machine)]
    if not busy:
        return _Placement(tuple(machine.node for machine in fitting), ""), ""
    occupancy.reserve([machine.node for machine in fitting])
    return None, f"waits until {' and '.join(facts.name(machine.node) for machine in busy)} is free"


def _is_allowed(job: KnownJob, machine: QueueMachine) -> bool:
    """Tell whether a job may use a machine: it was named, and the job did not fail there.

    A job that ran out of memory may use a larger device of the same machine.
    """
    if job.nodes and machine.node not in job.nodes:
        return False
    if job.spec.job_options.each == "all":
        return True
    return all(
        machine.node not in attempt.nodes for attempt in job.record.attempts if _excludes_machines(attempt)
    )


def _excludes_machines(attempt: JobAttempt) -> bool:
    """Tell whether the job must not be tried on the machines of this attempt again."""
    return attempt.end == "failed" and not attempt.short_of


def _short_of(job: KnownJob) -> int:
    """Return the memory of the largest device that was too small for a job; 0 if none was."""
    return max((attempt.short_of for attempt in job.record.attempts), default=0)


def _placements(job: KnownJob, machine: QueueMachine) -> list[tuple[float, int, _Placement]]:
    """Return where a job fits on a machine, busy or not: speed, memory and placement."""
    if machine.paused or not _is_allowed(job, machine):
        return []
    fitting = [device for device in machine.devices if _has_memory(job, device)]
    if job.spec.job_options.each == "device":
        return [
            (device.speed, device.memory_bytes, _Placement((machine.node,), device.name))
            for device in fitting
        ]
    if not fitting or len(fitting) < len(machine.devices):
        return []
    memory = sum(device.memory_bytes for device in fitting)
    return [(machine.speed, memory, _Placement((machine.node,), ""))]


def _has_memory(job: KnownJob, device: FreeDevice) -> bool:
    short_of = _short_of(job)
    return device.memory_bytes >= job.spec.job_options.needs_bytes and (
        not short_of or device.memory_bytes > short_of
    )


def _no_machine(job: KnownJob, allowed: Sequence[QueueMachine], facts: QueueFacts) -> str:
    if allowed:
        first = allowed[0]
        return f"waits for {facts.name(first.node)}, which is paused: {first.paused}"
    if job.nodes:
        return f"waits for {' or '.join(map(facts.name, job.nodes))}"
    attempts = job.record.attempts
    failed = [node for attempt in attempts if _excludes_machines(attempt) for node in attempt.nodes]
    if failed:
        return f"waits for another machine than {' and '.join(map(facts.name, dict.fromkeys(failed)))}"
    return "waits for a machine"


def _too_small(job: KnownJob, usable: Sequence[QueueMachine]) -> str:
    largest = max((device.memory_bytes for machine in usable for device in machine.devices), default=0)
    needs = job.spec.job_options.needs_bytes
    if short_of := _short_of(job):
        return f"ran out of memory; waits for a device with more than {format_size(short_of)}"
    return f"needs {format_size(needs)} on each device; the largest here has {format_size(largest)}"
