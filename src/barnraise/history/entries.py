"""Entries of a run's record, and their encoding with bounds. Pure.

Each machine of a run writes logs of such entries. `merge` makes one history of several logs. Times ``at`` are
seconds of the writer's wall clock since 1970, for people.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST_MACHINES = 256
MOST_WORKERS = 1024
MOST_ROWS = 4096  # of one batch of steps
MOST_VALUES = 64  # names in one row that a worker writes
MOST_NAMES = 256  # in one batch of values: coarse rows have the names of all their steps
MOST_SPANS = 4095  # of a row that lacks steps
MOST_LINKS = 1024
MOST_ENTRIES = 4096  # of one frame
# The last phase is of split models only; the rows of other runs leave its column out.
PHASES = ("data", "compute", "communication", "vote", "checkpoint", "other", "activations")
LEAST_PHASES = 6  # columns that rows with phases have at least
TICKS_PER_S = 10_000  # phases are counted in ticks of 0.1 ms

RunId = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,47}\Z", max_length=48)]
Node = Annotated[bytes, Meta(max_length=32)]  # empty: the only machine, which has no key
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Step = Annotated[int, Meta(ge=0, lt=10**12)]
Generation = Annotated[int, Meta(ge=0, le=1 << 40)]
Name = Annotated[str, Meta(max_length=64)]
Word = Annotated[str, Meta(max_length=200)]
Sentence = Annotated[str, Meta(max_length=4000)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Ticks = Annotated[int, Meta(ge=0, le=1 << 45)]
TickColumn = Annotated[tuple[Ticks, ...], Meta(max_length=MOST_ROWS)]
Samples = Annotated[int, Meta(ge=0, le=1 << 50)]
Stride = Annotated[int, Meta(ge=1, le=1 << 30)]
Spans = Annotated[tuple[Stride, ...], Meta(max_length=MOST_SPANS)]
ValueColumn = Annotated[bytes, Meta(max_length=4 * MOST_ROWS)]  # little-endian float32
ChangeKind = Literal[
    "joining", "joined", "left", "paused", "resumed", "evicted", "died", "recovered", "refused"
]
# The state with which a group starts: "kept" if its members go on without a gap.
StateOrigin = Literal["start", "kept", "checkpoint", "discarded"]


class LogHead(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """First entry of a log. ``identity`` is drawn for each file, also when a log is rewritten smaller.

    ``source``: ``agent`` or ``worker-N`` with the local rank. ``cluster``: whose owners may copy the log.
    ``at``: when the file was made.
    """

    run: RunId
    node: Node
    source: Annotated[str, Meta(pattern=r"^(agent|worker-[0-9]{1,3})\Z", max_length=10)]
    identity: Annotated[bytes, Meta(min_length=16, max_length=16)]
    at: Seconds
    version: Annotated[int, Meta(ge=1, le=1)] = 1
    cluster: Annotated[bytes, Meta(max_length=32)] = b""


class MachineFacts(msgspec.Struct, frozen=True, array_like=True, tag="machine"):
    """Machine of a run: what does not change.

    ``memory_bytes``: of the device, or else of the computer; 0: unknown.
    """

    node: Node
    name: Name
    device: Word = ""
    memory_bytes: Amount = 0
    system: Word = ""


class RunStart(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Start of a run: what was asked for. ``options``: names and values, as on the command line.

    ``resumes``: the run whose checkpoint it continues from.
    """

    at: Seconds
    command: Sentence
    title: Word = ""
    started_by: Name = ""
    options: Annotated[tuple[tuple[Word, Sentence], ...], Meta(max_length=64)] = ()
    environment: Annotated[tuple[tuple[Word, Word], ...], Meta(max_length=64)] = ()  # Python, torch, packages
    resumes: Annotated[str, Meta(max_length=48)] = ""


class RunEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End of a run. ``code``: its exit code. ``was_stopped``: by a person; None: if the code is 130."""

    at: Seconds
    code: Annotated[int, Meta(ge=0, le=255)]
    sentence: Sentence = ""
    was_stopped: bool | None = None


class TrainingGoal(msgspec.Struct, frozen=True, array_like=True, tag="goal"):
    """Goal of a training or a map. ``total``: None if unknown. ``batch``: samples of a step.

    ``metric``: the logged value that counts; empty: the loss, or else the first one.
    """

    at: Seconds
    total: Step | None = None
    batch: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    counts: Literal["step", "item"] = "step"
    metric: Name = ""


class GroupStart(msgspec.Struct, frozen=True, array_like=True, tag="group"):
    """Start of a group of workers. ``step``: committed steps at that moment, of the state that counts.

    ``members``: the machine of each rank. ``origin``: ``checkpoint`` if all go on from one; ``discarded`` if
    the writer gave its own steps up for the state of the others. Steps of earlier groups from ``step`` on do
    not count any more; ``dropped``: how many of them `merge` has left out.
    """

    at: Seconds
    generation: Generation
    step: Step
    members: Annotated[tuple[Node, ...], Meta(max_length=MOST_WORKERS)]
    origin: StateOrigin = "kept"
    is_provisional: bool = False
    dropped: Step = 0


class StepBatch(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Committed steps in columns; row i is of ``stride`` steps that start at ``first + i * stride``.

    ``at``: the commit of the first row. ``ticks``: time from the commit before to this one, for each row; the
    row after a break may be long. ``phases``: a column for each of PHASES, at least for the first six, or
    none; together they are ``ticks``. ``samples``: of each row. Rows with a stride above 1 hold sums over
    their steps.

    Some rows are alone in their batch. ``spans``: how many of its steps a row has and lacks in turn, if it
    lacks some. ``oldest``: the first generation of a row whose steps are of several; ``generation``: the
    last one.
    """

    generation: Generation
    first: Step
    at: Seconds
    ticks: TickColumn
    samples: Annotated[tuple[Samples, ...], Meta(max_length=MOST_ROWS)]
    phases: Annotated[tuple[TickColumn, ...], Meta(max_length=len(PHASES))] = ()
    stride: Stride = 1
    is_provisional: bool = False
    spans: Spans = ()
    oldest: Generation | None = None

    @property
    def end(self) -> int:
        """Return the number of the step after the last one."""
        return self.first + self.stride * len(self.ticks)


