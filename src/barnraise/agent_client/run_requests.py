"""Requests about runs to this machine's agent, and the responses. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.agent_client.run_options import MAX_MACHINES, Digest, RunOptions, RunProgram, Variables

MOST_FOLLOWED = 64
MOST_WORDS = 200
MAX_CHANGE_WORDS = 2000
STOPPED = 130  # exit code of a run that a person stopped; a script may exit with it too
MAX_METRIC = 24  # characters of the name of a logged value

RunName = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=4000)]
LARGEST_OFFSET = 2**62  # stands for the end of the output
Offset = Annotated[int, Meta(ge=0, le=LARGEST_OFFSET)]
Rank = Annotated[int, Meta(ge=0, le=1024)]
Step = Annotated[int, Meta(ge=0, lt=10**12)]
Node = Annotated[bytes, Meta(min_length=32, max_length=32)]
PartNumbers = Annotated[tuple[Annotated[int, Meta(ge=0, lt=4096)], ...], Meta(max_length=4096)]
Speed = Annotated[float, Meta(ge=0, le=1e15)]


class TrainingProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a session, as its main worker reports it.

    ``metric``: name of the logged value; empty if the script logs none. ``value`` may be NaN or infinite.
    """

    step: Step
    total: Step | None = None  # None: unknown
    metric: Annotated[str, Meta(max_length=MAX_METRIC)] = ""
    value: float = 0.0
    steps_per_s: Speed = 0.0  # 0: unknown
    samples_per_s: Speed = 0.0  # of all workers together
    counts: Literal["step", "item"] = "step"  # what ``step`` is a number of; items are those of a map


class StartRunRequest(msgspec.Struct, frozen=True, kw_only=True, tag="start?"):
    """Request to start a run whose files are in this machine's store. ``on``: only the named machines.

    ``variables``: those of ``--set``; only the machines of the run get their values.
    """

    program: RunProgram
    options: RunOptions = RunOptions()
    variables: Variables = ()
    on: Annotated[tuple[Text, ...], Meta(max_length=MAX_MACHINES)] = ()


class ResumeRunRequest(msgspec.Struct, frozen=True, kw_only=True, tag="resume?"):
    """Go on with a run that has ended, from its newest checkpoint. ``variables``: those of ``--set``."""

    run: RunName
    variables: Variables = ()
    on: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()


class GraphRequest(msgspec.Struct, frozen=True, tag="graph?"):
    """Request for the measurements of the machines that a run would use. ``on``: only the named ones."""

    on: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()


class RunsRequest(msgspec.Struct, frozen=True, tag="runs?"):
    """Request for the list of known runs."""


class FollowPosition(msgspec.Struct, frozen=True, array_like=True):
    """The output of one worker from this place on; ``offset`` counts every byte that it ever wrote.

    ``worker``: its number among all workers of the run.
    """

    worker: Rank
    offset: Offset


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True, tag="watch?"):
    """Request for the state of a run and the output of its workers. Waits a little for news if ``version`` is
    current.
    """

    run: RunName
    version: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    follow: Annotated[tuple[FollowPosition, ...], Meta(max_length=MOST_FOLLOWED)] = ()
    live: bool = False  # of output that is far ahead of the reader, only the end
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 1.0


class StopRunRequest(msgspec.Struct, frozen=True, tag="stop?"):
    """End a run; ``hard`` without a last word to its workers."""

    run: RunName
    hard: bool = False


class AcceptRunRequest(msgspec.Struct, frozen=True, tag="accept?"):
    """Request for what a run would do here; with ``yes``: accept it.

    ``order``: hash of the run spec that the user was shown; empty if the user did not look.
    """

    run: RunName
    yes: bool = False
    no: bool = False
    order: Annotated[str, Meta(max_length=64)] = ""
    sandbox: bool = True  # False: the user lets it run without one


class ResultsRequest(msgspec.Struct, frozen=True, tag="results?"):
    """Bring what rank 0 wrote into this machine's store."""

    run: RunName


