"""Interface to a parameter server (the hub): what a session sends to it and receives from it.

A group of one or more machines trains the samples of a lease in its own exact steps. Then it sends the
change of its parameters, and receives the parameters that the hub has aggregated from all groups.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class ParameterEntry(NamedTuple):
    """One tensor within the flat vector of all exchanged parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ModelSpec(NamedTuple):
    """Model and data facts that must be equal in all groups, including the order of samples."""

    layout: tuple[ParameterEntry, ...]
    samples: int  # of an epoch
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool


class SampleRange(NamedTuple):
    """Positions ``first`` to ``last`` (excluded) of an epoch's order."""

    epoch: int
    first: int
    last: int


class LeasedWork(NamedTuple):
    """The samples that this group trains until the next exchange; empty if the training is complete."""

    spans: tuple[SampleRange, ...]
    covered: int  # samples that all groups together have trained
    members: int  # groups that train at the same time
    token: bytes = b""  # with it another process can continue the lease
    rate_factor: float = 1.0  # that the script's learning rates are multiplied with


class RoundUpdate(NamedTuple):
    """The result of a lease, as a group sends it."""

    change: torch.Tensor  # parameters before minus parameters after, flat float32
    samples: int
    loss: float | None
    speed: float  # samples per second; 0: unknown


class ParameterServer(Protocol):
    """Client interface to a hub. Calls block, and report what they wait for."""

    def begin(self, spec: ModelSpec, state: torch.Tensor) -> LeasedWork:
        """Join the training and fill ``state`` (flat float32) with the hub's parameters.

        If the hub has none yet and this member may start the training, ``state`` is sent to it.
        """

    def exchange(self, update: RoundUpdate, state: torch.Tensor) -> LeasedWork:
        """Send an update, fill ``state`` with the next version, and return the next lease."""

    def continue_lease(self, spec: ModelSpec, lease: LeasedWork) -> None:
        """Resume a lease that another process of this group received."""
