"""The state for members who lack it, while all others wait; what comes damaged is sent again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from barnraise.checkpoint.serialization import FlatState
from barnraise.core.errors import CollectiveError, ProtocolError, RunError
from barnraise.core.units import counted
from barnraise.training.group.manager import GroupManager
from barnraise.training.recovery.state_transfer import give_state, receive_state
from barnraise.training.state.training_state import TrainingState

log = logging.getLogger("barnraise.training")

_MOST_DAMAGED = 3


class BlockingRecovery:
    """Of one member."""

    def __init__(self, circle: GroupManager, state: TrainingState) -> None:
        self._circle = circle
        self._state = state
        self._damaged = 0  # in a row

    def share(self, done: int, donors: Sequence[int], fresh: Sequence[int]) -> FlatState | None:
        """What came, if this member lacked it. All call it, with the same ``donors`` and ``fresh``."""
        mine = self._circle.rank
        if fresh and mine in donors:
            level = logging.INFO if self._circle.beginning else logging.WARNING
            log.log(level, "training waits while the state is sent to %s", counted(len(fresh), "newcomer"))
            give_state(self._circle, mine, self._state.parts(done), donors, fresh)
        if mine not in fresh:
            return None
        try:
            found = receive_state(self._circle, donors, self._state.most_bytes)
        except ProtocolError as error:
            self._damaged += 1
            if self._damaged >= _MOST_DAMAGED:
                hint = "Test this machine's memory, and install the same Barnraise version on all machines."
                raise RunError(f"{error.message}, {_MOST_DAMAGED} times in a row", hint=hint) from error
            self._circle.abort()  # the others believe that it came
            raise CollectiveError(error.message) from error
        self._damaged = 0
        return found
