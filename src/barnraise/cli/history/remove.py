"""``barnraise runs remove``: removes the records of runs on all machines of owners."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.history.requests import HistoryRemoveRequest
from barnraise.cli.agent_call import ask
from barnraise.cli.cluster.members import confirm
from barnraise.core.units import counted, format_size
from barnraise.display.source import HistorySource
from barnraise.history.sentences import listed


def remove(*, runs: Sequence[str], yes: bool, as_json: bool) -> int:
    """Remove the records of these runs, after the user has agreed."""
    source = HistorySource()
    names = tuple(dict.fromkeys(source.find(run) for run in runs))
    size = sum(log.size for run, logs in source.runs().items() if run in names for log in logs)
    if not as_json:
        click.echo(f"{counted(len(names), 'record')} ({format_size(size)} here): {listed(names)}")
    confirm("Remove this from all machines of owners?", yes)
    ask(HistoryRemoveRequest(names), RequestDone)
    if as_json:
        click.echo(json.dumps({"removed": list(names)}, indent=2))
    else:
        click.echo("Removed here. Machines that are off remove it when they are back.")
    return 0
