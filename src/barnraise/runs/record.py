"""Run spec, run record and reports: a run as the cluster knows it. Pure.

An owner signs the spec, and the spec never changes. The record around it has a version. The next version is
written by compare-and-set on the last one, so that a run has one history. Each machine reports about itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from barnraise.agent_client.run_options import MAX_MACHINES, Digest, RunOptions, RunProgram, Word
from barnraise.agent_client.run_requests import STOPPED, RunChange, TrainingProgress
from barnraise.core.decoding import decode
from barnraise.core.errors import RunError, TrustError
from barnraise.core.units import counted
from barnraise.environments.installed_packages import InstalledPackages
from barnraise.identity import NodeId, NodeKey, verify_signature
from barnraise.runs.queue.spec import (
    DEVICE,
    MAX_ATTEMPTS,
    MAX_JOB_BYTES,
    JobSpec,
    SignedJob,
    attempt_run,
    read_job,
)
from barnraise.runs.variables import VariableNames

MOST_MACHINES = MAX_MACHINES
MOST_WORKERS = 1024
MOST_DROPPED = 8
MAX_REPORTED_FAILURES = 8
MAX_RECORDED_FAILURES = 16
MAX_CHANGES = 8
MAX_FAILURE_TAIL = 4000
MAX_RESUMED = 16
RUN_ID = r"^[a-z0-9][a-z0-9-]{0,47}\Z"
ENDED = "ended"
_PURPOSE = b"barnraise run order 1\0"

RunId = Annotated[str, Meta(pattern=RUN_ID, max_length=48)]
Node = Annotated[bytes, Meta(min_length=32, max_length=32)]
Words = Annotated[str, Meta(max_length=4000)]  # of one machine
Sentence = Annotated[str, Meta(max_length=32768)]  # may name every machine and quote one of them
Tail = Annotated[str, Meta(max_length=16384)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Rank = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Version = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Phase = Literal["preparing", "running", "restarting", "stopping", "ended"]
Stage = Literal["asks", "refused", "fetching", "building", "ready", "failed", "running", "ended"]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Run spec: what the owner asked for, and the machines that were chosen for it."""

    run: RunId
    by: Node
    at: Seconds  # the starter's wall clock; for people only
    program: RunProgram
    options: RunOptions = RunOptions()
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1, max_length=MOST_MACHINES)]
    named: bool = False  # True if the user chose the machines
    variables: VariableNames = VariableNames()  # of --set
    resumes: Annotated[tuple[RunId, ...], Meta(max_length=MAX_RESUMED)] = ()  # newest first
    device: Annotated[str, Meta(pattern=DEVICE, max_length=16)] = (
        ""  # the only device that it uses; empty: all
    )
    # The spec of the job that this run is an attempt of; the record then has the signature of that spec.
    job: Annotated[bytes, Meta(max_length=MAX_JOB_BYTES)] = b""


class WorkerSlot(msgspec.Struct, frozen=True, array_like=True):
    """Place of one worker; its index in the record is its rank. ``start`` tells its processes apart."""

    node: Node
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    device: Annotated[str, Meta(max_length=16)]
    start: Version = 0

    @property
    def key(self) -> tuple[bytes, int, int]:
        return self.node, self.local_rank, self.start


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """End of a run. ``tail``: last output of the worker that failed first.

    ``lacks_files``: a machine got no piece of the files, because the machines that have them did not answer.
    """

    code: Annotated[int, Meta(ge=0, le=255)]
    sentence: Sentence
    node: Annotated[bytes, Meta(max_length=32)] = b""
    rank: Annotated[int, Meta(ge=-1, le=MOST_WORKERS)] = -1
    tail: Tail = ""
    lacks_files: bool = False

    @property
    def is_stop(self) -> bool:
        """Tell whether a person stopped the run; a script that exits with that code has a rank."""
        return self.code == STOPPED and self.rank < 0


class LeftOutNode(msgspec.Struct, frozen=True, array_like=True):
    """Machine that was chosen and does not take part, and the reason.

    ``may_join``: it can join a session later, as a machine that was only away.
    """

    node: Node
    why: Sentence
    may_join: bool = True


class RestartedFailure(msgspec.Struct, frozen=True, array_like=True):
    """Failure of a single worker that was restarted once."""

    node: Node
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    kind: Word


class WorkerFailure(msgspec.Struct, frozen=True, array_like=True):
    """Exit of a worker with an error or by a signal. ``tail``: the end of its output."""

    rank: Rank  # at its start
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    start: Version
    code: Annotated[int, Meta(ge=-1, le=1 << 32)]
    signal: Annotated[int, Meta(ge=0, le=128)]
    tail: Annotated[str, Meta(max_length=MAX_FAILURE_TAIL)]
    is_stopping: bool = False  # the worker was asked to exit at that time


