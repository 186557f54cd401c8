"""Machines that compute differently: one member's bits count, and the others adopt them now and then.

The sum of a step has the same bits on all members, whatever their processors. What an optimizer makes of it
has not: the kernels of two generations of processors already differ in the last bit. A probe tells. In a
mixed group the first member that has the state is the anchor; the others go on with their own bits, take over
the anchor's every few commits, before any checkpoint and before newcomers get the state, and say how far off
they were.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy
import torch
from blake3 import blake3
from torch.optim import Optimizer

from barnraise.checkpoint.serialization import FlatState, as_bytes, digest
from barnraise.training.group.manager import GroupManager
from barnraise.training.recovery.state_transfer import give_state, receive_state
from barnraise.training.state.training_state import TrainingState

ADOPT_EVERY = 32
_PROBE = 4099  # numbers: a prime, so that no kernel gets by without its remainder loop
_STEPS = 3

log = logging.getLogger("barnraise.training")


def arithmetic_of(optimizers: Sequence[Optimizer]) -> bytes:
    """The same on machines whose optimizers make the same bits of the same numbers."""
    key = numpy.array([7, 7], dtype=numpy.uint64)
    numbers = numpy.random.Generator(numpy.random.Philox(key=key)).integers(-(1 << 20), 1 << 20, size=_PROBE)
    start = torch.from_numpy(numbers.astype(numpy.float64)) / (1 << 20)
    hasher = blake3()
    for optimizer in optimizers:
        like = optimizer.param_groups[0]["params"][0]
        values = start.to(device=like.device, dtype=like.dtype)
        probe = torch.nn.Parameter(values.clone())
        try:
            twin = type(optimizer)([probe], **optimizer.defaults)
        except (TypeError, ValueError):  # it wants something else: the most usual one stands for it
            twin = torch.optim.AdamW([probe], lr=1e-3)
        for step in range(_STEPS):
            probe.grad = values.roll(17 * step + 1)
            twin.step()
        hasher.update(as_bytes(probe))
    return hasher.digest(8)


class BitwiseSync:
    """Of one member; ``mixed`` is known to all alike, from the words with which a group begins."""

    def __init__(self, state: TrainingState, arithmetic: bytes) -> None:
        self.arithmetic = arithmetic
        self.mixed = False
        self.drift = 0.0  # the largest difference of the last adoption, relative to the largest number
        self._state = state
        self._anchor = 0

    def begin(self, anchor: int, *, mixed: bool) -> None:
        """A new group: whose bits count in it."""
        if mixed and not self.mixed:
            log.warning(
                "the machines' processors differ in the last bits of what they compute: the state of member "
                "%d counts, the others adopt it every %d steps",
                anchor,
                ADOPT_EVERY,
            )
        self._anchor, self.mixed = anchor, mixed

    def differing(self, circle: GroupManager, done: int) -> tuple[tuple[int, ...], list[int]]:
        """Who has the anchor's bits, and who has not. All members ask together."""
        said = circle.gather(digest(self._state.parts(done)))
        same = tuple(rank for rank, word in enumerate(said) if word == said[self._anchor])
        return same, [rank for rank in range(len(said)) if rank not in same]

    def adopt(self, circle: GroupManager, done: int) -> None:
        """All members together; afterwards all have the same bits."""
        donors, others = self.differing(circle, done)
        if circle.rank not in others:
            give_state(circle, circle.rank, self._state.parts(done), donors, others)
            return
        found = receive_state(circle, donors, self._state.most_bytes)
        self.drift = _drift(self._state.parts(done), found)
        log.info("adopted the anchor's state of step %d; the largest difference was %.1e", done, self.drift)
        self._state.load(found)


def _drift(mine: FlatState, found: FlatState) -> float:
    most = 0.0
    for one, other in zip(mine.tensors, found.tensors, strict=False):
        if one.is_floating_point() and one.shape == other.shape and one.numel():
            other = other.to(one.device)
            scale = float(other.abs().max()) or 1.0
            most = max(most, float((one - other).abs().max()) / scale)
    return most
