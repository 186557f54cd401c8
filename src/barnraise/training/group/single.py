"""Group and group manager of a worker that trains alone: every collective operation is a no-op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from barnraise.core.errors import CollectiveError
from barnraise.topology.graph import TopologyGraph
from barnraise.training.group.interface import PendingWork, RecoveryGroup, TrainingCollectives


class CompletedWork:
    """An operation of a single worker, which is complete at once."""

    def wait(self) -> None:
        return


class SingleWorkerGroup:
    """A group of one worker."""

    rank, world = 0, 1
    nodes: Sequence[bytes] = ()

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingWork:
        """Leave the tensor as it is: the sum over one worker."""
        return CompletedWork()

    def all_reduce_compressed(self, *_: object) -> tuple[torch.Tensor, Callable[[], None]]:
        raise AssertionError("a single worker has no other workers")

    def send_async(self, tensor: torch.Tensor, to: int) -> PendingWork:
        raise AssertionError("a single worker has no other workers")

    receive_async = send_async

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return this worker's own message."""
        return [message]

    def make_default(self) -> None:
        raise AssertionError("a single worker has no other workers")

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


class SingleWorkerManager:
    """Group manager of a run with one worker, which never changes its group."""

    rank, world, generation = 0, 1, 0
    provisional, is_first_start, finished = False, True, False

    def __init__(self) -> None:
        self.on_next_group: Callable[[int], None] = lambda attempt: None
        self.group: TrainingCollectives = SingleWorkerGroup()

    def join_next_group(self, error: CollectiveError | None) -> None:
        return

    def newest_generation(self) -> int:
        return 0

    def is_member(self, generation: int) -> bool | None:
        return True

    def machines(self) -> tuple[str, ...]:
        return ("",)

    def name_of(self, rank: int) -> str:
        return "this machine"

    def survey(self) -> TopologyGraph:
        return TopologyGraph()

    def recovery_attempt(self) -> int:
        return 0

    def recovery_opener(self, number: int) -> Callable[[], RecoveryGroup] | None:
        return None

    def wait_for_recovery_group(self) -> RecoveryGroup | None:
        return None

    def wait_for_admission(self) -> None:
        return

    def report_recovery_failed(self) -> None:
        return

    def report_caught_up(self) -> None:
        return

    def report_trained(self) -> None:
        return

    def report_waiting(self, reason: str) -> None:
        return

    def request_pause(self, nodes: Sequence[str], reason: str) -> None:
        return

    def close(self) -> None:
        return