class RecordedFailure(msgspec.Struct, frozen=True, array_like=True):
    """Failure of a worker, and its machine."""

    node: Node
    failure: WorkerFailure

    @property
    def key(self) -> tuple[bytes, int, int]:
        return self.node, self.failure.local_rank, self.failure.start


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the state of a run."""

    order: Annotated[bytes, Meta(max_length=256 << 10)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    version: Version = 1
    phase: Phase = "preparing"
    generation: Version = 0
    # The generation whose workers were all started together.
    first_generation: Version = 0
    finished: bool = False  # a worker of the session has exited with success
    results_at: Annotated[bytes, Meta(max_length=32)] = b""  # the machine where rank 0 succeeded
    # A machine whose first worker succeeded.
    results_also_at: Annotated[bytes, Meta(max_length=32)] = b""
    slots: Annotated[tuple[WorkerSlot, ...], Meta(max_length=MOST_WORKERS)] = ()
    # Every worker that ever had a slot, in the order in which they joined. Readers of output name them so.
    workers: Annotated[tuple[WorkerSlot, ...], Meta(max_length=MOST_WORKERS)] = ()
    left_out: Annotated[tuple[LeftOutNode, ...], Meta(max_length=MOST_MACHINES)] = ()
    # Machines of a session that the planner has paused.
    paused: Annotated[tuple[LeftOutNode, ...], Meta(max_length=MOST_MACHINES)] = ()
    restarts: Count = 0  # used restarts of the whole group
    # Recent failures of single workers that were restarted.
    restarted_failures: Annotated[tuple[RestartedFailure, ...], Meta(max_length=MOST_WORKERS)] = ()
    # Every failed exit of a worker, also of workers that were restarted; the first ones.
    failures: Annotated[tuple[RecordedFailure, ...], Meta(max_length=MAX_RECORDED_FAILURES)] = ()
    hard: bool = False  # kill the workers at once
    elastic: bool = False  # a session: workers may join and leave without a restart of the others
    # Joining workers that recover the state while the others train.
    joining: Annotated[tuple[WorkerSlot, ...], Meta(max_length=MOST_WORKERS)] = ()
    recovery_attempt: Version = 0  # number of the newest live recovery
    provisional: Version = 0  # the agreed version that this one was built on without a quorum; 0: agreed
    why: Sentence = ""
    # The newest changes: two may follow each other before a reader has seen the first.
    changes: Annotated[tuple[RunChange, ...], Meta(max_length=MAX_CHANGES)] = ()
    outcome: RunOutcome | None = None
    # The machine that sends the notices of this version; empty: the one that started the run.
    notifier: Annotated[bytes, Meta(max_length=32)] = b""

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """Return the machines of this generation, in order of rank."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots))

    def may_join(self, node: bytes) -> bool:
        """Tell whether a machine without a worker may join a session; one that lacks a package may not."""
        return all(machine.may_join for machine in self.left_out if machine.node == node)

    def ranks_of(self, node: bytes) -> list[int]:
        """Return the ranks on a machine."""
        return [rank for rank, slot in enumerate(self.slots) if slot.node == node]


def supersedes(record: RunRecord, known: RunRecord) -> bool:
    """Return True if a record replaces the known version.

    An agreed version beats a provisional one, unless the provisional one was built on it.
    """
    if known.provisional and not record.provisional:
        return record.version > known.provisional
    if record.provisional and not known.provisional:
        return record.provisional >= known.version
    return record.version > known.version


class WorkerState(msgspec.Struct, frozen=True, array_like=True):
    """State of one worker as its own agent reports it. ``place`` orders the exits on one machine."""

    rank: Rank  # at its start
    # waiting: a session's worker waits for a group; stopped: by a signal (SIGSTOP);
    # near: a joining worker that has recovered the state; leaving: its machine leaves at the next commit
    state: Literal["running", "waiting", "near", "stopped", "leaving", "ended"]
    code: Annotated[int, Meta(ge=-1, le=1 << 32)] = 0
    signal: Annotated[int, Meta(ge=0, le=128)] = 0
    tail: Tail = ""
    place: Count = 0
    local_rank: Annotated[int, Meta(ge=0, le=64)] = 0
    start: Version = 0
    broken_generation: Version = 0  # the generation whose group broke, while the worker waits for another
    blames: Annotated[tuple[Rank, ...], Meta(max_length=64)] = ()  # the ranks that it lost in that group
    trained: bool = False  # the worker has committed a step of a session
    wait_reason: Word = ""  # what the worker waits for
    # Machines that rank 0 asks to pause, in which generation, and why.
    pauses: Annotated[tuple[Node, ...], Meta(max_length=MOST_MACHINES)] = ()
    pauses_in: Version = 0
    pauses_why: Word = ""
    progress: TrainingProgress | None = None  # of the main worker of a session
    # Bytes of output before it became rank 0 of a session; -1: it never was.
    main_offset: Annotated[int, Meta(ge=-1, le=1 << 62)] = -1
    is_failing: bool = False  # its script raised an exception, and it is about to exit

    @property
    def failed(self) -> bool:
        return self.state == "ended" and (self.code != 0 or self.signal != 0)


