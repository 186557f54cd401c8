"""``barnraise queue results``: what done jobs wrote, beside the script, as after a run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from barnraise.agent_client.queue.requests import JobResultsRequest, JobRow, ListJobsRequest, QueueResponse
from barnraise.agent_client.run_requests import ResultsResponse
from barnraise.artifacts import RESULTS, ArtifactStore, store_directory, unpack_into
from barnraise.cli.agent_call import ask
from barnraise.cli.queue.expand import parse_jobs
from barnraise.cli.waiting import waiting
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import RunError
from barnraise.core.sanitize import printable
from barnraise.core.units import counted

_POLL_S = 1.0
_FETCH_S = 600.0


def bring(jobs: Sequence[str], *, waits: bool) -> int:
    """Fetch the files of done jobs; with ``waits``, as they end. Return 1 if a job failed."""
    numbers = parse_jobs(jobs)
    store = ArtifactStore(store_directory(state_directory(load_settings())))
    brought: set[int] = set()
    code = 0
    rows = _named(ask(ListJobsRequest(), QueueResponse).jobs, numbers)
    numbers = [row.job for row in rows]
    if not rows:
        click.echo("barnraise: the queue is empty: no job has results", err=True)
    while True:
        for row in rows:
            if row.state in ("waiting", "running") or row.job in brought:
                continue
            brought.add(row.job)
            if row.state == "done":
                code = max(code, _bring_one(row, store))
            else:
                code = 1
                click.echo(f"barnraise: job {row.job} {row.state}: {printable(row.why)}", err=True)
                if row.state == "failed" and row.run:
                    click.echo(f"  -> Its output: barnraise logs {row.run}", err=True)
        left = [row for row in rows if row.job not in brought]
        if not left or not waits:
            break
        with waiting(f"barnraise: waiting for {counted(len(left), 'job')}"):
            time.sleep(_POLL_S)
        known = {row.job: row for row in ask(ListJobsRequest(), QueueResponse).jobs}
        for number in numbers:
            if number not in known and number not in brought:
                brought.add(number)
                code = 1
                click.echo(f"barnraise: job {number} is no longer in the list; no file was fetched", err=True)
        rows = [known[number] for number in numbers if number in known]
    if left:
        click.echo(f"barnraise: {counted(len(left), 'job')} not ended yet: --wait waits for them", err=True)
    return code


def _named(rows: Sequence[JobRow], numbers: Sequence[int]) -> list[JobRow]:
    known = {row.job: row for row in rows}
    missing = [number for number in numbers if number not in known]
    if missing:
        raise RunError(f"there is no job {missing[0]}", hint="See all with: barnraise queue")
    return [known[number] for number in numbers] if numbers else list(rows)


def _bring_one(row: JobRow, store: ArtifactStore) -> int:
    """Fetch the files of one job; return 1 if they cannot be brought now."""
    target = Path.cwd() / RESULTS / row.run
    if target.exists():
        click.echo(f"barnraise: job {row.job}: its files are in {os.path.relpath(target)} already", err=True)
        return 0
    if row.results_note and not row.has_results:
        where = " and ".join(map(printable, row.machines))
        click.echo(f"barnraise: job {row.job} on {where}: {printable(row.results_note)}", err=True)
        return 1
    if not row.has_results:
        click.echo(f"barnraise: job {row.job} wrote no file", err=True)
        return 0
    with waiting(f"barnraise: receiving the files of job {row.job}"):
        response = ask(JobResultsRequest(row.job), ResultsResponse, timeout_s=_FETCH_S)
    if not response.manifest:
        click.echo(f"barnraise: {printable(response.sentence)}", err=True)
        return 1
    count = unpack_into(store, response.manifest, target)
    if response.sentence:
        where = " and ".join(map(printable, row.machines))
        click.echo(f"barnraise: job {row.job} on {where}: {printable(response.sentence)}", err=True)
    click.echo(
        f"barnraise: job {row.job} wrote {counted(count, 'file')} in {os.path.relpath(target)}", err=True
    )
    return 0
