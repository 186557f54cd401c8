"""Blocking recovery: workers without the state receive it while all others wait."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from barnraise.checkpoint.serialization import FlatState
from barnraise.core.errors import CollectiveError, ProtocolError, RunError
from barnraise.core.units import counted
from barnraise.training.group.interface import GroupManager
from barnraise.training.recovery.state_transfer import receive_state, send_state
from barnraise.training.state.training_state import TrainingState

log = logging.getLogger("barnraise.training")

_MAX_DAMAGED = 3


class BlockingRecovery:
    """State transfer within the training group; a damaged state is sent again."""

    def __init__(self, manager: GroupManager, state: TrainingState) -> None:
        self._manager = manager
        self._state = state
        self._damaged = 0  # transfers in a row

    def transfer(self, done: int, donors: Sequence[int], receivers: Sequence[int]) -> FlatState | None:
        """Send or receive the state. Return it if this worker is a receiver, else None.

        All workers call this with the same ``donors`` and ``receivers``.
        """
        group, rank = self._manager.group, self._manager.rank
        if receivers and rank in donors:
            level = logging.INFO if self._manager.is_first_start else logging.WARNING
            count = counted(len(receivers), "joining worker")
            log.log(level, "training is paused while the state is sent to %s", count)
            send_state(group, rank, self._state.flatten(done), donors, receivers)
        if rank not in receivers:
            return None
        try:
            parts = receive_state(group, donors, self._state.max_bytes)
        except ProtocolError as error:
            self._damaged += 1
            if self._damaged >= _MAX_DAMAGED:
                hint = "Test this machine's memory, and install the same Barnraise version on all machines."
                raise RunError(f"{error.message}, {_MAX_DAMAGED} times in a row", hint=hint) from error
            group.abort()  # the donors believe that it was received
            raise CollectiveError(error.message) from error
        self._damaged = 0
        return parts
