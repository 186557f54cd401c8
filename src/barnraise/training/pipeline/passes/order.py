"""Order of passes, sends and receives of micro-batches on each stage. Pure.

1F1B alternates forward and backward passes. A stage runs ahead by two forward passes for each stage after
it: one while the next stage computes, and one while activations travel. A receive is posted two passes
before the one that needs it, because a transfer starts when both sides are there. So transfers cost no time
beside the computation as long as each takes at most half as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Order = Literal["1F1B", "GPipe"]
ORDERS: tuple[Order, ...] = ("1F1B", "GPipe")

_RECEIVE_AHEAD = 2  # passes


class Action(NamedTuple):
    """A forward or backward pass of a micro-batch, or the transfer of its result, as torch names them."""

    kind: Literal["F", "B", "SEND_F", "SEND_B", "RECV_F", "RECV_B"]
    batch: int


def actions_of(place: int, stages: int, batches: int, order: Order) -> list[Action]:
    """Return what a stage does in order; ``place``: of the stage in the pipeline."""
    passes = _passes(place, stages, batches, order)
    posted = 0
    actions: list[Action] = []
    for number, each in enumerate(passes):
        upcoming = passes[posted : number + _RECEIVE_AHEAD + 1]
        posted += len(upcoming)
        for later in upcoming:
            actions.extend(_receives(later, place, stages))
        actions.append(each)
        actions.extend(_sends(each, place, stages))
    return actions


def _passes(place: int, stages: int, batches: int, order: Order) -> list[Action]:
    forward = [Action("F", batch) for batch in range(batches)]
    backward = [Action("B", batch) for batch in range(batches)]
    if order == "GPipe":
        return [*forward, *backward]
    ahead = min(batches, 2 * (stages - 1 - place))
    between = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
    return [*forward[:ahead], *between, *backward[batches - ahead :]]


def _receives(each: Action, place: int, stages: int) -> Iterator[Action]:
    if each.kind == "F" and place > 0:
        yield Action("RECV_F", each.batch)
    if each.kind == "B" and place < stages - 1:
        yield Action("RECV_B", each.batch)


def _sends(each: Action, place: int, stages: int) -> Iterator[Action]:
    if each.kind == "F" and place < stages - 1:
        yield Action("SEND_F", each.batch)
    if each.kind == "B" and place > 0:
        yield Action("SEND_B", each.batch)
