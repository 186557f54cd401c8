"""The display of `barnraise up`: redrawn only when something changed, with the latest events below."""

from __future__ import annotations

import asyncio

import click

from barnraise.agent.api.cluster_api import status
from barnraise.agent.daemon import Agent
from barnraise.cli import terminal
from barnraise.cli.cluster.status import describe
from barnraise.cli.tables import shortened

_LOOK_S = 1.0
_EVENTS = 6


class Display:
    """Owns the lower part of the terminal while the agent runs in the foreground."""

    def __init__(self) -> None:
        self._shown = ""
        self._task: asyncio.Task[None] | None = None

    def attach(self, agent: Agent) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow(agent))

    async def _follow(self, agent: Agent) -> None:
        while not agent.stop_requested.is_set():
            self._show(agent)
            try:
                await asyncio.wait_for(agent.stop_requested.wait(), _LOOK_S)
            except TimeoutError:
                pass
        click.echo("Saying goodbye ...")

    def _show(self, agent: Agent) -> None:
        cluster_status = status(agent)
        text = "\n".join(
            [
                describe(cluster_status, calm=True),
                "",
                *list(agent.events)[-_EVENTS:],
                "",
                "Ctrl-C stops the agent. `barnraise pair` in another terminal adds a machine.",
            ]
        )
        # A line that the terminal breaks would be two, and the next picture would begin too low.
        text = "\n".join(shortened(line, terminal.columns() - 1) for line in text.splitlines())
        if text != self._shown:
            terminal.redraw(text, self._shown.count("\n") + 1 if self._shown else 0)
            self._shown = text


def print_events(agent: Agent) -> None:
    """Print one line per event, for output that is not a terminal."""
    for event in agent.events:
        click.echo(event)
    agent.on_event = click.echo
