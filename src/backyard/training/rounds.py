"""Local steps: within a round a member trains by itself; the mean of what all changed is applied at its end.

While a member works, the model holds its own progress and ``_other`` what was committed last; set aside, it
is the other way round, so that whoever asks for the state gets what was committed. A death in a round costs
nobody else's work: the survivors go on from their own progress with the units that came back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from backyard.core.errors import RunError
from backyard.training.beyond import Outward
from backyard.training.state import TrainingState
from backyard.training.sums import Sums


class Rounds:
    """Of one member; without a period nothing happens here."""

    def __init__(self, sums: Sums, state: TrainingState, steps: Sequence[Callable[..., Any]]) -> None:
        self._sums, self._state, self._inner_steps = sums, state, steps
        self._other: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []  # the memory of the last round's, for the next
        self._is_aside = False
        self._handed_in = False
        self._weight = 0.0  # of the units of this round that are in this member's progress
        self._samples = 0  # since the last local step
        self.outward: Outward | None = None  # where what was changed goes, if not to the outer optimizer

    @property
    def is_on(self) -> bool:
        return self._state.sync.is_local

    def note(self, samples: int, *, is_last: bool, clip: float | None) -> None:
        """A unit's gradients are in the local sum: take a local step, if that was enough of them."""
        if not self._other:
            self._other = self._spare or [torch.empty_like(one.detach()) for one in self._sums.parameters]
            for other, one in zip(self._other, self._sums.parameters, strict=True):
                other.copy_(one.detach())
        self._samples += samples
        if self._samples < self._state.sync.inner and not is_last:
            self._sums.settle()
            return
        self._samples = 0
        self._weight += self._sums.give_own(clip)
        for step in self._inner_steps:
            step()
        self._sums.release()

    def hand_in(self) -> None:
        """The local sum becomes what this member has changed, weighted; the model what was committed."""
        if self.is_on and self._other:
            self.set_aside()
            self._handed_in = True
            self._sums.fill(self._other, self._weight)

    def set_aside(self) -> None:
        if self._other and not self._is_aside:
            self._swap()

    def take_up(self, *, goes_on: bool) -> None:
        """The round goes on after all, with other members; or begins anew."""
        if self._handed_in:
            self._handed_in = False
            self._sums.clear()
        if not goes_on:
            self.set_aside()
            self.forget()
        elif self._is_aside:
            self._swap()

    def forget(self) -> None:
        """It was committed."""
        self._spare = self._other or self._spare
        self._other, self._is_aside, self._handed_in = [], False, False
        self._weight, self._samples = 0.0, 0

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """The model as it was committed last."""
        was_working = bool(self._other) and not self._is_aside
        self.set_aside()
        try:
            yield
        finally:
            if was_working:
                self._swap()

    def apply(self, batches: int) -> int:
        """The mean change of all members: a gradient to the outer optimizer, or what is handed to a hub.

        Returns how many batches are behind everybody then: the round's own, and those of others with a hub.
        """
        if not self._sums.is_finite():
            raise RunError(
                "what the members changed in this round is not finite",
                hint="Lower the learning rate, or clip the gradient with run.clip_grad_norm.",
            )
        self._sums.give(None)
        if self.outward is not None:
            return self.outward.exchange()
        assert self._state.outer is not None
        self._state.outer.step()
        return batches

    def _swap(self) -> None:
        self._is_aside = not self._is_aside
        with torch.no_grad():
            for parameter, other in zip(self._sums.parameters, self._other, strict=True):
                kept = parameter.detach().clone()
                parameter.copy_(other)
                other.copy_(kept)
