"""Part of a session that splits a model over the machines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from barnraise.core.errors import RunError
from barnraise.training.device_placement import device_of_worker
from barnraise.training.group.interface import GroupManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.pipeline.base.narrow_layers import BaseForm
from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.outline import LossFunction
from barnraise.training.pipeline.passes.activations import Activations
from barnraise.training.pipeline.passes.order import Order
from barnraise.training.pipeline.split_training import SplitOptions, SplitTraining
from barnraise.training.pipeline.trained_state import OptimizerFactory, SchedulerFactory
from barnraise.training.state.checkpoint_manager import CheckpointManager


class SplitSession:
    """Base class of a session, with what it needs to split a model."""

    _manager: GroupManager
    _metrics: MetricsLog
    _checkpoints: CheckpointManager
    _seed: int
    _unit_size: int
    _clip: float | None
    _split: SplitTraining | None = None

    @property
    def device(self) -> torch.device:
        """Return the device that this worker should use."""
        return device_of_worker()

    @property
    def done(self) -> int:
        """Return the number of committed steps, counted in batches of the loader."""
        raise NotImplementedError

    @property
    def is_main(self) -> bool:
        """Return True on exactly one worker at any time (rank 0)."""
        return self._manager.rank == 0

    @property
    def history(self) -> list[dict[str, float]]:
        """Return the logged values by step, averaged over whole batches. Old entries are dropped."""
        return self._metrics.history

    @property
    def total_steps(self) -> int | None:
        """Return the steps of all epochs; None if they are not known."""
        raise NotImplementedError

    def _refuse_if_split(self, what: str, hint: str = "Leave the call out.") -> None:
        """Raise RunError in a session that has split a model."""
        if self._split is not None:
            raise RunError(f"{what} does not work with a split model", hint=hint)

    @property
    def _may_split(self) -> bool:
        """Return False beside another training, or at a hub."""
        raise NotImplementedError

    def empty(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a model is built without weights, for `split`."""
        return empty_weights()

    def split(
        self,
        model: torch.nn.Module,
        loader: DataLoader[Any],
        *,
        optimizer: OptimizerFactory,
        weights: str | Path | None = None,
        scheduler: SchedulerFactory | None = None,
        blocks: str | None = None,
        loss: LossFunction | None = None,
        weight: Callable[[Any], float] | None = None,
        order: Order = "1F1B",
        activations: Activations = "exact",
        base: BaseForm = "exact",
    ) -> tuple[SplitTraining, SplitTraining]:
        """Return a model that all machines hold together, each a run of its blocks, and its batches.

        ``optimizer`` and ``scheduler`` make one for the trained parameters of a stage. ``weights``: the
        folder of the model's safetensors files; None: the model starts with new weights. ``blocks``: the name
        of the list of blocks. ``loss``: computes the loss of a micro-batch; the default is
        ``model(**inputs).loss``. ``weight``: of a micro-batch in the loss of the batch; the default is its
        tokens. ``activations``: the form in which they and their gradients travel. ``base``:
        the form in which machines hold the frozen linear layers of the blocks.
        """
        if not self._may_split or self._split is not None:
            raise RunError(
                "run.split was called after run.prepare, run.map, run.track or run.split, or at a hub",
                hint="Call it alone, and once.",
            )
        path = Path(weights) if weights is not None else None
        options = SplitOptions(optimizer, path, scheduler, blocks, loss, weight, order, activations, base)
        self._split = SplitTraining(
            model,
            loader,
            options,
            manager=self._manager,
            metrics=self._metrics,
            seed=self._seed,
            unit=self._unit_size,
            device=self.device,
            checkpoints=self._checkpoints,
        )
        self._split.loop.clip = self._clip
        self._split.start(self)
        return self._split, self._split
