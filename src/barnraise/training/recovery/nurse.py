"""When members begin to heal newcomers: after a commit at which all of them know of the same ones.

And what a newcomer does until it is let in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from barnraise.checkpoint.serialization import FlatState
from barnraise.core.errors import CollectiveError, ProtocolError
from barnraise.training.group.manager import GroupManager
from barnraise.training.recovery.live_recovery import CommittedStep, JoiningWorker, StateDonor

log = logging.getLogger("barnraise.training")

_FAILURES_SAID = 5


class RecoveryCoordinator:
    """Of one member."""

    def __init__(self, circle: GroupManager) -> None:
        self._circle = circle
        self._nursing: StateDonor | None = None
        self._number = 0
        self._told: set[int] = set()  # the nurseries that members knew of at the last commit
        circle.on_told = self._told_in_meeting

    def begin_group(self) -> None:
        self._told = {0}

    def note(self, result: Callable[[], CommittedStep]) -> None:
        """A commit, for those who follow."""
        if self._nursing is not None:
            self._nursing.note(result())

    def hear(self, told: set[int]) -> bool:
        """What members know of at this commit; whether that has changed."""
        has_changed, self._told = told != self._told, told
        return has_changed

    def nurse(self, parts: Callable[[], FlatState], done: int) -> None:
        """Begin, or again, with the state as it was committed."""
        if len(self._told) != 1 or self._told == {self._number}:
            return
        (number,) = self._told
        if not number:
            if self._nursing is not None and self._circle.newest() <= self._circle.generation:
                self._nursing.finish()  # they are gone
                self._nursing = None
            return
        opener = self._circle.nursery_opener(number)
        if opener is None:
            return  # there is a newer attempt already
        self._number = number
        if self._nursing is None or self._nursing.is_stale:
            self._nursing = StateDonor(parts(), done)
        self._nursing.begin(opener)

    def _told_in_meeting(self, nursery: int) -> None:
        if self._nursing is not None:
            self._nursing.finish()
            self._nursing = self._nursing if nursery else None


def be_nursed(
    circle: GroupManager,
    newcomer: JoiningWorker,
    most_bytes: int,
    load: Callable[[FlatState], int],
    follow: Callable[[CommittedStep], None],
) -> None:
    """Get the state, and follow the others, who go on meanwhile."""
    failures = 0
    while (room := circle.await_nursery()) is not None:
        try:
            newcomer.be_nursed(room, most_bytes, load, follow, circle.say_near)
        except (CollectiveError, ProtocolError) as error:
            failures += 1
            level = logging.WARNING if failures % _FAILURES_SAID == 0 else logging.INFO
            log.log(level, "the state did not come, which is tried again: %s", error.message)
            circle.nursery_broke()
        finally:
            room.close()
