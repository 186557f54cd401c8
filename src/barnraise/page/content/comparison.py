"""Comparison of runs: what was asked for, and what came of it, side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from barnraise.core.units import format_duration
from barnraise.history.sentences import duration
from barnraise.history.view import RunView

MOST_RUNS = 8
_UNKNOWN = "–"


@dataclass(frozen=True)
class ComparedRow:
    """One property of several runs. ``differs``: not all have the same value."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def compare(views: Sequence[RunView]) -> tuple[ComparedRow, ...]:
    """Return the rows of the table; names of options and values are those of any of the runs."""
    rows = [
        _row("state", [view.state for view in views]),
        _row("command", [view.start.command for view in views]),
        _row("machines", [", ".join(machine.name for machine in view.machines) for view in views]),
        _row("steps", [f"{view.step:,}" for view in views]),
        _row("batch", [f"{view.batch:,}" if view.batch else "" for view in views]),
        _row("elapsed", [duration(view.elapsed_s) for view in views]),
        _row("samples per second", [_number(view.samples_per_s) for view in views]),
        _row("time of a step", [format_duration(view.step_s) if view.step_s else "" for view in views]),
        _row("energy", [f"{view.energy_j / 3.6e6:.3g} kWh" if view.energy_j else "" for view in views]),
        _row("steps computed again", [f"{view.rolled_back:,}" for view in views]),
    ]
    for name in dict.fromkeys(curve.name for view in views for curve in view.curves):
        curves = [view.curve(name) for view in views]
        rows.append(_row(f"last {name}", [_number(curve.newest) if curve else "" for curve in curves]))
        rows.append(_row(f"lowest {name}", [_number(curve.lowest) if curve else "" for curve in curves]))
    rows.extend(_named("option", [dict(view.start.options) for view in views]))
    rows.extend(_named("software", [dict(view.start.environment) for view in views]))
    return tuple(rows)


def common_metric(views: Sequence[RunView]) -> str:
    """Return the value whose curves are compared: the one that counts in the first run that has one."""
    return next((view.metric for view in views if view.metric), "")


def _named(kind: str, values: Sequence[dict[str, str]]) -> list[ComparedRow]:
    names = sorted({name for each in values for name in each})
    return [_row(f"{kind} {name}", [each.get(name, "") for each in values]) for name in names]


def _row(name: str, values: Sequence[str]) -> ComparedRow:
    return ComparedRow(name, tuple(value or _UNKNOWN for value in values))


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value is not None else ""
