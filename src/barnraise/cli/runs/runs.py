"""``barnraise ps``, ``logs``, ``stop``, ``attach`` and ``accept``: runs, from any machine of the cluster."""

from __future__ import annotations

import time
from pathlib import Path

import click

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.run_requests import (
    AcceptRunRequest,
    AcceptRunResponse,
    RunRow,
    RunsRequest,
    RunsResponse,
    StopRunRequest,
    WatchRequest,
    WatchResponse,
    WorkerRow,
)
from barnraise.artifacts import ArtifactStore, store_directory
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.consent import ClusterReach, OfferedData, OfferedRun, agrees
from barnraise.cli.runs import run as running
from barnraise.cli.runs.failure_text import news_of
from barnraise.cli.runs.progress.progress_line import final_parts, join_parts, progress_parts
from barnraise.cli.runs.progress.status_view import StatusView
from barnraise.cli.runs.run_view import RunOutput, watch
from barnraise.cli.tables import table
from barnraise.cli.terminal import columns, wrapped
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import RunError
from barnraise.core.sanitize import coloured, printable
from barnraise.core.units import counted
from barnraise.history.outcome import end_state
from barnraise.sandbox.choice import find_sandbox, no_sandbox

_SHOWN = 20
_MAX_NAME = 64


def ps(*, run: str | None, everything: bool, as_json: bool) -> int:
    """List the runs, one line each, or show one run in full."""
    if run is not None:
        response = ask(WatchRequest(run=run, wait_s=0), WatchResponse)
        if as_json:
            print_json(response)
        else:
            click.echo(describe(response))
        return 0
    listed = ask(RunsRequest(), RunsResponse)
    if as_json:
        print_json(listed)
        return 0
    active = [row for row in listed.runs if row.phase != "ended"]
    ended = [row for row in listed.runs if row.phase == "ended"]
    rows = [*(ended if everything else ended[-_SHOWN:]), *active]
    if not rows:
        click.echo("No run yet. Start one: barnraise run SCRIPT")
        return 0
    lines = [("run", "state", "began", "machines", "command", "news")]
    lines += [
        (row.run, _state(row), _ago(row.at), str(len(row.machines)), " ".join(row.command), news_of(row))
        for row in rows
    ]
    click.echo(table(lines, words=(4, 5)))
    return 0


def logs(*, run: str, rank: int | None, all_ranks: bool, follow: bool) -> int:
    """Print the output of the workers so far; with ``follow``, until the run stops."""
    view = RunOutput(all_ranks, status=StatusView(shows_bars_only=True))
    response = ask(WatchRequest(run=run, wait_s=0), WatchResponse)
    try:
        while True:
            shown = _shown_workers(response, rank, all_ranks=all_ranks)
            positions = view.following.wanted(dict.fromkeys(shown, 0))
            wait_s = 1.0 if follow else 0.0
            response = ask(
                WatchRequest(run=run, version=response.row.version, follow=positions, wait_s=wait_s),
                WatchResponse,
            )
            view.print_heard(response)
            is_whole = all(heard.whole for heard in response.heard)
            if is_whole and (not follow or response.row.phase == "ended"):
                view.close()
                view.print_bars(response)
                return 0
            if follow:
                view.show_status(response)
    finally:
        view.close()


def newest_run(*, active: bool = False) -> str:
    """Return the name of the newest run; with ``active``, of those that have not ended. Print the name."""
    runs = [row for row in ask(RunsRequest(), RunsResponse).runs if not active or row.phase != "ended"]
    if not runs:
        kind = "active run" if active else "run"
        raise RunError(f"there is no {kind}", hint="Start one: barnraise run train.py")
    newest = max(runs, key=lambda row: row.at)
    click.echo(f"barnraise: run {newest.run}", err=True)
    return newest.run


def _shown_workers(response: WatchResponse, rank: int | None, *, all_ranks: bool) -> list[int]:
    """Return the numbers of the workers whose output is printed.

    Without a rank: the first main worker of the run, and the main worker now.
    """
    if all_ranks:
        return [worker.number for worker in (*response.past, *response.workers)]
    if rank is None:
        return [0, *(worker.number for worker in response.workers if worker.rank == 0)]
    numbers = [worker.number for worker in response.workers if worker.rank == rank]
    if not numbers and response.workers:
        raise RunError(
            f"run {response.row.run} has no rank {rank} now",
            hint=f"Print the output of every worker: barnraise logs {response.row.run} --all",
        )
    return numbers


