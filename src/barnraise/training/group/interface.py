"""Interfaces between a training step and the group of workers that trains together.

`GroupManager` knows the current group. `TrainingCollectives` are the collective operations of that group.
Every collective operation may raise CollectiveError; the worker then joins the next group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from barnraise.compression import Codec, CodecRound, ErrorFeedback, FeedbackPart, PowerSGD
from barnraise.core.errors import CollectiveError
from barnraise.topology.graph import TopologyGraph


class PendingWork(Protocol):
    """An asynchronous operation that is in flight."""

    def wait(self) -> object: ...


class Encoding(NamedTuple):
    """A worker's gradients, with the codec that compresses them."""

    tensor: torch.Tensor
    codec: Codec | PowerSGD
    turn: CodecRound
    parts: Sequence[FeedbackPart]
    feedback: ErrorFeedback


class ReduceGroup(Protocol):
    """A group that can all-reduce tensors."""

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingWork:
        """Start to sum the tensor over all workers, in place."""


class CompressingGroup(Protocol):
    """A group that can all-reduce compressed tensors."""

    @property
    def world(self) -> int: ...

    def all_reduce_compressed(self, own: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the sum, and a callback that keeps the codec's error once the step is committed.

        The sum is NaN if a number of any worker is not finite.
        """


class TensorChannel(Protocol):
    """Point-to-point transfer of tensors between two workers."""

    def send_async(self, tensor: torch.Tensor, to: int) -> PendingWork: ...

    def receive_async(self, tensor: torch.Tensor, sender: int) -> PendingWork: ...


class ByteGatherer(Protocol):
    """A group that can all-gather short messages."""

    def all_gather_bytes(self, message: bytes) -> Sequence[bytes]:
        """Return every rank's message, by rank."""


class TrainingCollectives(TensorChannel, ReduceGroup, CompressingGroup, Protocol):
    """Collective operations of the group that trains together now."""

    @property
    def rank(self) -> int: ...

    @property
    def nodes(self) -> Sequence[bytes]:
        """Return the node ids of the other ranks."""

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return every rank's message, by rank."""

    def make_default(self) -> None:
        """Make this group the default group of torch.distributed, until it is closed."""

    def abort(self) -> None:
        """Fail every pending operation now. May be called from any thread."""

    def close(self) -> None:
        """Shut the group down."""


class RecoveryGroup(TensorChannel, Protocol):
    """A second process group in which joining workers receive the state while the others train."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def training_world(self) -> int:
        """Return the number of ranks that train; all later ranks are joining workers."""

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return every rank's message, by rank."""

    def close(self) -> None:
        """Shut the group down."""


class GroupManager(Protocol):
    """The current group of a worker, and its reports to the controller of the run."""

    is_first_start: bool  # a worker of this group was started with the run or with its restart
    on_next_group: Callable[[int], None]  # called with the next group's newest recovery attempt, or 0

    @property
    def group(self) -> TrainingCollectives:
        """Return the group that trains together now."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def finished(self) -> bool:
        """Return True if a worker of the run is known to have finished the script."""

    @property
    def provisional(self) -> bool:
        """Return True while this group trains without a quorum."""

    def join_next_group(self, error: CollectiveError | None) -> None:
        """Block until a group of a newer generation is connected; ``error``: why the last one failed."""

    def newest_generation(self) -> int:
        """Return the newest generation that is known here, without waiting."""

    def is_member(self, generation: int) -> bool | None:
        """Tell whether this worker is in the newest group; None if that is older than ``generation``."""

    def machines(self) -> tuple[str, ...]:
        """Return the node id of every rank."""

    def name_of(self, rank: int) -> str:
        """Return the name of the machine of a rank, for messages."""

    def survey(self) -> TopologyGraph:
        """Return the measured topology of the cluster. May be called from any thread."""

    def recovery_attempt(self) -> int:
        """Return the number of the newest recovery attempt for this group; 0 if there is none."""

    def recovery_opener(self, number: int) -> Callable[[], RecoveryGroup] | None:
        """Return a function that connects the recovery group, or None if the attempt is outdated."""

    def wait_for_recovery_group(self) -> RecoveryGroup | None:
        """Block a joining worker until its next recovery attempt. Return None once it has joined."""

    def wait_for_admission(self) -> None:
        """Block a joining worker that needs no state until the group is about to admit it."""

    def report_recovery_failed(self) -> None:
        """Report that the current recovery attempt failed, so that another one is made."""

    def report_caught_up(self) -> None:
        """Report that this joining worker is close enough to join the group."""

    def report_trained(self) -> None:
        """Report, once, that this worker has committed a step."""

    def report_waiting(self, reason: str) -> None:
        """Report what this worker waits for, as shown by `barnraise ps`; empty: for nothing."""

    def request_pause(self, nodes: Sequence[str], reason: str) -> None:
        """Propose to pause machines that slow this group down. May be called from any thread."""

    def close(self) -> None:
        """Abort recovery groups when the script ends."""
