"""LocalSGD / DiLoCo: workers train alone for a round, then apply the mean change as an outer gradient.

While a worker trains, the model holds the worker's own progress, and ``_shadow`` holds the committed
parameters. After a swap it is the other way round, so that a reader of the state gets the committed
parameters. When a worker dies in a round, the others keep their progress and share its micro-batches.

While a round's change is in flight, a worker overlaps: it trains micro-batches of the next round. The change
of the next round is applied on top of the committed parameters, even if the round in flight fails.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from barnraise.core.errors import RunError
from barnraise.training.gradients.accumulator import GradientAccumulator
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.state.training_state import TrainingState


class RoundPhase(enum.Enum):
    """Contents of the model's parameters within a round."""

    IDLE = "the committed parameters; no local step was taken in this round"
    TRAINING = "this worker's progress; the committed parameters are in the shadow"
    IN_FLIGHT = "progress in the next round, while the change of this round is in flight"
    SWAPPED = "the committed parameters; this worker's progress is in the shadow"


class LocalSgd:
    """Local steps of one worker; a no-op if ``sync.period`` is 1."""

    def __init__(
        self, reducer: GradientReducer, state: TrainingState, steps: Sequence[Callable[..., Any]]
    ) -> None:
        self._reducer, self._state, self._inner_steps = reducer, state, steps
        self._accumulator = GradientAccumulator(reducer)
        self._phase = RoundPhase.IDLE
        self._shadow: list[torch.Tensor] = []
        self._weight = 0.0  # of the micro-batches in this worker's progress
        self._samples = 0  # since the last local step
        self._free: list[list[torch.Tensor]] = []  # buffers to use again
        # While a change is in flight: the progress that was submitted, with its weight.
        self._submitted: list[torch.Tensor] = []
        self._submitted_weight = 0.0
        # When it is committed or has failed: what this worker has changed since, for the next round.
        self._next_change: list[torch.Tensor] = []
        self._next_weight = 0.0
        self._is_next_due = False  # the round of ``_next_change`` is the current one

    @property
    def is_on(self) -> bool:
        return self._state.sync.is_local

    def add_microbatch(self, weight: float) -> None:
        """Accumulate the gradients of a micro-batch or of a part of one."""
        self._accumulator.add_microbatch(weight)

    def finish_microbatch(self, samples: int, *, is_last: bool, clip: float | None) -> None:
        """Count a whole micro-batch, and take a local step if there are enough samples for one."""
        self._samples += samples
        if self._samples >= self._state.sync.inner or is_last:
            self._take_local_step(clip)

    def _take_local_step(self, clip: float | None) -> None:
        if self._accumulator.is_empty:  # micro-batches without weight may have gradients
            self._accumulator.clear()
            self._samples = 0
            return
        if self._phase is RoundPhase.IDLE:
            self._shadow = self._copy(self._model())
            self._phase = RoundPhase.TRAINING
        self._samples = 0
        self._weight += self._accumulator.write_grads(clip)
        for step in self._inner_steps:
            step()
        self._reducer.clear_grads()

    def submit_change(self, clip: float | None) -> None:
        """Put this worker's weighted change into the reducer. The model keeps its progress."""
        if not self.is_on:
            return
        if not self._accumulator.is_empty:  # micro-batches from before the group failed
            self._take_local_step(clip)
        if self._phase is not RoundPhase.IDLE:
            self._reducer.set_change(self._shadow, self._model(), self._weight)

    def start_next_round(self) -> None:
        """Start from this worker's own progress while the submitted change is in flight."""
        model = self._model()
        if self._phase is RoundPhase.IDLE:
            self._shadow = self._copy(model)
        self._phase = RoundPhase.IN_FLIGHT
        self._submitted_weight = self._weight
        if not self._next_change:
            self._submitted = self._copy(model)
            self._apply_next_change()
            return
        for parameter, change in zip(model, self._next_change, strict=True):  # without a third copy
            own = parameter.clone()
            parameter.add_(change)
            change.copy_(own)
        self._submitted, self._next_change, self._weight = self._next_change, [], self._next_weight
        self._drop_next_change()

    def on_round_committed(self) -> None:
        """Restore the parameters from before the round in flight, so that its result can be applied."""
        for parameter, shadow, submitted in zip(self._model(), self._shadow, self._submitted, strict=True):
            torch.sub(parameter, submitted, out=submitted)
            parameter.copy_(shadow)
        self._keep_next_change()

    def rollback_round(self, clip: float | None) -> None:
        """Return to the round in flight, because it failed. The model holds the committed parameters."""
        if not self._accumulator.is_empty:
            self._take_local_step(clip)
        for parameter, shadow, submitted in zip(self._model(), self._shadow, self._submitted, strict=True):
            change = parameter - submitted
            parameter.copy_(shadow)
            shadow.copy_(submitted)
            submitted.copy_(change)
        self._keep_next_change()

    def _keep_next_change(self) -> None:
        self._next_change, self._submitted = self._submitted, []
        self._next_weight, self._weight = self._weight, self._submitted_weight
        self._phase = RoundPhase.SWAPPED
        if not self._next_weight:
            self._drop_next_change()

    def swap_to_committed(self) -> None:
        """Put the committed parameters into the model, and this worker's progress into the shadow."""
        if self._phase in (RoundPhase.TRAINING, RoundPhase.IN_FLIGHT):
            self._exchange()
            self._phase = RoundPhase.SWAPPED

    def resume_from(self, *, has_progress: bool, is_ahead: bool) -> None:
        """Resume the round in a new group, or restart it.

        ``has_progress``: this worker has completed micro-batches of the round. ``is_ahead``: also of the
        next one.
        """
        if self.is_on:
            self._reducer.clear()  # the submitted change
        if not has_progress:
            self.swap_to_committed()
            self._reset_round()
            self._accumulator.clear()
            if not is_ahead:
                self._drop_next_change()
        elif self._is_next_due:
            self.resume_next_round()
        elif self._phase is RoundPhase.SWAPPED:
            self._exchange()
            self._phase = RoundPhase.TRAINING

    def finish_round(self) -> None:
        """Reset after the round's result has been applied."""
        self._reset_round()
        self._is_next_due = bool(self._next_change)
        if not self.is_on:
            self._free.clear()

    def resume_next_round(self) -> None:
        """Apply what this worker has changed since, on top of the committed parameters."""
        if not self._is_next_due:
            return
        self._shadow = self._copy(self._model())
        self._phase = RoundPhase.TRAINING
        self._apply_next_change()

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Hold the committed parameters in the model for the duration of the context."""
        phase = self._phase
        self.swap_to_committed()
        try:
            yield
        finally:
            if self._phase is not phase:
                self._exchange()
                self._phase = phase

    def apply(self) -> None:
        """Apply the mean change of all workers as a gradient of the outer optimizer."""
        if not self._reducer.is_finite():
            raise RunError(
                "the workers' change in this round is not finite",
                hint="Lower the learning rate, or clip the gradient with run.clip_grad_norm.",
            )
        if self._phase is RoundPhase.TRAINING:  # this worker's own change is part of the sum
            self._phase = RoundPhase.SWAPPED
            for parameter, shadow in zip(self._model(), self._shadow, strict=True):
                parameter.copy_(shadow)
        assert self._state.outer is not None
        if self._reducer.write_grads(None):
            self._state.outer.step()

    def _apply_next_change(self) -> None:
        """Make the change since, if any, this worker's progress in the current round."""
        changes = zip(self._model(), self._next_change, strict=True) if self._next_change else ()
        for parameter, change in changes:
            parameter.add_(change)
        self._weight = self._next_weight
        self._drop_next_change()

    def _drop_next_change(self) -> None:
        self._release(self._next_change)
        self._next_change, self._next_weight, self._is_next_due = [], 0.0, False

    def _reset_round(self) -> None:
        self._release(self._shadow)
        self._shadow, self._phase = [], RoundPhase.IDLE
        self._weight = 0.0
        if self._accumulator.is_empty:
            self._samples = 0

    def _model(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._reducer.parameters]

    def _copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in tensors]
        for target, tensor in zip(copies, tensors, strict=True):
            target.copy_(tensor)
        return copies

    def _release(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            self._free.append(tensors)

    def _exchange(self) -> None:
        """Exchange the parameters with the shadow."""
        for parameter, shadow in zip(self._model(), self._shadow, strict=True):
            before = parameter.clone()
            parameter.copy_(shadow)
            shadow.copy_(before)
