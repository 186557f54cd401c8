"""What the members of a group say once they hold the result of a step, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from barnraise.core.decoding import decode
from barnraise.core.errors import RunError
from barnraise.runs.sharding import coverage_sum
from barnraise.training.metrics import Logged

UNREADABLE = "what a member of the group says cannot be read"


class CommitVote(msgspec.Struct, frozen=True, array_like=True):
    """Of one member."""

    step: int
    digest: bytes
    newest: int  # the newest generation that it knows of
    speed: float  # samples per second
    logged: Logged
    saves: bool = False  # it is time for a checkpoint; the first member's word counts
    state: bytes = b""  # a hash of a part of its model, before the step
    samples: int = 0  # of the step
    keeps: bool = False  # it can save: the first worker of its machine, with a disk
    nursery: int = 0  # the newest attempt to heal newcomers that it knows of
    units: int = 0  # a fingerprint of those that it has computed


_decoder = msgspec.msgpack.Decoder(CommitVote)


def read_held(words: Sequence[bytes], *, step: int, units: int, mixed: bool) -> list[CommitVote]:
    """RunError if they contradict each other.

    ``units``: how many the step has. ``mixed``: members may differ in their last bits.
    """
    said = [decode(_decoder, word, UNREADABLE) for word in words]
    if {one.step for one in said} != {step}:
        raise RunError("members of one group are at different steps", hint="Report this.")
    if len({one.samples for one in said}) > 1:
        raise RunError(
            f"members count {', '.join(str(one.samples) for one in said)} samples in step {step}",
            hint="Give them the same data: a stream must yield the same items on every machine.",
        )
    if sum(one.units for one in said) % (1 << 63) != coverage_sum(range(units)):
        raise RunError(f"not every sample of step {step} was counted just once", hint="Report this.")
    states = 1 if mixed else len({one.state for one in said})
    if len({one.digest for one in said}) > 1 or states > 1:
        raise RunError(
            f"members hold different bits at step {step}",
            hint="The script may change the model differently on each. If your optimizer computes "
            "differently on their processors, call barnraise.init(mixed=True).",
        )
    return said


def is_outdated(words: Sequence[CommitVote], generation: int) -> bool:
    """Whether one of them knows of a newer group: all go there after this commit."""
    return max(word.newest for word in words) > generation
