"""Requests about the queue to this machine's agent, and the responses. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.agent_client.run_options import MAX_MACHINES, Argument, RunOptions, RunProgram
from barnraise.agent_client.run_requests import MAX_METRIC, TrainingProgress

MAX_ADDED = 1000
MAX_AFTER = 64
MAX_PRIORITY = 1000
METRIC_VARIABLE = "BARNRAISE_METRIC"  # tells a session which of the logged values it reports

JobNumber = Annotated[int, Meta(ge=1, le=1 << 31)]
Each = Literal["device", "machine", "all"]
JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
Text = Annotated[str, Meta(max_length=4000)]
Numbers = Annotated[tuple[JobNumber, ...], Meta(max_length=4096)]
Command = Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=1024)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a job in the queue, besides those of its runs.

    ``each``: what one job gets. ``needs_bytes``: memory that it needs on each device. ``retries``: how often
    a job that fails is tried on another machine. ``metric``: name of the logged value; empty: the loss.
    """

    each: Each = "device"
    after: Annotated[tuple[JobNumber, ...], Meta(max_length=MAX_AFTER)] = ()
    needs_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    retries: Annotated[int, Meta(ge=0, le=20)] = 1
    metric: Annotated[str, Meta(max_length=MAX_METRIC)] = ""
    best: Literal["min", "max"] = "min"


class AddJobsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add-jobs?"):
    """Request to add a job for each command; the files are in this machine's store.

    ``on``: only the named machines. The command of ``program`` itself is not used.
    """

    program: RunProgram
    commands: Annotated[tuple[Command, ...], Meta(min_length=1, max_length=MAX_ADDED)]
    options: RunOptions = RunOptions()
    job: JobOptions = JobOptions()
    priority: Priority = 0
    on: Annotated[tuple[Text, ...], Meta(max_length=MAX_MACHINES)] = ()


class ListJobsRequest(msgspec.Struct, frozen=True, tag="jobs?"):
    """Request for all jobs of the queue, in the order in which they start."""


class ChangeJobsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="change-jobs?"):
    """Request to cancel, pause, resume or clear jobs. No number stands for all jobs that this fits."""

    action: Literal["cancel", "pause", "resume", "clear"]
    jobs: Numbers = ()


class MoveJobRequest(msgspec.Struct, frozen=True, kw_only=True, tag="move-job?"):
    """Request to change the place of a waiting job. ``before``: another job; 0: the front or the end.

    A job that is moved before another one gets its priority.
    """

    job: JobNumber
    before: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    to_end: bool = False
    priority: Priority | None = None  # only change this, and no place


class JobResultsRequest(msgspec.Struct, frozen=True, tag="job-results?"):
    """Request to bring what a finished job wrote into this machine's store."""

    job: JobNumber


QueueRequest = AddJobsRequest | ListJobsRequest | ChangeJobsRequest | MoveJobRequest | JobResultsRequest


class JobsAdded(msgspec.Struct, frozen=True, tag="jobs-added"):
    """Numbers of the new jobs, in the order of their commands. ``sentence``: why not all were added."""

    jobs: tuple[int, ...]
    sentence: str = ""


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as ``barnraise queue`` shows it. ``why``: what it waits for, or how it ended."""

    job: int
    state: JobState
    by: str
    at: float
    title: str
    command: tuple[str, ...]
    each: str
    priority: int = 0
    is_paused: bool = False
    after: tuple[int, ...] = ()
    tries: int = 0
    run: str = ""  # the newest run
    machines: tuple[str, ...] = ()  # of the newest run
    device: str = ""
    why: str = ""
    progress: TrainingProgress | None = None  # of the newest run
    metric: str = ""
    best: str = "min"
    has_results: bool = False
    results_note: str = ""  # why files of a done job cannot be fetched


class QueueResponse(msgspec.Struct, frozen=True, kw_only=True, tag="jobs"):
    """List of the jobs of a cluster. ``sentence``: why no job starts now; empty if the queue works."""

    jobs: tuple[JobRow, ...]
    sentence: str = ""


QueueAnswer = JobsAdded | QueueResponse
