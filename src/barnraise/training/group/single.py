"""A run of one: all that a session needs of a group, without anybody else in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from barnraise.core.errors import CollectiveError
from barnraise.topology.graph import TopologyGraph
from barnraise.training.gradients.reducer import PendingWork
from barnraise.training.recovery.live_recovery import RecoveryGroup


class CompletedWork:
    """The sum over one."""

    def wait(self) -> None:
        return


class SingleWorkerGroup:
    """A run of one."""

    rank, world, generation, provisional, beginning, finished = 0, 1, 0, False, True, False

    def __init__(self) -> None:
        self.on_told: Callable[[int], None] = lambda nursery: None

    def meet(self, broken: CollectiveError | None) -> None:
        return

    def newest(self) -> int:
        return 0

    def machines(self) -> tuple[str, ...]:
        return ("",)

    def survey(self) -> TopologyGraph:
        return TopologyGraph()

    def gather(self, word: bytes) -> list[bytes]:
        return [word]

    def abort(self) -> None:
        return

    def begin_sum(self, tensor: torch.Tensor) -> PendingWork:
        return CompletedWork()

    def sum_coded(self, *_: object) -> tuple[torch.Tensor, Callable[[], None]]:
        raise AssertionError("there is nobody else")

    def begin_send(self, tensor: torch.Tensor, to: int) -> PendingWork:
        raise AssertionError("there is nobody else")

    begin_receive = begin_send

    def nursery(self) -> int:
        return 0

    def nursery_opener(self, number: int) -> Callable[[], RecoveryGroup] | None:
        return None

    def await_nursery(self) -> RecoveryGroup | None:
        return None

    def nursery_broke(self) -> None:
        return

    def say_near(self) -> None:
        return

    def say_trained(self) -> None:
        return

    def say_waits(self, words: str) -> None:
        return

    def say_rests(self, nodes: Sequence[str], why: str) -> None:
        return

    def close(self) -> None:
        return
