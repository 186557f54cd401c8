"""Commands of ``barnraise runs`` with their options, and the functions that run them. Light to import."""

from __future__ import annotations

import click

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group("runs", invoke_without_command=True)
@_as_json
@click.pass_context
def runs_group(context: click.Context, as_json: bool) -> int | None:
    """List the runs of which there is a record, also those that ended long ago.

    \b
      barnraise runs                      list them
      barnraise runs history RUN          what happened in a run
      barnraise runs compare RUN RUN      what differs between runs
      barnraise runs remove RUN           remove a record on all machines
    """
    if context.invoked_subcommand is not None:
        return None
    from barnraise.cli.history import listing

    return listing.show(as_json=as_json)


@runs_group.command("history")
@click.argument("run")
@_as_json
def _history(run: str, as_json: bool) -> int:
    """Print what happened in RUN: a summary, its machines, and the events with their times."""
    from barnraise.cli.history import report

    return report.show(run=run, as_json=as_json)


@runs_group.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@_as_json
def _compare(runs: tuple[str, ...], as_json: bool) -> int:
    """Print a table of what differs between runs: options, machines, results, speed and energy."""
    from barnraise.cli.history import compare

    return compare.show(runs=runs, as_json=as_json)


@runs_group.command("remove")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_as_json
def _remove(runs: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """Remove the records of these runs from all machines of owners. Checkpoints and results stay.

    A machine that is off removes them when it is back.
    """
    from barnraise.cli.history import remove

    return remove.remove(runs=runs, yes=yes, as_json=as_json)
