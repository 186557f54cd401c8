"""Times in which each machine of a run trained, joined, was paused or was away. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from barnraise.history.view import CHANGE_STATES, EventView, MachineState, RunView


@dataclass(frozen=True)
class MachineSpan:
    """Time in which a machine was in one state, in seconds since 1970."""

    state: MachineState
    start: float
    end: float


def last_commit(view: RunView) -> float:
    """Return about when the last step was committed; without any step, the end of the run."""
    end = view.ended_at if view.ended_at is not None else view.at
    if not view.rates:
        return end
    last = view.rates[-1]
    later = max(0, view.step - last.step - 1) / last.steps_per_s if last.steps_per_s else 0.0
    return min(end, last.at + later)


def machine_spans(view: RunView) -> dict[str, tuple[MachineSpan, ...]]:
    """Return the times of each machine, by node; they do not overlap.

    A machine without an earlier event trains from the first step on. In a session without a step, only events
    say that a machine trains.
    """
    if view.started_at is None:
        return {}
    by_node: dict[str, list[EventView]] = defaultdict(list)
    for event in view.events:
        if event.kind in CHANGE_STATES:
            by_node[event.node].append(event)
    prepares = view.start.is_session and not view.rates
    first = view.rates[0].at if view.rates else view.started_at
    end = max(view.started_at, last_commit(view) if view.ended_at is not None and view.rates else view.at)
    return {
        machine.node: _spans(
            by_node[machine.node], max(view.started_at, min(first, end)), end, is_there=not prepares
        )
        for machine in view.machines
    }


def _spans(events: list[EventView], first: float, end: float, *, is_there: bool) -> tuple[MachineSpan, ...]:
    spans: list[MachineSpan] = []
    comes_later = bool(events) and events[0].kind in ("joining", "joined", "refused")
    state: MachineState | None = "trains" if is_there and not comes_later else None
    start = first
    for event in events:
        at = min(max(event.at, start), end)
        if state is not None and at > start:
            spans.append(MachineSpan(state, start, at))
        state, start = CHANGE_STATES[event.kind], at  # type: ignore[index]  # only changes are here
    if state is not None and end > start:
        spans.append(MachineSpan(state, start, end))
    return tuple(spans)
