"""``barnraise runs compare``: a table of what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from barnraise.cli.history.report import energy_text
from barnraise.cli.tables import table
from barnraise.core.errors import RunError
from barnraise.display.source import HistorySource
from barnraise.history.sentences import duration
from barnraise.history.view import RunView


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


def differing(facts: Sequence[dict[str, str]]) -> list[str]:
    """Return the names of the facts that are not equal in all runs, in their order."""
    names = dict.fromkeys(name for fact in facts for name in fact)
    return [name for name in names if len({fact.get(name) for fact in facts}) > 1]


def facts_of(view: RunView) -> dict[str, str]:
    """Return what can be compared of a run, by name, in the order of the table."""
    facts = {
        "command": view.start.command,
        **{f"--{name}": value for name, value in view.start.options},
        **dict(view.start.environment),
        "machines": ", ".join(machine.name for machine in view.machines),
        "plan": ", ".join(dict.fromkeys(plan.name for plan in view.plans)),
        "batch": f"{view.batch:,}" if view.batch else "",
        "state": view.state,
        "steps": f"{view.step:,}",
    }
    for curve in view.curves:
        if curve.newest is not None:
            facts[f"last {curve.name}"] = f"{curve.newest:.6g}"
        if curve.lowest is not None:
            facts[f"lowest {curve.name}"] = f"{curve.lowest:.6g}"
    if view.samples_per_s:
        facts["samples/s"] = f"{view.samples_per_s:.4g}"
    if view.step_s:
        facts["step"] = f"{view.step_s * 1000:.4g} ms"
    facts["time"] = duration(view.elapsed_s)
    if view.energy_j is not None:
        facts["energy"] = energy_text(view.energy_j)
    if view.rolled_back:
        facts["rolled back"] = f"{view.rolled_back:,}"
    return {name: value for name, value in facts.items() if value}
