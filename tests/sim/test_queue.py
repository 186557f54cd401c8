"""The queue under deaths, restarts and changes of the coordinator: each job ends exactly once.

The scheduler is the real one, and so is the count of the disks that have a record. Machines know the records
as late gossip brings them, and some messages are lost. Compare-and-set on the shared store decides. Sometimes
two machines coordinate at once, and the store is emptied when the machines that hold it die.
`pytest tests/sim/test_queue.py --seed N` replays one schedule.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from barnraise.agent_client.queue.requests import Each, JobOptions
from barnraise.agent_client.run_options import RunOptions, RunProgram
from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeKey
from barnraise.membership.consensus.quorum import is_quorum
from barnraise.runs.queue.disk_quorum import DiskQuorum, record_digest
from barnraise.runs.queue.job import (
    JobAttempt,
    JobRecord,
    KnownJob,
    cancel_job,
    check_successor,
    new_job,
    pause_job,
    supersedes,
)
from barnraise.runs.queue.scheduler import FreeDevice, QueueFacts, QueueMachine, QueueRun, decide
from barnraise.runs.queue.spec import JobSpec, attempt_run, sign_job

SCHEDULES = 200
STEP_S = 0.25
FAULTS_S = 60.0
END_S = 900.0
SETTLE_S = 2.0
GOSSIP_S = 1.0
ASK_S = 1.0
LOSS = 0.05  # of the messages about jobs
RESTART_S = 3.0
MAX_IDLE_S = 5.0
KEY = NodeKey.generate()


@dataclass
class Run:
    """Run in the store. ``left_s``: work that is left on its machines. After a death, a coordinator has to
    start it again, which takes ``restart_s``.
    """

    nodes: tuple[bytes, ...]
    device: str
    length_s: float
    code_at_end: int
    left_s: float = 0.0
    restart_s: float = 0.0
    code: int | None = None

    def facts(self) -> QueueRun:
        return QueueRun(
            self.nodes, self.device, self.code, "ended", results_at=self.nodes[0], is_stopped=self.code == 130
        )


@dataclass
class Machine:
    """Machine with what it knows; the records survive a death on its disk."""

    node: bytes
    devices: tuple[FreeDevice, ...]
    is_up: bool = True
    linked_at: float = -100.0
    settles_at: float | None = None  # None: it does not coordinate
    asked_at: float = -100.0
    jobs: dict[int, KnownJob] = field(default_factory=dict)
    runs: dict[str, QueueRun] = field(default_factory=dict)
    away_since: dict[bytes, float] = field(default_factory=dict)
    disks: DiskQuorum = field(init=False)

    def __post_init__(self) -> None:
        self.disks = DiskQuorum(self.node)


class Written(NamedTuple):
    """Message with a version of a job's record."""

    number: int
    record: JobRecord


class Held(NamedTuple):
    """Message about a record that the sender has on disk. ``asks``: it asks for the receiver's record."""

    number: int
    digest: bytes
    asks: bool = False


class Ran(NamedTuple):
    """Message about a run."""

    name: str
    run: QueueRun


Message = Written | Held | Ran


