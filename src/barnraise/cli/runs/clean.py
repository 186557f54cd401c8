"""``barnraise clean``: shows the unneeded files of this machine, asks, and removes them."""

from __future__ import annotations

import click
from msgspec.structs import replace

from barnraise.agent_client.cluster_requests import CleanRequest, CleanResponse
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.cluster.members import confirm
from barnraise.cli.tables import table
from barnraise.cli.terminal import wrapped
from barnraise.core.units import counted, format_size

_CLEAN_S = 600.0  # a large disk takes a while
_RECENT = "Files that were used within the last hour always stay."
_WRITTEN = "What their scripts wrote goes, too. Fetch it before: barnraise attach RUN"


def clean(*, run: str, everything: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Remove what is not needed, or one run, after the user has seen it and agreed."""
    question = CleanRequest(run, everything)
    candidates = ask(question, CleanResponse, timeout_s=_CLEAN_S)
    if dry_run or not candidates.rows:
        print_json(candidates) if as_json else click.echo(describe(candidates))
        return 0
    if not as_json:
        click.echo(describe(candidates))
    confirm("Remove this?", yes)
    agreed = tuple(row.key for row in candidates.rows)
    done = ask(replace(question, agreed=agreed), CleanResponse, timeout_s=_CLEAN_S)
    if as_json:
        print_json(done)
        return 0
    for row in candidates.rows:
        if row not in done.rows and row.key not in {removed.key for removed in done.rows}:
            click.echo(f"Kept {row.key}, which is in use now.")
    click.echo(f"Freed {format_size(done.freed)}.")
    return 0


def describe(candidates: CleanResponse) -> str:
    """Describe what can be removed, what is lost with it, and what stays."""
    lines = []
    if candidates.rows:
        rows = [("to remove", "size", "why")]
        rows += [(row.key, format_size(row.bytes), row.why) for row in candidates.rows]
        lines += [table(rows, words=(0,), wraps=True), ""]
        lines += [wrapped(f"{row.lost[:1].upper()}{row.lost[1:]}.") for row in candidates.rows if row.lost]
        if any(row.kind == "run" for row in candidates.rows):
            lines.append(wrapped(_WRITTEN))
        lines.append(f"In all: {format_size(sum(row.bytes for row in candidates.rows))}")
    else:
        lines.append(wrapped(f"There is nothing to remove. {_RECENT}"))
    kept = [row for row in candidates.kept if row.why != "another run was named"]
    if kept:
        names = ", ".join(f"{row.name} ({row.why})" for row in kept)
        lines.append(wrapped(f"{counted(len(kept), 'run')} will be kept: {names}"))
    return "\n".join(lines)
