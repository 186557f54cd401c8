"""The queue under deaths, restarts and changes of the coordinator: each job ends exactly once.

The scheduler is the real one. Machines know the records as late gossip brings them; only compare-and-set on
the shared store decides. Sometimes two machines coordinate at once, and a power cut empties the store.
`pytest tests/sim/test_queue.py --seed N` replays one schedule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from barnraise.agent_client.queue.requests import Each, JobOptions
from barnraise.agent_client.run_options import RunOptions, RunProgram
from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeKey
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
        return QueueRun(self.nodes, self.device, self.code, "ended", results_at=self.nodes[0])


@dataclass
class Machine:
    """Machine with what it knows; the records survive a death on its disk."""

    node: bytes
    devices: tuple[FreeDevice, ...]
    is_up: bool = True
    up_since: float = -100.0
    coordinates_since: float | None = None
    jobs: dict[int, KnownJob] = field(default_factory=dict)
    runs: dict[str, QueueRun] = field(default_factory=dict)
    away_since: dict[bytes, float] = field(default_factory=dict)


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
        self.newest: dict[int, JobRecord] = {}  # the last version that was agreed on
        self.runs: dict[str, Run] = {}
        self.specs: dict[int, JobSpec] = {}
        self.ends: Counter[int] = Counter()
        self.settled: list[Machine] = []  # those that coordinate, after they have heard from the others
        self.forgotten: set[int] = set()  # jobs whose last change a power cut took from most machines
        self.late: list[tuple[float, Machine, int | str, object]] = []
        self.quiet_since = 0.0
        self.idle_since: dict[tuple[bytes, str], float] = {}
        self.longest_idle_s = 0.0
        self._add_jobs(each)

    # the store

    def write(self, machine: Machine, record: JobRecord, number: int) -> bool:
        """Write a job with compare-and-set, as the agent does it; then gossip."""
        known, stored = machine.jobs.get(number), self.store.get(number)
        if known is not None and stored is not None and supersedes(known.record, stored):
            stored = known.record  # the store had lost its contents
        expected = known.record if known is not None else None
        if stored is not None and stored != expected:
            self._learn(machine, number, stored)
            return False
        if expected is not None and expected.has_ended:
            assert record.state == expected.state, "an end is final"
        if record.has_ended and (expected is None or not expected.has_ended):
            self.ends[number] += 1
        self.store[number] = record
        newest = self.newest.get(number)
        if newest is None or supersedes(record, newest):
            self.newest[number] = record
        self._learn(machine, number, record)
        for other in self.machines:
            if other is not machine:
                self._send(other, number, record)
        return True

    def _send(self, to: Machine, key: int | str, value: object) -> None:
        self.late.append((self.now + self.random.uniform(0, GOSSIP_S), to, key, value))

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

    def _deliver(self) -> None:
        due = [message for message in self.late if message[0] <= self.now]
        self.late = [message for message in self.late if message[0] > self.now]
        for _, to, key, value in due:
            if not to.is_up:
                continue
            if isinstance(key, str):
                assert isinstance(value, QueueRun)
                if to.runs.get(key) is None or to.runs[key].code is None:
                    to.runs[key] = value
            else:
                assert isinstance(value, JobRecord)
                self._learn(to, key, value)

    def _sync(self, machine: Machine) -> None:
        """Exchange everything with a machine that is back."""
        for other in self.machines:
            if other.is_up and other is not machine:
                for sender, receiver in ((machine, other), (other, machine)):
                    for number, job in sender.jobs.items():
                        self._send(receiver, number, job.record)
                    for name, run in sender.runs.items():
                        self._send(receiver, name, run)

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
        self._publish(name, run, at_once=machine)

    def _publish(self, name: str, run: Run, at_once: Machine | None = None) -> None:
        for machine in self.machines:
            if machine is at_once:
                machine.runs[name] = run.facts()
            else:
                self._send(machine, name, run.facts())

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
        """End a run. Its machines have its end on their disks, and send it when they are back."""
        run.code = run.code_at_end
        for machine in self.machines:
            if machine.node in run.nodes:
                machine.runs[name] = run.facts()
        self._publish(name, run)

    # coordination

    def coordinators(self) -> list[Machine]:
        up = [machine for machine in self.machines if machine.is_up]
        if 2 * len(up) <= len(self.machines) and not (up and up[0] is self.machines[0]):
            return []  # no quorum
        is_contested = self.now < FAULTS_S and int(self.now) % 20 < 5
        return up[:2] if is_contested else up[:1]

    def coordinate(self) -> None:
        active = self.coordinators()
        for machine in self.machines:
            if machine not in active:
                machine.coordinates_since = None
        for machine in active:
            if machine.coordinates_since is None:
                machine.coordinates_since = self.now
        self.settled = [
            machine
            for machine in active
            if machine.coordinates_since is not None and self.now - machine.coordinates_since >= SETTLE_S
        ]
        for machine in self.settled:
            self._decide(machine)

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
            )
        )
        for number, record in decision.changed.items():
            if self.random.random() > 0.1:  # it dies or is delayed in between
                self.write(machine, record, number)
        for job, attempt in decision.started:
            if machine.jobs.get(job.number) == job and self.random.random() > 0.1:
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
        if kind < 0.05:
            self.quiet_since = self.now
            self._cut_power()
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

    def _cut_power(self) -> None:
        """Kill all machines and empty the store. What fewer than most machines have on disk may be lost."""
        for number, record in self.newest.items():
            known = [machine.jobs.get(number) for machine in self.machines]
            if 2 * sum(job is not None and job.record == record for job in known) <= len(known):
                self.forgotten.add(number)
        for machine in self.machines:
            self._kill(machine)
        self.store.clear()

    def _kill(self, machine: Machine) -> None:
        machine.is_up = False
        machine.coordinates_since = None
        machine.away_since = {}

    def _boot(self, machine: Machine) -> None:
        machine.is_up, machine.up_since = True, self.now
        self._sync(machine)

    def heal(self) -> None:
        """Boot everything, and resume all jobs."""
        self.quiet_since = self.now
        for machine in self.machines:
            if not machine.is_up:
                self._boot(machine)

    def resume(self) -> None:
        first = self.machines[0]
        for number, job in list(first.jobs.items()):
            record = pause_job(job.record, is_paused=False)
            if record is not None:
                self.write(first, record, number)

    # what must hold

    def check_idle(self) -> None:
        """Note how long a device was free while a job that fits waited, computed without the scheduler."""
        if not self.coordinators():
            self.quiet_since = self.now
        active = [run for run in self.runs.values() if run.code is None]
        used = {(node, run.device) for run in active for node in run.nodes}
        done = {number for number, record in self.newest.items() if record.state == "done"}
        ready = [
            self.specs[number]
            for number, record in self.newest.items()
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
        for number in self.specs.keys() - self.forgotten:
            attempts = self.newest[number].attempts
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
            self.check_idle()
            if self.now < FAULTS_S:
                if self.random.random() < 0.1:
                    self.fault()
            elif self.now < FAULTS_S + STEP_S:
                self.heal()
            elif self.now > FAULTS_S + 5:
                self.resume()
                if all(record.has_ended for record in self.store.values()) and len(self.store) == len(
                    self.specs
                ):
                    return


def play(seed: int, each: tuple[Each, ...]) -> Cluster:
    cluster = Cluster(seed, each)
    cluster.play()
    left = {number: record.state for number, record in cluster.newest.items() if not record.has_ended}
    assert not left, left
    assert cluster.ends.keys() == cluster.specs.keys(), "no job is lost"
    again = {number for number, count in cluster.ends.items() if count != 1} - cluster.forgotten
    assert not again, f"each job ends exactly once: {again}"
    cluster.check_doubled()
    for number, record in cluster.newest.items():
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