class Cluster:
    """Machines, the store, and messages on their way."""

    def __init__(self, seed: int, each: tuple[Each, ...]) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.machines = [
            Machine(
                bytes([place + 1]) * 32,
                tuple(
                    FreeDevice(f"cuda:{index}", self.random.choice((8, 16, 24)), self.random.uniform(1, 9))
                    for index in range(self.random.choice((1, 1, 2)))
                ),
            )
            for place in range(self.random.choice((2, 3, 4)))
        ]
        self.store: dict[int, JobRecord] = {}
        self.view = list(self.machines)  # the most senior first
        self.runs: dict[str, Run] = {}
        self.specs: dict[int, JobSpec] = {}
        self.ends: defaultdict[int, set[tuple[str, tuple[JobAttempt, ...]]]] = defaultdict(set)
        self.settled: list[Machine] = []  # those that coordinate, after they have heard from the others
        self.late: list[tuple[float, Machine, Machine, Message]] = []
        self.cuts_after_start = False
        self.started_by: Machine | None = None  # the machine that has just started a run
        self.quiet_since = 0.0
        self.idle_since: dict[tuple[bytes, str], float] = {}
        self.longest_idle_s = 0.0
        self._add_jobs(each)

    # the store

    def write(self, machine: Machine, record: JobRecord, number: int) -> bool:
        """Write a job with compare-and-set, as the agent does it; then gossip."""
        known, stored = machine.jobs.get(number), self.store.get(number)
        if number in self.unsaved(machine):
            return False
        if known is not None and stored is not None and supersedes(known.record, stored):
            stored = known.record  # the store had lost its contents
        expected = known.record if known is not None else None
        if stored is not None and stored != expected:
            self._learn(machine, number, stored)
            return False
        if expected is not None and expected.has_ended:
            assert record.state == expected.state, "an end is final"
        self.store[number] = record
        self._learn(machine, number, record)
        for other in self.machines:
            if other is not machine:
                self._send(machine, other, Written(number, record))
        return True

    def unsaved(self, machine: Machine) -> set[int]:
        """Return the jobs of which a machine does not know that a quorum has them on disk."""
        machine.disks.set_voters([member.node for member in self.view])
        return machine.disks.unsaved

    def _send(self, sender: Machine, to: Machine, message: Message) -> None:
        if isinstance(message, Ran) or self.random.random() > LOSS:
            self.late.append((self.now + self.random.uniform(0, GOSSIP_S), sender, to, message))

    def _learn(self, machine: Machine, number: int, record: JobRecord) -> None:
        known = machine.jobs.get(number)
        if known is not None:
            if not supersedes(record, known.record):
                return
            try:
                check_successor(record, known.record)
            except ProtocolError:  # the first end stays
                return
        machine.jobs[number] = KnownJob(self.specs[number], record)
        machine.disks.change(number, record)
        self._note(machine, number)

    def _note(self, machine: Machine, number: int) -> None:
        """Note that a job has ended, if this machine knows that a quorum has it on disk."""
        record = machine.jobs[number].record
        if record.has_ended and number not in self.unsaved(machine):
            self.ends[number].add((record.state, record.attempts))

    def _deliver(self) -> None:
        due = [message for message in self.late if message[0] <= self.now]
        self.late = [message for message in self.late if message[0] > self.now]
        for _, sender, to, message in due:
            if to.is_up:
                self._receive(sender, to, message)

    def _receive(self, sender: Machine, to: Machine, message: Message) -> None:
        """Handle a message as the agent's registry does."""
        match message:
            case Ran(name, run):
                if to.runs.get(name) is None or to.runs[name].code is None:
                    to.runs[name] = run
            case Written(number, record):
                self._learn(to, number, record)
                known = to.jobs[number].record
                if known == record:
                    to.disks.confirm(number, record_digest(record), sender.node)
                    self._note(to, number)
                    self._send(to, sender, Held(number, record_digest(record)))
                elif supersedes(known, record):
                    self._send(to, sender, Written(number, known))
            case Held(number, digest, asks):
                is_same = to.disks.confirm(number, digest, sender.node)
                if number in to.jobs:
                    self._note(to, number)
                    if not is_same:
                        self._send(to, sender, Written(number, to.jobs[number].record))
                if asks:
                    self._send(to, sender, Held(number, to.disks.digest(number)))

    def _sync(self, machine: Machine) -> None:
        """Exchange everything with a machine that is back."""
        for other in self.machines:
            if other.is_up and other is not machine:
                other.linked_at = self.now
                for sender, receiver in ((machine, other), (other, machine)):
                    for number, job in sender.jobs.items():
                        self._send(sender, receiver, Written(number, job.record))
                    for name, run in sender.runs.items():
                        self._send(sender, receiver, Ran(name, run))

    # jobs and their runs

    def _add_jobs(self, each: tuple[Each, ...]) -> None:
        for number in range(1, self.random.randint(8, 24) + 1):
            after = (
                (self.random.randint(1, number - 1),) if number > 1 and self.random.random() < 0.15 else ()
            )
            job_options = JobOptions(
                each=self.random.choice(each), after=after, needs_bytes=self.random.choice((0, 0, 8))
            )
            self.specs[number] = JobSpec(
                job=number,
                by=KEY.id.raw,
                at=0.0,
                program=RunProgram(command=("train.py",), folder=bytes(32)),
                options=RunOptions(title="train"),
                job_options=job_options,
            )
            record = new_job(sign_job(self.specs[number], KEY), self.random.choice((0, 0, 5)))
            self.write(self.machines[0], record, number)

    def _start(self, machine: Machine, job: KnownJob, attempt: JobAttempt) -> None:
        """Write the first record of a run unless it is there: its name decides."""
        name, nodes, device = attempt_run(job.spec, attempt.number), attempt.nodes, attempt.device
        run = self.runs.get(name)
        if run is None:
            code = self.random.choices((0, 1), (9, 1))[0]
            length_s = self.random.uniform(1, 20)
            run = self.runs[name] = Run(nodes, device, length_s, code, left_s=length_s)
            self.started_by = machine
        assert (run.nodes, run.device) == (nodes, device), f"{name} is started on two machines"
        self._publish(name, run, at_once=machine)

    def _publish(self, name: str, run: Run, at_once: Machine | None = None) -> None:
        for machine in self.machines:
            if machine is at_once:
                machine.runs[name] = run.facts()
            else:
                self._send(at_once or machine, machine, Ran(name, run.facts()))

    def _work(self) -> None:
        up = {machine.node for machine in self.machines if machine.is_up}
        for name, run in self.runs.items():
            if run.code is not None:
                continue
            if not up.issuperset(run.nodes):
                run.left_s = run.length_s
                run.restart_s = RESTART_S
            elif run.restart_s > 0:
                run.restart_s -= STEP_S if self.settled else 0.0
            else:
                run.left_s -= STEP_S
                if run.left_s <= 0:
                    self._end(name, run)

    def _end(self, name: str, run: Run) -> None:
        """End a run on its machines. They have its end on their disks, and send it when they are back."""
        run.code = run.code_at_end
        for machine in self.machines:
            if machine.node in run.nodes:
                machine.runs[name] = run.facts()
        self._publish(name, run)

    # coordination

    def _agree(self) -> None:
        """Change the view, if a quorum of it is here. Machines that come back are the most junior."""
        present = [machine for machine in self.view if machine.is_up]
        if is_quorum([machine.node for machine in self.view], {machine.node for machine in present}):
            new = [machine for machine in self.machines if machine.is_up and machine not in present]
            self.view = present + new

    def coordinators(self) -> list[Machine]:
        if not all(machine.is_up for machine in self.view):
            return []  # no quorum
        is_contested = self.now < FAULTS_S and int(self.now) % 20 < 5
        return self.view[:2] if is_contested else self.view[:1]

    def coordinate(self) -> None:
        self._agree()
        self.started_by = None
        active = self.coordinators()
        for machine in self.machines:
            if machine not in active:
                machine.settles_at = None
        for machine in active:
            if machine.settles_at is None:
                machine.settles_at = machine.linked_at + SETTLE_S
        self.settled = [
            machine for machine in active if machine.settles_at is not None and self.now >= machine.settles_at
        ]
        for machine in active:
            self._ask(machine)
        for machine in self.settled:
            self._decide(machine)

    def _ask(self, machine: Machine) -> None:
        if self.now - machine.asked_at >= ASK_S:
            machine.asked_at = self.now
            for number in sorted(self.unsaved(machine)):
                for other in self.machines:
                    if other is not machine:
                        self._send(machine, other, Held(number, machine.disks.digest(number), asks=True))

    def _decide(self, machine: Machine) -> None:
        up = [other for other in self.machines if other.is_up]
        absent = {other.node for other in self.machines if not other.is_up}
        machine.away_since = {node: machine.away_since.get(node, self.now) for node in absent}
        decision = decide(
            QueueFacts(
                jobs=dict(machine.jobs),
                machines=[QueueMachine(other.node, other.devices) for other in up],
                runs=dict(machine.runs),
                away_s={node: max(1e-9, self.now - since) for node, since in machine.away_since.items()},
                name=lambda node: f"h{node[0]}",
                unsaved=frozenset(self.unsaved(machine)),
            )
        )
        for number, record in decision.changed.items():
            if self.random.random() > 0.1:  # it dies or is delayed in between
                self.write(machine, record, number)
        for job, attempt in decision.started:
            is_current = machine.jobs.get(job.number) == job and job.number not in self.unsaved(machine)
            if is_current and self.random.random() > 0.1:
                self._start(machine, job, attempt)
        for name in decision.stopped:
            run = self.runs.get(name)
            if run is not None and run.code is None:
                run.code = 130
                self._publish(name, run, at_once=machine)

    def fault(self) -> None:
        """Kill, restart or cut machines, and let a person change jobs."""
        machine = self.random.choice(self.machines)
        kind = self.random.random()
        if kind < 0.1:
            self.cuts_after_start = True
        elif kind < 0.5 and machine.is_up:
            self.quiet_since = self.now
            self._kill(machine)
        elif not machine.is_up:
            self.quiet_since = self.now
            self._boot(machine)
        elif kind < 0.9 and machine.jobs:
            number, job = self.random.choice(list(machine.jobs.items()))
            change = (
                cancel_job(job.record, "h1")
                if self.random.random() < 0.1
                else pause_job(job.record, is_paused=not job.record.is_paused)
            )
            if change is not None and self.coordinators():
                self.write(machine, change, number)

    def _cut_power(self, absent: Machine) -> None:
        """Kill all machines; lose the store and all messages. The disks and the last view stay.

        It happens at the worst moment: a run was started, and the machine that did it stays away.
        """
        self.quiet_since = self.now
        self.cuts_after_start = False
        for machine in self.machines:
            self._kill(machine)
        self.store.clear()
        self.late.clear()
        for machine in self.machines:
            if machine is not absent:
                self._boot(machine)

    def _kill(self, machine: Machine) -> None:
        machine.is_up = False
        machine.settles_at = None
        machine.away_since = {}

    def _boot(self, machine: Machine) -> None:
        machine.is_up, machine.linked_at = True, self.now
        machine.disks = DiskQuorum(machine.node)
        for number, job in machine.jobs.items():
            machine.disks.change(number, job.record)
        self._sync(machine)

    def heal(self) -> None:
        """Boot everything, and resume all jobs."""
        self.quiet_since = self.now
        self.cuts_after_start = False
        for machine in self.machines:
            if not machine.is_up:
                self._boot(machine)

    def resume(self) -> None:
        first = self.view[0]
        for number, job in list(first.jobs.items()):
            record = pause_job(job.record, is_paused=False)
            if record is not None:
                self.write(first, record, number)

    # what must hold

    def records(self) -> dict[int, JobRecord]:
        """Return the records that the coordinator knows."""
        return {number: job.record for number, job in self.view[0].jobs.items()}

    def check_idle(self) -> None:
        """Note how long a device was free while a job that fits waited, computed without the scheduler.

        Without a quorum nothing starts, so that time does not count.
        """
        if not self.coordinators():
            self.quiet_since = self.now
        active = [run for run in self.runs.values() if run.code is None]
        used = {(node, run.device) for run in active for node in run.nodes}
        done = {number for number, record in self.records().items() if record.state == "done"}
        ready = [
            self.specs[number]
            for number, record in self.records().items()
            if record.state == "waiting"
            and not record.is_paused
            and done.issuperset(self.specs[number].job_options.after)
            and not any(attempt.end == "failed" for attempt in record.attempts)
        ]
        idle: dict[tuple[bytes, str], float] = {}
        for machine in self.machines:
            for device in machine.devices if machine.is_up else ():
                key = machine.node, device.name
                needs = min((spec.job_options.needs_bytes for spec in ready), default=1 << 60)
                if key not in used and device.memory_bytes >= needs:
                    idle[key] = max(self.idle_since.get(key, self.now), self.quiet_since)
        self.idle_since = idle
        longest_s = max((self.now - since for since in idle.values()), default=0.0)
        self.longest_idle_s = max(self.longest_idle_s, longest_s)

    def check_doubled(self) -> None:
        """Check that no job has two runs that finish, and that no device has two runs.

        A lost attempt may have finished on a machine that could not say so.
        """
        active: Counter[tuple[bytes, str]] = Counter()
        for run in self.runs.values():
            if run.code is None:
                active.update((node, run.device) for node in run.nodes)
        assert all(count == 1 for count in active.values()), active
        for number in self.specs:
            attempts = self.records()[number].attempts
            runs = [
                self.runs.get(attempt_run(self.specs[number], attempt.number))
                for attempt in attempts
                if attempt.end != "lost"
            ]
            assert sum(run is not None and run.code == 0 for run in runs) <= 1, f"job {number} ran twice"

    def play(self) -> None:
        while self.now < END_S:
            self.now += STEP_S
            self._deliver()
            self._work()
            self.coordinate()
            if self.cuts_after_start and self.started_by is not None:
                self._cut_power(self.started_by)
            self.check_idle()
            if self.now < FAULTS_S:
                if self.random.random() < 0.1:
                    self.fault()
            elif self.now < FAULTS_S + STEP_S:
                self.heal()
            elif self.now > FAULTS_S + 5:
                self.resume()
                if self.ends.keys() == self.specs.keys() and not self.unsaved(self.view[0]):
                    return


def play(seed: int, each: tuple[Each, ...]) -> Cluster:
    cluster = Cluster(seed, each)
    cluster.play()
    records = cluster.records()
    left = {number: record.state for number, record in records.items() if not record.has_ended}
    assert not left, left
    assert cluster.ends.keys() == cluster.specs.keys(), "no job is lost"
    again = {number: ends for number, ends in cluster.ends.items() if len(ends) != 1}
    assert not again, f"each job ends exactly once: {again}"
    cluster.check_doubled()
    for number, record in records.items():
        ends = [attempt.end for attempt in record.attempts]
        assert ends.count("done") == (record.state == "done"), number
        assert "" not in ends, number
    return cluster


@pytest.mark.slow
def test_each_job_ends_once_and_no_fitting_device_is_idle(seeds: Callable[[int], Iterable[int]]) -> None:
    for seed in seeds(SCHEDULES):
        cluster = play(seed, ("device",))
        assert cluster.longest_idle_s <= MAX_IDLE_S, seed


@pytest.mark.slow
def test_each_job_of_any_size_ends_once(seeds: Callable[[int], Iterable[int]]) -> None:
    for seed in seeds(SCHEDULES):
        play(seed, ("device", "device", "machine", "all"))
