"""Bitwise synchronization of machines whose processors or builds of torch round differently.

The all-reduced gradient has the same bits on all workers. The optimizer's result may differ in the last bit,
because kernels differ between processors and systems. A probe detects such machines.

In a mixed group one worker is the reference, and the others copy its state every few commits. They also do so
before each checkpoint and before a joining worker receives the state.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Sequence

import numpy
import torch
from blake3 import blake3
from torch.optim import Optimizer

from barnraise.checkpoint.serialization import FlatState, digest, tensor_bytes
from barnraise.training.group.interface import TrainingCollectives
from barnraise.training.recovery.state_transfer import receive_state, send_state
from barnraise.training.state.training_state import TrainingState

ADOPT_EVERY = 32
_PROBE_SIZE = 4099  # a prime, so that every kernel also runs its remainder loop
_PROBE_STEPS = 3

log = logging.getLogger("barnraise.training")


def arithmetic_of(optimizers: Sequence[Optimizer]) -> bytes:
    """Return a hash that is equal on machines whose optimizers compute the same bits."""
    key = numpy.array([7, 7], dtype=numpy.uint64)
    generator = numpy.random.Generator(numpy.random.Philox(key=key))
    numbers = generator.integers(-(1 << 20), 1 << 20, size=_PROBE_SIZE)
    start = torch.from_numpy(numbers.astype(numpy.float64)) / (1 << 20)
    # The probe is too small to find every difference between two builds of torch.
    build = f"{sys.platform} {platform.machine().lower()}"
    hasher = blake3(build.encode())
    for optimizer in optimizers:
        like = optimizer.param_groups[0]["params"][0]
        values = start.to(device=like.device, dtype=like.dtype)
        probe = torch.nn.Parameter(values.clone())
        try:
            twin = type(optimizer)([probe], **optimizer.defaults)
        except (TypeError, ValueError):  # it needs other arguments: probe the most common optimizer
            twin = torch.optim.AdamW([probe], lr=1e-3)
        for step in range(_PROBE_STEPS):
            probe.grad = values.roll(17 * step + 1)
            twin.step()
        hasher.update(tensor_bytes(probe))
    return hasher.digest(8)


class BitwiseSync:
    """Reference worker of a mixed group; ``mixed`` is decided by all workers alike.

    ``drift``: largest relative difference at the last synchronization.
    """

    def __init__(self, state: TrainingState, arithmetic: bytes) -> None:
        self.arithmetic = arithmetic
        self.mixed = False
        self.drift = 0.0
        self._state = state
        self._reference, self._name = 0, ""

    def start_group(self, reference: int, name: str, *, mixed: bool) -> None:
        """Set the reference rank of a new group, and the name of its machine."""
        if mixed and not self.mixed:
            log.warning(
                "the machines' processors or systems differ in the last bits of their results; "
                "the others copy the state of %s every %d steps",
                name,
                ADOPT_EVERY,
            )
        self._reference, self._name, self.mixed = reference, name, mixed

    def split_by_state(self, group: TrainingCollectives, done: int) -> tuple[tuple[int, ...], list[int]]:
        """Return the ranks with the reference's bits, and the others. All workers call it together."""
        digests = group.all_gather_bytes(digest(self._state.flatten(done)))
        same = tuple(rank for rank, other in enumerate(digests) if other == digests[self._reference])
        return same, [rank for rank in range(len(digests)) if rank not in same]

    def adopt(self, group: TrainingCollectives, done: int) -> None:
        """Copy the reference's state to all workers. All workers call it together."""
        donors, receivers = self.split_by_state(group, done)
        if group.rank not in receivers:
            send_state(group, group.rank, self._state.flatten(done), donors, receivers)
            return
        received = receive_state(group, donors, self._state.max_bytes)
        self.drift = _drift(self._state.flatten(done), received)
        log.info("copied the reference state of step %d; the largest difference was %.1e", done, self.drift)
        self._state.load(received, self._name)


def _drift(own: FlatState, received: FlatState) -> float:
    """Return the largest difference of two states, relative to the largest number of a tensor."""
    largest = 0.0
    for tensor, other in zip(own.tensors, received.tensors, strict=False):
        if tensor.is_floating_point() and tensor.shape == other.shape and tensor.numel():
            other = other.to(tensor.device)
            scale = float(other.abs().max()) or 1.0
            largest = max(largest, float((tensor - other).abs().max()) / scale)
    return largest
