"""Summary of what a run lost and how it went on, in one or two sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from barnraise.history.sentences import counted
from barnraise.history.view import EventView, RunView

_VERBS = {"died": "died", "evicted": "was evicted"}
_RETURNS = frozenset(["joined", "recovered", "resumed"])
_MOST_NAMED = 3
_SAME_S = 30.0  # between the failure of a worker and the death that it caused


@dataclass(frozen=True)
class _Loss:
    """Loss of a machine. ``end``: its return; None if it has not come back."""

    start: EventView
    end: EventView | None


def loss_summary(view: RunView) -> str:
    """Return which machines were lost, whether they came back, and what was computed again."""
    losses = list(_losses(view))
    names = {machine.node: machine.name for machine in view.machines}
    if len(losses) > _MOST_NAMED:
        returns = sum(loss.end is not None for loss in losses)
        sentences = [f"Machines were lost {counted(len(losses), 'time')} and came back {returns:,} times."]
    else:
        sentences = [_sentence(view, loss, names.get(loss.start.node, "a machine")) for loss in losses]
    alone = list(_failures_alone(view, losses))
    if len(alone) == 1:
        sentences.append(f"{alone[0].text[:1].upper()}{alone[0].text[1:]}.")
    elif alone:
        sentences.append(f"Workers failed {counted(len(alone), 'time')}.")
    if view.rolled_back:
        steps = counted(view.rolled_back, view.counts)
        sentences.append(f"Training went back to an earlier {view.counts} and dropped {steps}.")
    elif sentences:
        sentences.append(f"No {view.counts} that counts was lost.")
    return " ".join(sentences)


def _losses(view: RunView) -> Iterator[_Loss]:
    for place, event in enumerate(view.events):
        if event.kind in _VERBS:
            later = (each for each in view.events[place + 1 :] if each.node == event.node)
            change = next((each for each in later if each.kind in _RETURNS or each.kind in _VERBS), None)
            yield _Loss(event, change if change is not None and change.kind in _RETURNS else None)


def _sentence(view: RunView, loss: _Loss, name: str) -> str:
    start = f"{name} {_VERBS[loss.start.kind]}{_at(view, loss.start)}"
    if loss.end is None:
        return (
            f"{start} and has not come back." if view.ended_at is None else f"{start} and did not come back."
        )
    return f"{start} and came back{_at(view, loss.end)}."


def _at(view: RunView, event: EventView) -> str:
    return f" at {view.counts} {event.step:,}" if event.step is not None else ""


def _failures_alone(view: RunView, losses: list[_Loss]) -> Iterator[EventView]:
    """Yield the failures of workers that are not told by the loss of their machine."""
    for event in view.events:
        reasons = (
            loss.start.node == event.node and abs(loss.start.at - event.at) < _SAME_S for loss in losses
        )
        if event.kind == "failure" and not any(reasons):
            yield event
