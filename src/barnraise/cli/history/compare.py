"""``barnraise runs compare``: a table of what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from barnraise.cli.tables import table
from barnraise.core.errors import RunError
from barnraise.display.comparison import differing, facts_of
from barnraise.display.source import HistorySource


def show(*, runs: Sequence[str], as_json: bool) -> int:
    """Print the facts that are not equal in all runs, one column for each run."""
    if len(runs) < 2:
        raise RunError("one run cannot be compared", hint="Name two: barnraise runs compare RUN RUN")
    source = HistorySource()
    views = [source.view(source.find(run)) for run in runs]
    facts = [facts_of(view) for view in views]
    if as_json:
        table_of = {view.run: fact for view, fact in zip(views, facts, strict=True)}
        click.echo(json.dumps({"runs": table_of, "differs": differing(facts)}, indent=2))
        return 0
    rows = [("", *(view.run for view in views))]
    rows += [(name, *(fact.get(name, "-") for fact in facts)) for name in differing(facts)]
    if len(rows) == 1:
        click.echo("Nothing that was recorded differs.")
        return 0
    click.echo(table(rows, words=range(1, len(rows[0]))))
    return 0
