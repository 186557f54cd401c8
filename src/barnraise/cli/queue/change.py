"""``barnraise queue cancel``, ``pause``, ``resume``, ``clear`` and ``move``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import click

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.queue.requests import (
    MAX_ADDED,
    ChangeJobsRequest,
    ListJobsRequest,
    MoveJobRequest,
    QueueResponse,
)
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.queue.expand import parse_jobs
from barnraise.cli.waiting import waiting
from barnraise.core.sanitize import printable
from barnraise.core.units import counted

_ANSWER_S = 120.0
_PER_JOB_S = 0.25  # each change is agreed on by a quorum
_WORDS = {"cancel": "cancelling", "pause": "pausing", "resume": "resuming", "clear": "clearing"}


def change(
    action: Literal["cancel", "pause", "resume", "clear"],
    jobs: Sequence[str],
    *,
    as_json: bool,
    everything: bool = False,
) -> int:
    """Change jobs, and print how many were changed."""
    numbers = tuple(parse_jobs(jobs))
    if everything:
        rows = ask(ListJobsRequest(), QueueResponse).jobs
        numbers = tuple(row.job for row in rows if row.state in ("waiting", "running"))
        if not numbers:
            click.echo("No job waits or runs.")
            return 0
    timeout_s = _ANSWER_S + _PER_JOB_S * (len(numbers) or MAX_ADDED)
    with waiting(f"barnraise: {_WORDS[action]} {counted(len(numbers), 'job') if numbers else 'jobs'}"):
        done = ask(ChangeJobsRequest(action=action, jobs=numbers), RequestDone, timeout_s=timeout_s)
    _print(done, as_json)
    return 0


def move(job: int, *, before: int, last: bool, priority: int | None, as_json: bool) -> int:
    """Change the place of a waiting job."""
    if sum((bool(before), last, priority is not None)) > 1:
        raise click.UsageError("--before, --last and --priority exclude each other.")
    request = MoveJobRequest(job=job, before=before, to_end=last, priority=priority)
    _print(ask(request, RequestDone, timeout_s=_ANSWER_S), as_json)
    return 0


def _print(done: RequestDone, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        click.echo(printable(done.sentence))
