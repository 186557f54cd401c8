"""Comparison of runs: facts that can be compared, and the names of those that differ. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.history.sentences import duration
from barnraise.history.view import RunView


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
    facts["time"] = duration(view.elapsed_s) if view.elapsed_s else ""
    if view.energy_j is not None:
        facts["energy"] = energy_text(view.energy_j)
    if view.rolled_back:
        facts["rolled back"] = f"{view.rolled_back:,}"
    return {name: value for name, value in facts.items() if value}


def energy_text(joules: float | None) -> str:
    """Return an energy in kWh, or Wh if it is small."""
    if joules is None:
        return "-"
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e5 else f"{joules / 3600:.3g} Wh"
