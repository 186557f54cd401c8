"""A run as the cluster knows it: what was ordered, where it stands, and what each machine reports. Pure.

The order is signed by the owner who gave it and never changes. The record around it is numbered; the next
version is written by comparing with the last one, so that there is one history of it. Reports are each
machine's own word about itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import RunError, TrustError
from barnraise.core.units import counted
from barnraise.environments.installed_packages import InstalledPackages
from barnraise.environments.script_imports import ScriptImports
from barnraise.identity import NodeId, NodeKey, verify_signature

MOST_MACHINES = 256
MOST_WORKERS = 1024
MOST_DROPPED = 8
RUN_ID = r"^[a-z0-9][a-z0-9-]{0,47}$"
ENDED = "ended"
_PURPOSE = b"barnraise run order 1\0"

RunId = Annotated[str, Meta(pattern=RUN_ID, max_length=48)]
Node = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(max_length=32)]
Word = Annotated[str, Meta(max_length=200)]
Argument = Annotated[str, Meta(max_length=32768)]
Words = Annotated[str, Meta(max_length=4000)]  # of one machine
Sentence = Annotated[str, Meta(max_length=32768)]  # may name every machine, and hold one's words
Tail = Annotated[str, Meta(max_length=16384)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Rank = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Version = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Phase = Literal["preparing", "running", "restarting", "stopping", "ended"]
Stage = Literal["asks", "refused", "fetching", "building", "ready", "failed", "running", "ended"]


class DataSet(msgspec.Struct, frozen=True, array_like=True):
    """Shipped, if it has a manifest; otherwise each machine has it at this path."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,39}$")]
    manifest: Digest = b""
    path: Argument = ""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    run: RunId
    by: Node
    at: Seconds  # the starter's wall clock; for people only
    command: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=1024)]
    folder: Digest
    title: Word = ""
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1, max_length=MOST_MACHINES)]
    named: bool = False  # whether the user chose the machines
    per_node: Annotated[int, Meta(ge=0, le=64)] = 0
    min_nodes: Annotated[int, Meta(ge=1, le=MOST_MACHINES)] = 1
    wait_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 3
    environment: Literal["auto", "sync", "agent"] = "auto"
    engine: Literal["auto", "barnraise", "gloo", "nccl"] = "auto"
    fabric: Literal["untrusted", "trusted"] = "untrusted"
    quiet: bool = False
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    memory_bytes: Bytes = 0
    container: Word = ""
    data: Annotated[tuple[DataSet, ...], Meta(max_length=64)] = ()
    variables: Annotated[tuple[tuple[Word, Argument], ...], Meta(max_length=256)] = ()
    needs: ScriptImports = ScriptImports()
    resumes: Annotated[tuple[RunId, ...], Meta(max_length=16)] = ()  # what it goes on with, newest first

    @property
    def manifests(self) -> tuple[bytes, ...]:
        """Of all that is shipped."""
        return (self.folder, *(data.manifest for data in self.data if data.manifest))