class GroupRequest(msgspec.Struct, frozen=True, tag="group?"):
    """A worker with a session: in which group am I? Waits a little for news if ``version`` is known."""

    run: RunName
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    start: Annotated[int, Meta(ge=0, le=1 << 40)]
    version: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 5.0
    generation: Annotated[int, Meta(ge=0, le=1 << 40)] = (
        0  # its last group; while joining, its last recovery attempt
    )
    stuck: bool = False  # that group has broken, and it waits for another
    blames: Annotated[tuple[Annotated[int, Meta(ge=0, le=1024)], ...], Meta(max_length=64)] = ()
    near: bool = False  # a joining worker whose state is recent enough to be admitted
    trained: bool = False  # it has committed a step
    words: Annotated[str, Meta(max_length=MOST_WORDS)] = ""  # for what it waits
    pauses: Annotated[tuple[Node, ...], Meta(max_length=256)] = ()  # machines that its group would do without
    pauses_why: Annotated[str, Meta(max_length=MOST_WORDS)] = ""


class ProgressRequest(msgspec.Struct, frozen=True, tag="progress?"):
    """Report of the main worker of a session: how far the training is."""

    run: RunName
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    start: Annotated[int, Meta(ge=0, le=1 << 40)]
    progress: TrainingProgress


class FailingRequest(msgspec.Struct, frozen=True, tag="failing?"):
    """Report of a worker whose script raised an exception: it exits as soon as Python lets it."""

    run: RunName
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    start: Annotated[int, Meta(ge=0, le=1 << 40)]


class DroppedStepsRequest(msgspec.Struct, frozen=True, tag="dropped?"):
    """Report of a worker: the number of steps trained here without a quorum that were discarded."""

    run: RunName
    steps: Step
    onward: Step  # where the training goes on


class SignRequest(msgspec.Struct, frozen=True, tag="seal?"):
    """A worker with a session: sign the manifest of a checkpoint of mine."""

    run: RunName
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    start: Annotated[int, Meta(ge=0, le=1 << 40)]
    step: Step
    fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]


class SignersRequest(msgspec.Struct, frozen=True, tag="signers?"):
    """Request for the nodes whose signature under a checkpoint of this run counts."""

    run: RunName


class NewestCheckpointRequest(msgspec.Struct, frozen=True, tag="newest?"):
    """Request for the newest checkpoint of this run on any machine in reach.

    ``earlier``: runs that this one continues; their checkpoints count, too. Unusable checkpoints are skipped.
    ``awaiting``: machines to report if they are not in reach.
    """

    run: RunName
    earlier: bool = False
    passing_over: Annotated[tuple[tuple[RunName, Step], ...], Meta(max_length=1024)] = ()
    awaiting: Annotated[tuple[Node, ...], Meta(max_length=256)] = ()


class FetchCheckpointRequest(msgspec.Struct, frozen=True, tag="bring?"):
    """Have this checkpoint on this disk; answers when it is there, or a little later how far it is.

    ``parts``: the ones that are wanted of a checkpoint in parts; empty for all.
    """

    run: RunName
    step: Step
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 10.0
    parts: PartNumbers = ()


class RolesRequest(msgspec.Struct, frozen=True, tag="roles?"):
    """Request for the owners and guests of the cluster. ``run``: the run that asks; empty outside of runs."""

    run: Annotated[str, Meta(max_length=200)] = ""


CheckpointQuestion = SignRequest | SignersRequest | NewestCheckpointRequest | FetchCheckpointRequest
RunRequest = (
    StartRunRequest
    | ResumeRunRequest
    | GraphRequest
    | RunsRequest
    | WatchRequest
    | StopRunRequest
    | AcceptRunRequest
    | ResultsRequest
    | GroupRequest
    | ProgressRequest
    | FailingRequest
    | DroppedStepsRequest
    | RolesRequest
    | CheckpointQuestion
)