class DroppedSteps(msgspec.Struct, frozen=True, array_like=True):
    """Steps that a machine trained without a quorum and that were dropped."""

    steps: Version
    onward: Version  # the step at which training continues

    def sentence(self, name: str) -> str:
        """Return a sentence for the user about the dropped steps."""
        they = "it is" if self.steps == 1 else "they are"
        trained = counted(self.steps, "step")
        return (
            f"{name} had trained {trained} alone; {they} dropped, training continues from step {self.onward}"
        )


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a machine about its part in a run. ``serial`` orders the reports of one incarnation of its
    agent.
    """

    run: RunId
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    serial: Version
    stage: Stage
    generation: Version = 0
    words: Words = ""
    done_bytes: Bytes = 0
    all_bytes: Bytes = 0
    devices: Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=64)] = ()
    packages: InstalledPackages | None = None
    workers: Annotated[tuple[WorkerState, ...], Meta(max_length=256)] = ()
    failures: Annotated[tuple[WorkerFailure, ...], Meta(max_length=MAX_REPORTED_FAILURES)] = ()
    elastic: bool = False  # the workers have a session
    dropped: Annotated[tuple[DroppedSteps, ...], Meta(max_length=MOST_DROPPED)] = ()  # the newest last
    results: Digest = b""
    collected: bool = False  # True if ``results`` is complete
    paused: Words = ""  # why its user's limits keep the run from it now
    lacks_files: bool = False  # it failed because no machine that has the files sent a piece of them

    @property
    def is_idle(self) -> bool:
        """Return True if no worker of the run is alive on the machine."""
        return all(worker.state == "ended" for worker in self.workers)


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_orders = msgspec.msgpack.Decoder(RunSpec)
_records = msgspec.msgpack.Decoder(RunRecord)


def sign_spec(spec: RunSpec, key: NodeKey) -> RunRecord:
    """Sign a run spec and return the first version of its record."""
    encoded = _encoder.encode(spec)
    if spec.by != key.id.raw:
        raise RunError("a run spec must be signed by the machine that gives it")
    return RunRecord(order=encoded, signature=key.sign(_PURPOSE + encoded))


def read_spec(record: RunRecord) -> RunSpec:
    """Return the spec of a record if its signature is valid; whether the signer is an owner, the trust log
    knows.
    """
    order = decode(_orders, record.order, "the spec of a run cannot be read")
    if order.job:
        _check_attempt(order, SignedJob(order.job, record.signature))
        return order
    if not verify_signature(NodeId(order.by), record.signature, _PURPOSE + record.order):
        raise TrustError(f"the spec of run {order.run} is not signed by the machine that it names")
    return order


def attempt_spec(
    job: SignedJob, number: int, nodes: tuple[bytes, ...], device: str, *, at: float = 0.0
) -> RunSpec:
    """Return the run spec of an attempt of a job; raise BarnraiseError if the job is not signed.

    It continues from the checkpoints of earlier attempts.
    """
    return _attempt_spec(read_job(job), job.order, number, nodes, device, at)


def _attempt_spec(
    spec: JobSpec, order: bytes, number: int, nodes: tuple[bytes, ...], device: str, at: float
) -> RunSpec:
    earlier = range(number - 1, max(0, number - 1 - MAX_RESUMED), -1)
    return RunSpec(
        run=attempt_run(spec, number),
        by=spec.by,
        at=at,
        program=spec.program,
        options=replace(spec.options, per_node=1) if spec.job_options.each == "device" else spec.options,
        nodes=nodes,
        named=bool(spec.nodes),
        resumes=tuple(attempt_run(spec, other) for other in earlier),
        device=device,
        job=order,
    )


def sign_attempt(spec: RunSpec, job: SignedJob) -> RunRecord:
    """Return the first version of the record of an attempt, with the signature of the job's owner."""
    return RunRecord(order=_encoder.encode(spec), signature=job.signature)


def _check_attempt(order: RunSpec, job: SignedJob) -> None:
    """Raise TrustError unless a run is what its job allows: only machines, device and time are free.

    The registry of runs checks the machines, because the trust log knows which keys they have now.
    """
    spec = read_job(job)
    digits = order.run.rpartition("-")[0].rpartition("-")[2]
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 2 else 0
    allowed = _attempt_spec(spec, order.job, number, order.nodes, order.device, order.at)
    is_device = spec.job_options.each == "device"
    if order != allowed or not 1 <= number <= MAX_ATTEMPTS or bool(order.device) != is_device:
        raise TrustError(f"run {order.run} is not what job {spec.job} allows")


def encode_record(record: RunRecord) -> bytes:
    """Encode a record for the store."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> RunRecord:
    """Decode a record; raise ProtocolError if it is malformed."""
    return decode(_records, data, "the record of a run cannot be read")