def stop(*, run: str, hard: bool, as_json: bool) -> int:
    done = ask(StopRunRequest(run, hard=hard), RequestDone)
    if as_json:
        print_json(done)
    else:
        click.echo(done.sentence)
    return 0


def attach(*, run: str, all_ranks: bool) -> int:
    """Watch a run that goes on after Ctrl-C."""
    row = watch(run, all_ranks=all_ranks, stops=False)
    store = ArtifactStore(store_directory(state_directory(load_settings())))
    return running.conclude(row, store, Path.cwd(), all_output=all_ranks)


def accept(*, run: str, yes: bool, refuse: bool, is_sandboxed: bool, as_json: bool) -> int:
    """Show everything that a run would do on this machine, then ask."""
    question = AcceptRunRequest(run, no=refuse, sandbox=is_sandboxed)
    response = ask(question, AcceptRunResponse, timeout_s=120.0)
    if as_json and not yes:
        print_json(response)
        return 0
    if refuse or response.accepted:
        click.echo(printable(response.sentence))
        return 0
    if yes and is_sandboxed and not response.image:
        sandbox = find_sandbox()
        if not sandbox.is_possible:
            raise no_sandbox(sandbox)  # there is no question that would say so
    if not as_json and not agrees(offered_run(response), "Let it run?", yes=yes):
        click.echo("Nothing was accepted.")
        return 1
    request = AcceptRunRequest(response.run, yes=True, order=response.order, sandbox=is_sandboxed)
    response = ask(request, AcceptRunResponse, timeout_s=120.0)
    if as_json:
        print_json(response)
    else:
        click.echo(printable(response.sentence))
    return 0


def offered_run(response: AcceptRunResponse) -> OfferedRun:
    """Return what the user of this machine is asked about."""
    sender = printable(response.by, limit=_MAX_NAME)
    return OfferedRun(
        heading=f"{sender} ({response.by_id}) asks this machine to take part in run {response.run}. "
        "It would run, as you:",
        command=response.command,
        files=response.files,
        file_count=response.file_count,
        file_bytes=response.bytes,
        variables=response.variables,
        data=[
            OfferedData(row.name, row.path, row.files, row.bytes, row.is_model, row.version)
            for row in response.data
        ],
        image=response.image,
        packages=response.packages,
        package_count=response.package_count,
        reach=ClusterReach(response.role, response.machines),
        sandbox=response.sandbox,
    )


def describe(response: WatchResponse) -> str:
    row = response.row
    lines = [wrapped(f"run {row.run}: {_state(row)}, {row.sentence}")]
    lines.append(wrapped(f"python {' '.join(row.command)}   started on {row.by}, {_ago(row.at)}"))
    if row.progress is not None:
        now = progress_parts(row.progress, len(row.machines))
        lines.append(join_parts(final_parts(row.progress) if row.phase == "ended" else now, columns()))
    if row.restarts:
        lines.append(f"{counted(row.restarts, 'restart')} so far")
    lines += [wrapped(f"{name} takes no part: {why}") for name, why in row.left_out]
    lines += [wrapped(finding) for finding in response.findings]
    if response.workers:
        workers = [
            (str(worker.rank), worker.name, worker.device, _worker(worker)) for worker in response.workers
        ]
        lines += ["", table([("rank", "machine", "device", "state"), *workers], wraps=True)]
    else:
        parts = [(part.name, part.stage, part.words) for part in response.parts]
        lines += ["", table([("machine", "state", "news"), *parts], wraps=True)]
    for failure in row.failures:
        if not failure.follows:
            heading = f"rank {failure.rank} on {failure.machine}: {failure.summary}"
            lines += ["", printable(heading), coloured(failure.tail.rstrip(), also="\n\t")]
    if row.tail and row.code and not row.failures:
        tail = coloured(row.tail.rstrip(), also="\n\t")
        lines += ["", f"last output of rank {row.failed_rank} on {row.failed_on}:", tail]
    return "\n".join(lines)


def _worker(row: WorkerRow) -> str:
    if row.state != "ended":
        return f"{row.state}, waits for {row.words}" if row.words else row.state
    return f"ended by signal {row.signal}" if row.signal else f"ended with code {row.code}"


def _state(row: RunRow) -> str:
    if row.phase != "ended":
        return row.phase
    state = end_state(row.code, was_stopped=row.was_stopped)
    return "done" if state == "ended" else state


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