class RunStarted(msgspec.Struct, frozen=True, tag="started"):
    """The run has a name, and the cluster knows it."""

    run: str
    nodes: tuple[str, ...]
    begins: str = ""  # with what, if it goes on with another


class GraphResponse(msgspec.Struct, frozen=True, kw_only=True, tag="graph"):
    """``graph`` in the topology's form; ``nodes`` are the ids in it that a run would use."""

    graph: bytes
    nodes: tuple[str, ...]
    this: str


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one machine in a run."""

    name: str
    stage: str
    words: str = ""
    done_bytes: int = 0
    all_bytes: int = 0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a run. ``number``: its place among all workers that ever took part in the run."""

    rank: int
    name: str
    device: str
    state: str
    local_rank: int = 0
    start: int = 0
    code: int | None = None
    signal: int | None = None
    words: str = ""  # for what it waits
    number: int = 0
    main_offset: int = -1  # bytes of output before it became rank 0; -1: unknown
    has_session: bool = False  # the script has started a session on this machine
    # Its machine and this one are owners. Otherwise only colours of its output reach the terminal.
    is_trusted: bool = False


class FailureRow(msgspec.Struct, frozen=True):
    """Failure of a worker: one line about it, and the end of the worker's output.

    ``tail`` is empty in lists of runs and in responses with output: they must fit one message.
    """

    machine: str
    rank: int
    summary: str
    tail: str = ""
    signal: int = 0
    follows: bool = False  # the worker only noticed the failure of another one


class RunChange(msgspec.Struct, frozen=True, array_like=True):
    """A change of a run: the version that it made, the phase since then, and the reason."""

    version: Annotated[int, Meta(ge=0, le=1 << 53)]
    phase: Annotated[str, Meta(max_length=16)]
    why: Annotated[str, Meta(max_length=MAX_CHANGE_WORDS)]


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run as `ps` shows it. ``changes``: the newest ones, the newest last."""

    run: str
    title: str
    command: tuple[str, ...]
    by: str
    at: float
    phase: str
    generation: int
    version: int
    sentence: str
    machines: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    restarts: int = 0
    code: int | None = None
    failed_rank: int | None = None
    failed_on: str = ""
    tail: str = ""
    failures: tuple[FailureRow, ...] = ()
    progress: TrainingProgress | None = None  # of a session that has started to train
    changes: tuple[RunChange, ...] = ()

    @property
    def was_stopped(self) -> bool:
        """Tell whether a person stopped the run. A script may exit with the same code; then it has a rank."""
        return self.code == STOPPED and self.failed_rank is None


class RunsResponse(msgspec.Struct, frozen=True, tag="runs"):
    """List of runs, the newest last."""

    runs: tuple[RunRow, ...]


class LogChunk(msgspec.Struct, frozen=True, array_like=True):
    """A part of a worker's output; ``start`` is later than what was asked for if older bytes were dropped."""

    worker: int
    start: int
    data: bytes
    whole: bool  # nothing more was there when it was read
    missing: bool = False  # the worker's machine does not answer


class WatchResponse(msgspec.Struct, frozen=True, kw_only=True, tag="watch"):
    """State of a run now. ``findings``: lines about the machines' environments."""

    row: RunRow
    parts: tuple[PartRow, ...]
    workers: tuple[WorkerRow, ...]
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what became of it that a person should know
    heard: tuple[LogChunk, ...] = ()
    past: tuple[WorkerRow, ...] = ()  # workers that took part earlier
    has_results: bool = False


class DataRow(msgspec.Struct, frozen=True, array_like=True):
    """Data set or model of a run: a path of this machine, or files that are sent to it.

    ``version``: the id that the sender gives the model; empty if it has none.
    """

    name: str
    path: str = ""
    files: int = 0
    bytes: int = 0
    is_model: bool = False
    version: str = ""


