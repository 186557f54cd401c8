"""Interface between the groups of a rank and the process that runs their operations. Torch-free.

`CommProcessClient` implements it with a process, ``barnraise.testing`` with an engine in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.messages import (
    Command,
    GroupMember,
    GroupOpened,
    OperationFailed,
    OperationFinished,
)
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.core.config import Settings

Done = Callable[[OperationFinished | OperationFailed], None]


class CommandChannel(Protocol):
    """Commands of one rank. All methods may be called from any thread."""

    settings: Settings
    member: GroupMember
    generation: int
    encryption: str
    max_wait_s: float
    """Longest timeout of a group or an operation here; longer ones are cut to it."""

    def next_id(self) -> int: ...

    def check_usable(self) -> None:
        """Raise an error if this rank cannot submit operations. Each operation calls it once, first."""

    def submit(self, command: Command, operation: int, done: Done) -> None:
        """Send a command that starts an operation; ``done`` is called once, on any thread."""

    def reserve_direct(self) -> bool: ...

    def release_direct(self) -> None: ...

    def wait_direct(self, ended: Callable[[], bool], timeout_s: float | None) -> None: ...

    def map_segment(self, segment: int, shared: SharedSegment) -> None: ...

    def unmap_segment(self, segment: int) -> None: ...

    def open_group(
        self,
        name: str,
        rank: int,
        members: tuple[GroupMember, ...],
        timeout_s: float,
        table: CostTable | None,
        generation: int,
    ) -> GroupOpened: ...

    def cancel_operation(self, operation: int, group: int) -> None:
        """Time an operation of a group out now; its reply comes as at any timeout."""

    def abort_group(self, group: int, reason: str) -> None: ...

    def close_group(self, group: int) -> None: ...

    def close_group_later(self, group: int) -> None:
        """Queue a group to be closed. Destructors call it: it takes no lock."""
