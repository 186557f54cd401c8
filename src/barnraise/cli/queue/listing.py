"""``barnraise queue``: the table of jobs with their metrics, and the best one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import click

from barnraise.agent_client.queue.requests import JobRow, ListJobsRequest, QueueResponse
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.runs.progress.progress_line import format_value
from barnraise.cli.tables import table
from barnraise.cli.terminal import wrapped

_SHOWN = 30


def show(*, everything: bool, as_json: bool) -> int:
    """Print all jobs; of those that have ended only the newest, unless ``everything``."""
    response = ask(ListJobsRequest(), QueueResponse)
    if as_json:
        print_json(response)
        return 0
    if not response.jobs:
        click.echo("The queue is empty. Add jobs: barnraise queue add train.py --lr 1e-4,3e-4")
        return 0
    ended = [row for row in response.jobs if row.state in ("done", "failed", "cancelled")]
    hidden = 0 if everything else max(0, len(ended) - _SHOWN)
    if hidden:
        click.echo(f"({hidden} older jobs: barnraise queue list --all)")
    click.echo(job_table(response.jobs[hidden:]))
    for line in best_lines(response.jobs):
        click.echo(wrapped(line))
    if response.sentence:
        click.echo(wrapped(f"No job starts now: {response.sentence}"), err=True)
    return 0


def job_table(rows: Sequence[JobRow]) -> str:
    """Return the table of these jobs."""
    lines = [("job", "state", "arguments", "machine", "step", "metric", "news")]
    for row in rows:
        progress = row.progress
        lines.append(
            (
                str(row.job),
                "paused" if row.is_paused and row.state == "waiting" else row.state,
                " ".join(row.command[1:]) or row.command[0],
                ", ".join(row.machines) if row.state != "waiting" else "",
                f"{progress.step:,}" if progress is not None else "",
                f"{progress.metric} {format_value(progress.value)}" if progress and progress.metric else "",
                _news(row),
            )
        )
    return table(lines, words=(2, 6))


def _news(row: JobRow) -> str:
    tries = f"try {row.tries}: " if row.tries > 1 and row.state == "running" else ""
    return f"{tries}{row.why}"


def best_lines(rows: Sequence[JobRow]) -> list[str]:
    """Return a line about the best done job of each metric. NaN is never the best."""
    groups: defaultdict[tuple[str, str, str], list[tuple[float, JobRow]]] = defaultdict(list)
    for row in rows:
        progress = row.progress
        if (
            row.state == "done"
            and progress is not None
            and progress.metric
            and not math.isnan(progress.value)
        ):
            groups[row.title, progress.metric, row.best].append((progress.value, row))
    lines = []
    for (title, metric, best), jobs in groups.items():
        if len(jobs) > 1:
            choose = min if best == "min" else max
            value, row = choose(jobs, key=lambda item: item[0])
            arguments = " ".join(row.command[1:])
            lines.append(
                f"Best of {title}: job {row.job}, {metric} {format_value(value)}  {arguments}".rstrip()
            )
    return lines