class WorkerSlot(msgspec.Struct, frozen=True, array_like=True):
    """A place for one worker; its rank is its position in the record. ``start`` tells its processes apart."""

    node: Node
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    device: Annotated[str, Meta(max_length=16)]
    start: Version = 0

    @property
    def key(self) -> tuple[bytes, int, int]:
        return self.node, self.local_rank, self.start


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. ``tail`` is the last output of the worker that failed first."""

    code: Annotated[int, Meta(ge=0, le=255)]
    sentence: Sentence
    node: Annotated[bytes, Meta(max_length=32)] = b""
    rank: Annotated[int, Meta(ge=-1, le=MOST_WORKERS)] = -1
    tail: Tail = ""


class LeftOutNode(msgspec.Struct, frozen=True, array_like=True):
    """A machine that was chosen and does not take part."""

    node: Node
    why: Sentence


class RestartedFailure(msgspec.Struct, frozen=True, array_like=True):
    """A place whose worker failed by itself, in what way, and was started again for once."""

    node: Node
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    kind: Word


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of where a run stands."""

    order: Annotated[bytes, Meta(max_length=256 << 10)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    version: Version = 1
    phase: Phase = "preparing"
    generation: Version = 0
    began: Version = 0  # the generation whose workers were all started for it
    finished: bool = False  # a member of the session has ended well
    results_at: Annotated[bytes, Meta(max_length=32)] = b""  # where rank 0 ended well
    results_also_at: Annotated[bytes, Meta(max_length=32)] = b""  # where a machine's first worker did
    slots: Annotated[tuple[WorkerSlot, ...], Meta(max_length=MOST_WORKERS)] = ()
    left_out: Annotated[tuple[LeftOutNode, ...], Meta(max_length=MOST_MACHINES)] = ()
    resting: Annotated[
        tuple[LeftOutNode, ...], Meta(max_length=MOST_MACHINES)
    ] = ()  # the session, without them
    restarts: Count = 0  # how many workers' deaths were followed by another start
    forgiven: Annotated[tuple[RestartedFailure, ...], Meta(max_length=MOST_WORKERS)] = ()  # of late
    hard: bool = False  # end the workers without a last word
    elastic: bool = False  # a session: members may come and go, and nobody is started again for it
    # Newcomers to a session that get the state, to be let in then.
    nursed: Annotated[tuple[WorkerSlot, ...], Meta(max_length=MOST_WORKERS)] = ()
    nursery: Version = 0  # the number of the newest attempt to give it to them
    provisional: Version = 0  # the agreed version that this one was built on without a quorum; 0: agreed
    why: Sentence = ""
    outcome: RunOutcome | None = None

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """The machines of this generation, in order of rank."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots))

    def ranks_of(self, node: bytes) -> list[int]:
        return [rank for rank, slot in enumerate(self.slots) if slot.node == node]


def supersedes(record: RunRecord, known: RunRecord) -> bool:
    """Whether it takes the place of another version.

    What was decided counts more than what went on without a quorum, unless that goes on from it.
    """
    if known.provisional and not record.provisional:
        return record.version > known.provisional
    if record.provisional and not known.provisional:
        return record.provisional >= known.version
    return record.version > known.version


class WorkerState(msgspec.Struct, frozen=True, array_like=True):
    """One worker as its own agent sees it. ``place`` orders the ends on one machine."""

    rank: Rank  # at its start
    # waiting: with a session, for a group; stopped: by a signal, so that it does nothing
    # near: a newcomer to a session that could be let in; leaving: its machine wants to go, at the next commit
    state: Literal["running", "waiting", "near", "stopped", "leaving", "ended"]
    code: Annotated[int, Meta(ge=-1, le=1 << 32)] = 0
    signal: Annotated[int, Meta(ge=0, le=128)] = 0
    tail: Tail = ""
    place: Count = 0
    local_rank: Annotated[int, Meta(ge=0, le=64)] = 0
    start: Version = 0
    broke: Version = 0  # the generation whose group broke under it, while it waits for another
    blames: Annotated[tuple[Rank, ...], Meta(max_length=64)] = ()  # the ranks that it lost there
    trained: bool = False  # it has committed a step of a session
    words: Word = ""  # for what it waits
    # Whom the session's first member would go on without, in which generation's group, and why.
    rests: Annotated[tuple[Node, ...], Meta(max_length=MOST_MACHINES)] = ()
    rests_in: Version = 0
    rests_why: Word = ""

    @property
    def failed(self) -> bool:
        return self.state == "ended" and (self.code != 0 or self.signal != 0)


class DroppedSteps(msgspec.Struct, frozen=True, array_like=True):
    """Steps that a machine trained without a quorum, and that count no more."""

    steps: Version
    onward: Version  # where the training goes on

    def sentence(self, name: str) -> str:
        they = "it is" if self.steps == 1 else "they are"
        trained = counted(self.steps, "provisional step")
        return f"{name} had trained {trained} alone; {they} dropped, training goes on from step {self.onward}"


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's own part in a run. ``serial`` orders the reports of one incarnation of its agent."""

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
    elastic: bool = False  # its workers have a session
    dropped: Annotated[tuple[DroppedSteps, ...], Meta(max_length=MOST_DROPPED)] = ()  # the newest last
    results: Digest = b""
    collected: bool = False  # whether ``results`` is all there will be

    @property
    def is_idle(self) -> bool:
        """No worker of the run is alive there."""
        return all(worker.state == "ended" for worker in self.workers)


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_orders = msgspec.msgpack.Decoder(RunSpec)
_records = msgspec.msgpack.Decoder(RunRecord)


def sign_spec(order: RunSpec, key: NodeKey) -> RunRecord:
    """The first version of its record."""
    encoded = _encoder.encode(order)
    if order.by != key.id.raw:
        raise RunError("an order is signed by whoever gives it")
    return RunRecord(order=encoded, signature=key.sign(_PURPOSE + encoded))


def read_spec(record: RunRecord) -> RunSpec:
    """The order of a record, if whoever gave it signed it; whether that was an owner, the log knows."""
    order = decode(_orders, record.order, "the order of a run cannot be read")
    if not verify_signature(NodeId(order.by), record.signature, _PURPOSE + record.order):
        raise TrustError(f"the order of run {order.run} is not signed by the machine that it names")
    return order


def encode_record(record: RunRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> RunRecord:
    return decode(_records, data, "the record of a run cannot be read")
