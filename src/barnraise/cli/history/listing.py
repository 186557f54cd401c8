"""``barnraise runs``: one line for each run of which there is a record."""

from __future__ import annotations

import json
import time

import click

from barnraise.cli.tables import table
from barnraise.core.errors import BarnraiseError
from barnraise.display.source import HistorySource
from barnraise.history.sentences import duration

_SHOWN = 30


def show(*, as_json: bool) -> int:
    """Print the runs, those that changed last at the end."""
    source = HistorySource()
    names = list(source.runs())
    views = []
    for name in names if as_json else names[:_SHOWN]:
        try:
            views.append(source.view(name))
        except BarnraiseError as error:
            click.echo(f"barnraise: {error.message}", err=True)
    views.reverse()
    if as_json:
        runs = [
            {
                "run": view.run,
                "state": view.state,
                "command": view.start.command,
                "started_at": view.started_at,
                "ended_at": view.ended_at,
                "steps": view.step,
                "machines": [machine.name for machine in view.machines],
                "headline": view.headline,
            }
            for view in views
        ]
        click.echo(json.dumps({"runs": runs}, indent=2))
        return 0
    if not views:
        click.echo("There is no record of a run yet. Start one: barnraise run SCRIPT")
        return 0
    lines = [("run", "started", "took", "steps", "machines", "command", "news")]
    for view in views:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(view.started_at or 0))
        machines = ", ".join(machine.name for machine in view.machines)
        took = duration(view.elapsed_s)
        lines.append((view.run, began, took, f"{view.step:,}", machines, view.start.command, view.headline))
    click.echo(table(lines, words=(4, 5, 6)))
    return 0