class AcceptRunResponse(msgspec.Struct, frozen=True, kw_only=True, tag="accept"):
    """Everything that the user of a guest is asked to accept. Texts of the sender are as it sent them.

    ``order``: hash of the run spec. ``sandbox``: a statement about it; empty if there is none.
    """

    run: str
    order: str = ""
    sentence: str = ""
    by: str = ""
    by_id: str
    command: tuple[str, ...]
    files: tuple[tuple[str, int], ...] = ()  # path and bytes of the first ones
    file_count: int = 0
    bytes: int = 0
    variables: tuple[tuple[str, str], ...] = ()
    data: tuple[DataRow, ...] = ()
    image: str = ""
    packages: str = ""  # the file that lists them
    package_count: int = 0
    role: str = ""  # of this machine
    machines: tuple[str, ...] = ()  # the others of the cluster, with their ids
    sandbox: str = ""
    accepted: bool = False


class ResultsResponse(msgspec.Struct, frozen=True, tag="results"):
    """The manifest of what rank 0 wrote; empty if that was nothing. ``sentence``: what it lacks, and why."""

    manifest: Digest
    sentence: str


class GroupResponse(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """The group now; ``sentence`` says why it is so, or what is waited for."""

    version: int
    generation: int
    is_member: bool
    rank: int
    world: int
    provisional: bool
    beginning: bool  # none of its workers was in a group before
    finished: bool  # a member has finished: there is nothing left to join
    broken: bool  # a worker of this worker's last group is no longer a member
    recovery_attempt: int = 0  # newest recovery attempt; 0 if no worker joins, or without this worker
    joining: int = 0  # number of joining workers; a joining worker's ``rank`` is its place among them
    names: tuple[str, ...] = ()  # of the machine of each rank
    sentence: str


class GuestRow(msgspec.Struct, frozen=True, array_like=True):
    """A guest of the cluster. ``in_run``: the signed spec of the run that asks names it."""

    node: Node
    name: str
    in_run: bool


class RolesResponse(msgspec.Struct, frozen=True, kw_only=True, tag="roles"):
    """Owners and guests of the cluster, as this machine's agent knows them. ``here``: this machine."""

    here: Node
    owners: tuple[Node, ...]
    guests: tuple[GuestRow, ...] = ()

    @property
    def run_guests(self) -> tuple[str, ...]:
        """Return the names of the guests in the run that asked."""
        return tuple(guest.name for guest in self.guests if guest.in_run)


class SignResponse(msgspec.Struct, frozen=True, tag="seal"):
    """Signature of this machine under a checkpoint."""

    node: Node
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class SignersResponse(msgspec.Struct, frozen=True, tag="signers"):
    """Node ids of the valid signers."""

    nodes: tuple[Node, ...]


class NewestCheckpointResponse(msgspec.Struct, frozen=True, tag="newest"):
    """``run`` is empty if there is none; ``machines`` are the names of those that have it.

    ``sharded``: of a run that has only such checkpoints, the newest step; ``machines`` have parts of them.
    ``parts``: the numbers of those that ``machines`` have together; empty if the checkpoint is in one file.
    """

    run: str = ""
    step: int = 0
    agreed: bool = False
    machines: tuple[str, ...] = ()
    sharded: int = 0
    absent: tuple[str, ...] = ()  # awaited machines that are not in reach
    generation: int = 0  # in which it was saved
    parts: PartNumbers = ()


class FetchCheckpointResponse(msgspec.Struct, frozen=True, tag="bring"):
    """Result of a fetch: whether the checkpoint is here and complete; else how much of it is."""

    here: bool
    done_bytes: int = 0
    all_bytes: int = 0


CheckpointTold = SignResponse | SignersResponse | NewestCheckpointResponse | FetchCheckpointResponse
RunResponse = (
    RunStarted
    | GraphResponse
    | RunsResponse
    | WatchResponse
    | AcceptRunResponse
    | ResultsResponse
    | GroupResponse
    | RolesResponse
    | CheckpointTold
)