class ValueBatch(msgspec.Struct, frozen=True, array_like=True, tag="values"):
    """Logged values of steps in columns, averaged over all workers; NaN where a step has none.

    Without names, it is one row of steps in which nothing was logged. With a stride above 1, ``columns`` are
    means over the steps of a row, and ``lows`` and ``highs`` their smallest and largest values. ``spans``,
    ``oldest``: as of `StepBatch`.
    """

    generation: Generation
    first: Step
    names: Annotated[tuple[Name, ...], Meta(max_length=MOST_NAMES)]
    columns: Annotated[tuple[ValueColumn, ...], Meta(max_length=MOST_NAMES)]
    stride: Stride = 1
    lows: Annotated[tuple[ValueColumn, ...], Meta(max_length=MOST_NAMES)] = ()
    highs: Annotated[tuple[ValueColumn, ...], Meta(max_length=MOST_NAMES)] = ()
    is_provisional: bool = False
    spans: Spans = ()
    oldest: Generation | None = None


class OwnValues(msgspec.Struct, frozen=True, array_like=True, tag="own"):
    """One worker's sums and weights of a step whose means no commit has brought, such as the last one."""

    generation: Generation
    step: Step
    rank: Annotated[int, Meta(ge=0, lt=MOST_WORKERS)]
    names: Annotated[tuple[Name, ...], Meta(max_length=MOST_VALUES)]
    sums: Annotated[tuple[float, ...], Meta(max_length=MOST_VALUES)]
    weights: Annotated[tuple[float, ...], Meta(max_length=MOST_VALUES)]
    is_provisional: bool = False


class MembershipChange(msgspec.Struct, frozen=True, array_like=True, tag="member"):
    """Change of a machine's part in the run, and the reason in words. ``step``: committed ones, if known."""

    at: Seconds
    node: Node
    change: ChangeKind
    reason: Sentence = ""
    step: Step | None = None
    generation: Generation = 0


class PlanAdopted(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """Plan that takes effect, with its reason and its prediction.

    ``sync``: how workers synchronize, in words. ``phases_s``: predicted seconds of PHASES, as many as rows
    have. ``shares``: samples of a step by machine.
    """

    at: Seconds
    step: Step
    name: Word
    sync: Word
    reason: Sentence
    step_s: Seconds = 0.0  # 0: unknown
    phases_s: Annotated[tuple[Seconds, ...], Meta(max_length=len(PHASES))] = ()
    shares: Annotated[tuple[tuple[Node, Amount], ...], Meta(max_length=MOST_MACHINES)] = ()


class CheckpointSaved(msgspec.Struct, frozen=True, array_like=True, tag="checkpoint"):
    """Checkpoint on the writer's machine. ``copies``: machines that hold it, as far as the writer knows."""

    at: Seconds
    step: Step
    node: Node
    size_bytes: Amount = 0
    copies: Annotated[int, Meta(ge=0, le=MOST_MACHINES)] = 1


class MachineSample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """State of a machine at one moment; None: unknown.

    ``energy_j``: used for the run since it or the agent of the machine started. ``samples_per_s``: while it
    computes, without waiting. ``share``: its part of the samples since its sample before, from 0 to 1.
    """

    at: Seconds
    node: Node
    used_bytes: Amount | None = None
    temperature_c: Annotated[float, Meta(ge=-100, le=1000)] | None = None
    power_w: Amount | None = None
    energy_j: Amount | None = None
    samples_per_s: Amount | None = None
    share: Annotated[float, Meta(ge=0, le=1)] | None = None
    load: Annotated[float, Meta(ge=0, le=1)] | None = None  # of the device, or else of the processor


class LinkSample(msgspec.Struct, frozen=True, array_like=True, tag="links"):
    """Measured links: from, to, Mbit/s and round-trip time in milliseconds; 0: unknown."""

    at: Seconds
    links: Annotated[tuple[tuple[Node, Node, Amount, Amount], ...], Meta(max_length=MOST_LINKS)]


class FailureNote(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Failure of a worker, also of one that was restarted. ``tail``: the end of its output.

    ``start`` tells the processes of one worker apart.
    """

    at: Seconds
    node: Node
    sentence: Sentence
    rank: Annotated[int, Meta(ge=-1, lt=MOST_WORKERS)] = -1
    code: Annotated[int, Meta(ge=-1, le=1 << 32)] = 0
    signal: Annotated[int, Meta(ge=0, le=128)] = 0
    start: Generation = 0
    tail: Sentence = ""


class NoteEntry(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """Event without a type of its own, in words."""

    at: Seconds
    text: Sentence
    node: Node = b""
    step: Step | None = None
    is_warning: bool = False


Entry = (
    LogHead
    | MachineFacts
    | RunStart
    | RunEnd
    | TrainingGoal
    | GroupStart
    | StepBatch
    | ValueBatch
    | OwnValues
    | MembershipChange
    | PlanAdopted
    | CheckpointSaved
    | MachineSample
    | LinkSample
    | FailureNote
    | NoteEntry
)
