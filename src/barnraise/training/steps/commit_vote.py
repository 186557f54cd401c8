"""Commit vote: each worker's message that it holds the result of a step, and the check that all agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import RunError
from barnraise.runs.sharding import coverage_sum
from barnraise.training.metrics import Logged
from barnraise.training.state.trained_set import MOST_NAMED, check_sets

UNREADABLE = "a message of another worker cannot be read"

Names = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=MOST_NAMED)]


class CommitVote(msgspec.Struct, frozen=True, array_like=True):
    """A worker's vote on a step, sent when it holds the result."""

    step: int
    digest: bytes  # of the result
    newest_generation: int  # that the worker knows of
    speed: float  # samples per second
    logged: Logged
    checkpoint_due: bool = False  # rank 0 decides for all
    state_window: bytes = b""  # hash of a part of the model, before the step
    samples: int = 0  # of the whole step
    can_save: bool = False  # the first worker of its machine, with a disk
    recovery_attempt: int = 0  # the newest one that the worker knows of
    microbatches: int = 0  # fingerprint of those that the worker has computed
    state_set: bytes = b""  # hash of the names of the state tensors; empty if no parameter is frozen
    changed: Names = ()  # the first names that became state since `prepare`


_votes = msgspec.msgpack.Decoder(CommitVote)


def check_votes(
    messages: Sequence[bytes],
    *,
    step: int,
    microbatches: int,
    mixed: bool,
    name_of: Callable[[int], str] = "rank {}".format,
) -> list[CommitVote]:
    """Decode the votes of all ranks. Raise RunError if they contradict each other.

    ``microbatches``: how many the step has. ``mixed``: workers may differ in their last bits. ``name_of``:
    returns the name of a rank's machine.
    """
    votes = [decode(_votes, message, UNREADABLE) for message in messages]
    if {vote.step for vote in votes} != {step}:
        raise RunError("workers of one group are at different steps", hint="Report this.")
    if len({vote.samples for vote in votes}) > 1:
        raise RunError(
            f"workers count {', '.join(str(vote.samples) for vote in votes)} samples in step {step}",
            hint="Give them the same data: a stream must yield the same items on every machine.",
        )
    if sum(vote.microbatches for vote in votes) % (1 << 63) != coverage_sum(range(microbatches)):
        raise RunError(f"not every sample of step {step} was counted exactly once", hint="Report this.")
    check_sets([vote.state_set for vote in votes], [vote.changed for vote in votes], name_of)
    states = 1 if mixed else len({vote.state_window for vote in votes})
    if len({vote.digest for vote in votes}) > 1 or states > 1:
        raise RunError(
            f"workers hold different bits at step {step}",
            hint="The script may change the model differently on each. If your optimizer computes "
            "differently on their processors, call barnraise.init(mixed=True).",
        )
    return votes


def is_newer_group_known(votes: Sequence[CommitVote], generation: int) -> bool:
    """Tell whether a worker knows of a newer group, which all join after this commit."""
    return max(vote.newest_generation for vote in votes) > generation
