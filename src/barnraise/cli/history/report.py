"""``barnraise runs history``: the summary and the events of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import msgspec

from barnraise.cli.tables import table
from barnraise.core.sanitize import printable
from barnraise.display.comparison import energy_text
from barnraise.display.source import HistorySource
from barnraise.history.sentences import counted, duration
from barnraise.history.view import RunView


def show(*, run: str, as_json: bool) -> int:
    """Print the history of a run."""
    source = HistorySource()
    view = source.view(source.find(run))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(view), indent=2).decode())
    else:
        click.echo("\n".join(printable(line, also="\n") for line in report_lines(view)))
    return 0


def report_lines(view: RunView) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{view.run}: {view.headline}"
    yield ""
    yield table([(f"{name}:", text) for name, text in summary(view)], words=(1,))
    if view.machines:
        yield ""
        rows = [("machine", "state", "device", "share", "energy")]
        for machine in view.machines:
            share = f"{machine.share:.0%}" if machine.share is not None else "-"
            energy = energy_text(machine.energy_j)
            rows.append((machine.name, machine.state, machine.device or "-", share, energy))
        yield table(rows, words=(2,))
    if view.phases:
        yield ""
        phases = [("of a step", "measured", "predicted")]
        phases += [(phase.name, _ms(phase.measured_s), _ms(phase.predicted_s)) for phase in view.phases]
        yield table(phases)
    if view.events:
        yield ""
        events = [("time", "step", "event")]
        for event in view.events:
            at = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at))
            events.append((at, str(event.step) if event.step is not None else "", event.text))
        yield table(events, wraps=True)


def summary(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield the facts of a run: a name and a text for each."""
    if view.start.command:
        yield "command", view.start.command
    if view.started_at is not None:
        yield "started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.started_at))
    yield "took", duration(view.elapsed_s)
    if view.step:
        total = f" of {view.total_steps:,}" if view.total_steps else ""
        yield "steps", f"{view.step:,}{total}"
    for curve in view.curves:
        if curve.newest is not None:
            yield f"last {curve.name}", f"{curve.newest:.6g}"
    if view.samples_per_s:
        step_s = f" ({view.step_s:.3g} s a step)" if view.step_s else ""
        yield "speed", f"{view.samples_per_s:.4g} samples/s{step_s}"
    if view.eta_s is not None:
        yield "left", f"about {duration(view.eta_s)}"
    if view.energy_j is not None:
        yield "energy", energy_text(view.energy_j)
    if view.rolled_back:
        yield "rolled back", f"{counted(view.rolled_back, 'step')} that do not count"
    if view.missing:
        yield "missing", f"{counted(view.missing, 'step')} that no known log has"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g} ms"
