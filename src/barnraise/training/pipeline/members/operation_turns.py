"""Turns of operations in a new group: which operation the members perform next. Pure.

Scripts call `run.save` and the like between two steps, on all workers. A worker that has just joined did not
run that part of the script. A failure may hit some workers before and others after such a call. So in a new
group each member first announces its next operation. Those that come before the next step are performed
first, with the help of all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

OperationKind = Literal["step", "save", "gather"]


class NextOperation(msgspec.Struct, frozen=True, array_like=True):
    """Operation that a member is about to perform. ``number``: of those since its newest step."""

    kind: OperationKind
    number: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


class Turn(NamedTuple):
    """Operation that all members perform now. ``callers``: the ranks whose scripts call it now.

    ``number``: of those since the newest step.
    """

    kind: OperationKind
    callers: tuple[int, ...]
    number: int = 0


def choose_turn(announced: Sequence[NextOperation]) -> Turn:
    """Return the next operation of a group; ``announced``: by rank.

    The step comes last, and all take part in it.
    """
    earlier = [each for each in announced if each.kind != "step"]
    if not earlier:
        return Turn("step", tuple(range(len(announced))))
    first = min(earlier, key=lambda each: (each.number, each.kind))
    callers = tuple(rank for rank, each in enumerate(announced) if each == first)
    return Turn(first.kind, callers, first.number)
