"""Accounts of a run: where its time went, which steps count, and how much each machine trained. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.display.charts.spans import machine_spans
from barnraise.history.sentences import counted, duration
from barnraise.history.view import MachineView, RunView

_LEAST_S = 1e-3
_LOSSES = frozenset(["died", "evicted", "left"])


@dataclass(frozen=True)
class MachineUse:
    """Use of one machine during a run. None: not measured."""

    machine: MachineView
    trained_s: float
    trained_part: float
    mean_load: float | None
    most_bytes: float | None
    highest_c: float | None
    mean_w: float | None


def machine_uses(view: RunView) -> list[MachineUse]:
    """Return the use of each machine; means and maxima are of its measurements."""
    spans = machine_spans(view)
    uses = []
    for machine in view.machines:
        samples = view.samples_of.get(machine.node, ())
        trained = sum(each.end - each.start for each in spans.get(machine.node, ()) if each.state == "trains")
        uses.append(
            MachineUse(
                machine=machine,
                trained_s=trained,
                trained_part=min(1.0, trained / view.elapsed_s) if view.elapsed_s else 0.0,
                mean_load=_mean(sample.load for sample in samples),
                most_bytes=max(_known(sample.used_bytes for sample in samples), default=None),
                highest_c=max(_known(sample.temperature_c for sample in samples), default=None),
                mean_w=_mean(sample.power_w for sample in samples),
            )
        )
    return uses


def time_parts(view: RunView) -> list[tuple[str, float]]:
    """Return the seconds of the whole run by phase; the sum is the time from start to end.

    The rest that is neither before nor after the steps went into steps that do not count, and into restarts.
    """
    phases = [(name, seconds) for name, seconds in view.phase_totals_s.items() if seconds > 0]
    rest = max(0.0, view.elapsed_s - sum(seconds for _, seconds in phases))
    before = min(rest, max(0.0, _first_begin(view) - view.started_at)) if view.started_at is not None else 0.0
    after = min(rest - before, max(0.0, _end(view) - _last_commit(view)))
    lost = rest - before - after
    parts = [
        ("before the first step", before),
        *phases,
        ("dropped steps and restarts", lost),
        ("after the last step", after),
    ]
    return [(name, seconds) for name, seconds in parts if seconds > _LEAST_S]


def _end(view: RunView) -> float:
    return view.ended_at if view.ended_at is not None else view.at


def _first_begin(view: RunView) -> float:
    """Return when the first step began; without any step, the end."""
    if not view.rates:
        return _end(view)
    first = view.rates[0]
    return first.at - (1 / first.steps_per_s if first.steps_per_s else 0.0)


def _last_commit(view: RunView) -> float:
    """Return about when the last step was committed."""
    if not view.rates:
        return _end(view)
    last = view.rates[-1]
    return last.at + max(0, view.step - last.step - 1) / last.steps_per_s if last.steps_per_s else last.at


def step_sentences(view: RunView) -> list[str]:
    """Return which steps and samples count, and what was lost."""
    noun = view.counts
    held = view.step - view.first_step - view.missing
    if view.step == view.first_step:
        return [f"No {noun} was committed.", *_recoveries(view)]
    sentences = [f"{counted(view.step - view.first_step, noun)} count, each exactly once."]
    if view.first_step:
        source = f" of run {view.start.resumes}" if view.start.resumes else ""
        sentences.append(f"The run began at {noun} {view.first_step:,}, with the state{source}.")
    if view.samples:
        sentences.append(f"They contain {counted(view.samples, 'sample')}.")
    if view.samples and view.batch:
        expected = held * view.batch
        same = "as many" if expected == view.samples else f"not {view.samples:,}"
        sentences.append(
            f"A {noun} has {counted(view.batch, 'sample')}; {held:,} × {view.batch:,} = {expected:,}, {same}."
        )
    if view.missing:
        sentences.append(
            f"{counted(view.missing, noun)} of them have no entry in any log, "
            "so their samples and times are not in this report."
        )
    sentences.extend(_recoveries(view))
    return sentences


def _recoveries(view: RunView) -> list[str]:
    losses = sum(event.kind in _LOSSES for event in view.events)
    returns = sum(event.kind in ("recovered", "resumed") for event in view.events)
    failures = sum(event.kind == "failure" for event in view.events)
    sentences = []
    if view.rolled_back:
        sentences.append(
            f"{counted(view.rolled_back, view.counts)} were computed and then dropped: "
            "training went back to an earlier state. Their samples do not count."
        )
    elif view.step > view.first_step:
        sentences.append(f"No committed {view.counts} was lost.")
    if losses or failures:
        sentences.append(
            f"A machine left or died {counted(losses, 'time')}; workers failed {counted(failures, 'time')}; "
            f"machines came back {counted(returns, 'time')}."
        )
    waiting = view.phase_totals_s.get("waiting", 0.0)
    if waiting >= 1:
        sentences.append(f"Between the steps, {duration(waiting)} went into recovery and new groups.")
    return sentences


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.fmean(known) if known else None
