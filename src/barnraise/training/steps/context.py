"""What is trained, and with what: all that a commit moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from barnraise.runs.sharding import MicroBatch
from barnraise.training.gradients.batch_norm_stats import BatchNormStats
from barnraise.training.gradients.grad_scaler import ScalerAdapter
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.local_sgd import LocalSgd
from barnraise.training.state.bitwise_sync import BitwiseSync
from barnraise.training.state.training_state import TrainingState


class StepData(Protocol):
    """What there is to train with; ``step`` counts batches from the beginning."""

    @property
    def batch(self) -> int:
        """Samples of a batch, of all members together; the last of an epoch may have fewer."""

    def units(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]: ...

    def steps(self, step: int, period: int) -> int:
        """How many are left of a round of so many that begins there."""

    def may_go_ahead(self, step: int) -> bool:
        """Whether the units there may be computed before those that come before them are committed."""

    def catch_up(self, step: int) -> None:
        """Be ready to begin there."""


class StepContext(NamedTuple):
    """The parts of one member."""

    data: StepData
    sums: GradientReducer
    rounds: LocalSgd
    norms: BatchNormStats
    state: TrainingState
    scaling: ScalerAdapter
    anchoring: BitwiseSync
    optimizer_steps: list[Callable[..., Any]]
    scheduler_steps: list[Callable[..., Any]]
