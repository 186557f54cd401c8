"""Command ``watch`` with its options. Light to import."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from barnraise.cli.completion import complete_runs
from barnraise.core.errors import BarnraiseError


@click.command("watch")
@click.argument("run", required=False, shell_complete=complete_runs)
def watch_command(run: str | None) -> int:
    """Show RUN (default: the newest): machines, loss, speed, events. The keys are on the screen.

    Leaving the screen does not touch the run. Without a terminal it prints plain lines until the run ends.
    """
    from barnraise.cli.runs.runs import newest_run
    from barnraise.cli.terminal import is_terminal
    from barnraise.cli.watch.source import RunSource

    # Textual draws on standard error.
    is_screen = all(map(is_terminal, (sys.stdin, sys.stdout, sys.stderr)))
    if is_screen and find_spec("textual") is None:
        raise BarnraiseError(
            "the screen of a run needs the package textual, which is not installed",
            hint=f"Install it: {sys.executable} -m pip install textual",
        )
    source = RunSource(run or newest_run())
    first = source.look()
    if not is_screen:
        from barnraise.cli.watch.plain import follow

        follow(source, first, click.echo)
        return 0
    from barnraise.cli.watch.actions import AgentActions
    from barnraise.cli.watch.screen import WatchApp

    WatchApp(source, AgentActions(source.run), first).run()
    return 0
