"""Local steps: within a round a member trains by itself; the mean of what all changed is applied at its end.

While a member works, the model holds its own progress and ``_other`` what was committed last; set aside, it
is the other way round, so that whoever asks for the state gets what was committed. A death in a round costs
nobody else's work: the survivors go on from their own progress with the units that came back.

While a round's changes are on their way, a member goes ahead: it trains on, with units of the next round.
What it changes meanwhile is its own, whatever becomes of the round before, and goes on top of what is
committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from barnraise.core.errors import RunError
from barnraise.training.gradients.accumulator import GradientAccumulator
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.state.training_state import TrainingState


class LocalSgd:
    """Of one member; without a period nothing happens here."""

    def __init__(
        self, sums: GradientReducer, state: TrainingState, steps: Sequence[Callable[..., Any]]
    ) -> None:
        self._sums, self._state, self._inner_steps = sums, state, steps
        self._own = GradientAccumulator(sums)
        self._other: list[torch.Tensor] = []
        self._is_aside = False
        self._weight = 0.0  # of the units of this round that are in this member's progress
        self._samples = 0  # since the last local step
        self._spare: list[list[torch.Tensor]] = []  # memory that is used again
        # Ahead of what is on its way: the progress that was handed in, with its weight; when that is known to
        # count or not, what was changed since.
        self._handed_in: list[torch.Tensor] = []
        self._handed_weight = 0.0
        self._since: list[torch.Tensor] = []
        self._since_weight = 0.0
        self._is_since_due = False  # the round that it belongs to is at hand

    @property
    def is_on(self) -> bool:
        return self._state.sync.is_local

    def take(self, weight: float) -> None:
        """The gradients of a unit, or of a part of one."""
        self._own.take(weight)

    def note(self, samples: int, *, is_last: bool, clip: float | None) -> None:
        """A whole unit was taken: take a local step, if that was enough of them."""
        self._samples += samples
        if self._samples >= self._state.sync.inner or is_last:
            self._step(clip)

    def _step(self, clip: float | None) -> None:
        if self._own.is_empty:  # of units that weigh nothing there may be gradients
            self._own.clear()
            self._samples = 0
            return
        if not self._other:
            self._other = self._copied(self._model())
        self._samples = 0
        self._weight += self._own.give(clip)
        for step in self._inner_steps:
            step()
        self._sums.release()

    def hand_in(self, clip: float | None) -> None:
        """The local sum becomes what this member has changed, weighted; its progress stays where it is."""
        if not self.is_on:
            return
        if not self._own.is_empty:  # units that came before the group broke, and none after
            self._step(clip)
        if self._other:
            self._sums.fill(self._other, self._model(), self._weight)

    def go_ahead(self) -> None:
        """What was handed in is on its way: the next round begins, from this member's own progress."""
        model = self._model()
        if not self._other:
            self._other = self._copied(model)
        self._handed_weight = self._weight
        if not self._since:
            self._handed_in = self._copied(model)
            self._put_on_top()
            return
        for one, more in zip(model, self._since, strict=True):  # without a third copy of the model
            kept = one.clone()
            one.add_(more)
            more.copy_(kept)
        self._handed_in, self._since, self._weight = self._since, [], self._since_weight
        self._forget_since()

    def land(self) -> None:
        """What was on its way counts: the model is what was committed before it, to be changed by it."""
        for one, other, handed in zip(self._model(), self._other, self._handed_in, strict=True):
            torch.sub(one, handed, out=handed)
            one.copy_(other)
        self._keep_since()

    def turn_back(self, clip: float | None) -> None:
        """It does not: to the round whose changes these were, and to what was committed before it."""
        if not self._own.is_empty:
            self._step(clip)
        for one, other, handed in zip(self._model(), self._other, self._handed_in, strict=True):
            since = one - handed
            one.copy_(other)
            other.copy_(handed)
            handed.copy_(since)
        self._keep_since()

    def _keep_since(self) -> None:
        self._since, self._handed_in = self._handed_in, []
        self._since_weight, self._weight = self._weight, self._handed_weight
        self._is_aside = True
        if not self._since_weight:
            self._forget_since()

    def set_aside(self) -> None:
        if self._other and not self._is_aside:
            self._swap()

    def take_up(self, *, goes_on: bool, is_ahead: bool) -> None:
        """The round goes on after all, with other members; or begins anew.

        ``goes_on``: with units that this member has computed of it. ``is_ahead``: and of the next one.
        """
        if self.is_on:
            self._sums.clear()  # what was handed in
        if not goes_on:
            self.set_aside()
            self._begin_anew()
            self._own.clear()
            if not is_ahead:
                self._forget_since()
        elif self._is_since_due:
            self.go_on()
        elif self._is_aside:
            self._swap()

    def forget(self) -> None:
        """It was committed."""
        self._begin_anew()
        self._is_since_due = bool(self._since)
        if not self.is_on:
            self._spare.clear()

    def go_on(self) -> None:
        """After a commit: what was changed since is on top of it."""
        if not self._is_since_due:
            return
        self._other = self._copied(self._model())
        self._put_on_top()

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

    def apply(self) -> None:
        """The mean change of all members: a gradient to the outer optimizer."""
        if not self._sums.is_finite():
            raise RunError(
                "what the members changed in this round is not finite",
                hint="Lower the learning rate, or clip the gradient with run.clip_grad_norm.",
            )
        if self._other and not self._is_aside:  # what this member had changed is part of the sum
            self._is_aside = True
            for one, other in zip(self._model(), self._other, strict=True):
                one.copy_(other)
        assert self._state.outer is not None
        if self._sums.give(None):
            self._state.outer.step()

    def _put_on_top(self) -> None:
        """What was changed since, if anything: it is this member's progress in the round at hand."""
        for one, more in zip(self._model(), self._since, strict=True) if self._since else ():
            one.add_(more)
        self._weight = self._since_weight
        self._forget_since()

    def _forget_since(self) -> None:
        self._keep(self._since)
        self._since, self._since_weight, self._is_since_due = [], 0.0, False

    def _begin_anew(self) -> None:
        self._keep(self._other)
        self._other, self._is_aside = [], False
        self._weight = 0.0
        if self._own.is_empty:
            self._samples = 0

    def _model(self) -> list[torch.Tensor]:
        return [one.detach() for one in self._sums.parameters]

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = self._spare.pop() if self._spare else [torch.empty_like(one) for one in tensors]
        for place, one in zip(found, tensors, strict=True):
            place.copy_(one)
        return found

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            self._spare.append(tensors)

    def _swap(self) -> None:
        self._is_aside = not self._is_aside
        for one, other in zip(self._model(), self._other, strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
