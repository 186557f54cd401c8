"""Lightning Fabric in a session. One line of a script changes::

    fabric = Fabric(strategy=BarnraiseStrategy())

The script keeps its one loop. An iteration is a micro-batch of this worker, and ``optimizer.step()`` adds it
to the step of all workers. Works with `lightning.fabric` and with `lightning_fabric`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import types
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from barnraise.core.errors import RunError
from barnraise.integrations import fabric_refusals as refusals
from barnraise.training.device_placement import device_of_worker
from barnraise.training.session import Session
from barnraise.worker.init import init

log = logging.getLogger("barnraise.training")

_Base: Any = object
_PACKAGES = ("lightning.fabric", "lightning_fabric")
_HERE = "Compute the value on every worker, for example from the seed."


class BarnraiseStrategy(_Base):  # type: ignore[misc]
    """Strategy of Fabric whose steps are shared by all workers of a run.

    ``session``: the one to train in; without it, `barnraise.init` makes one with the seed of
    ``fabric.seed_everything``. ``accumulate``: batches of the loader in one step. ``max_norm``: clips the
    gradient of each whole step.
    """

    def __new__(cls, *_: Any, **__: Any) -> BarnraiseStrategy:
        """Return an object that is a strategy of each package of Fabric that the script has imported."""
        imported = [name for name in _PACKAGES if name in sys.modules]
        base: Any = cls
        strategy: BarnraiseStrategy = object.__new__(_strategy_class(base, *(imported or [_installed()])))
        return strategy

    def __init__(
        self, session: Session | None = None, *, accumulate: int = 1, max_norm: float | None = None
    ) -> None:
        super().__init__()
        if accumulate < 1:
            raise RunError(
                f"accumulate is {accumulate}", hint="Pass the number of batches in a step, at least 1."
            )
        self._session = session
        self._accumulate, self._max_norm = accumulate, max_norm
        self._backward_sync_control = _BackwardSync(accumulate)
        self._num_nodes = 1  # Fabric writes its options here
        self.parallel_devices: list[torch.device] = []
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._loader: DataLoader[Any] | None = None
        self._batches: Any = None  # of the session, from the first batch on
        self._pass_epoch = 0  # of the last pass over the loader
        self._in_loop = False
        self._stepped: list[Any] = []  # optimizers, in the current iteration
        self._options: list[Any] = []  # of the optimizers, as the session has set them
        self._has_epochs = False
        self._needs_epochs = ""  # the call that does
        self._has_saved = False

    # what the session decides

    @property
    def run(self) -> Session:
        """Return the session, for example for ``strategy.run.log(loss=loss)``."""
        if self._session is None:
            batch = self._loader.batch_size if self._loader is not None else None
            # A micro-batch takes no more memory than a batch of the loader; 0: as the session chooses.
            unit = min(batch, max(1, batch * self._accumulate // 8)) if batch else 0
            self._session = init(seed=int(os.environ.get("PL_GLOBAL_SEED", "0")), unit=unit)
        return self._session

    def epochs(self, count: int) -> Iterator[int]:
        """Return the remaining epochs; a worker that joins late starts with the current one."""
        self._has_epochs = True
        self._start()
        return self.run.epochs(count)

    @property
    def root_device(self) -> torch.device:
        device = device_of_worker()
        # What Fabric was told to do on the CPU stays there, on a machine with a GPU, too.
        return torch.device("cpu") if type(self.accelerator).__name__ == "CPUAccelerator" else device

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Return the rank in the current group; before the training, the one that was launched."""
        return self.run.rank if self._is_training else _launched("RANK", 0)

    @property
    def local_rank(self) -> int:
        return _launched("LOCAL_RANK", 0)

    @property
    def node_rank(self) -> int:
        return _launched("GROUP_RANK", 0)

    @property
    def world_size(self) -> int:
        """Return the number of workers of the current group; before the training, of those launched."""
        return self.run.world if self._is_training else _launched("WORLD_SIZE", 1)

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def _is_training(self) -> bool:
        return self._batches is not None

    # setup

    def setup_environment(self) -> None:
        """Check how this process was started, and set its device up."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 and not os.environ.get("BARNRAISE_LAUNCHED"):
            raise refusals.other_launcher(world)
        if self._num_nodes > 1:
            raise refusals.refuse(
                f"Fabric(num_nodes={self._num_nodes})", "Leave it out: `barnraise run --on` names machines."
            )
        device = self.root_device
        if device.type == "cpu" and len(self.parallel_devices) > 1:
            raise refusals.refuse(
                f"Fabric(devices={len(self.parallel_devices)})", "Leave it out: each device gets a worker."
            )
        try:
            self.accelerator.setup_device(device)
        except Exception as error:  # Lightning's own, of either package
            if type(error).__name__ != "MisconfigurationException":
                raise
            raise refusals.wrong_device(self.accelerator, device) from error

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Note what is trained; the session gets it with the first batch."""
        result: tuple[torch.nn.Module, list[Any], Any] = super().setup_module_and_optimizers(
            module, optimizers, scheduler
        )
        if scheduler is not None:
            self._schedulers.append(scheduler)
        return result

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        if self._is_training:
            raise refusals.too_late("fabric.setup with an optimizer")
        self._optimizers.append(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Return the loader of the training for the first one; the others are not divided."""
        if self._loader is not None:
            return dataloader
        self._loader = dataloader
        return _SessionLoader(self, dataloader)

    def _start(self) -> None:
        """Join the group with what was set up, at the first call."""
        if self._is_training:
            return
        if not self._optimizers:
            raise refusals.nothing_set_up()
        if self._loader is None:
            raise refusals.no_loader()
        if self._max_norm is not None:
            self.run.clip_grad_norm(self._max_norm)
        scaler = getattr(self.precision, "scaler", None)
        more = [*self._schedulers, *([scaler] if scaler is not None else [])]
        loader = self._loader if self._accumulate == 1 else _with_steps_of(self._loader, self._accumulate)
        _, _, self._batches, *_ = self.run.prepare(
            self._trained_module(), self._optimizers, loader, *more, device_placement=False
        )

    def _trained_module(self) -> torch.nn.Module:
        """Return the module that has the parameters of the optimizers."""
        trained = {id(param) for optimizer in self._optimizers for param in _parameters(optimizer)}
        owners = [
            module for module in self._modules if any(id(param) in trained for param in module.parameters())
        ]
        if not owners:
            raise refusals.nothing_set_up()
        if len(owners) > 1:
            raise refusals.several_models()
        return owners[0]

    # the loop

    def microbatches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of the next epoch."""
        self._start()
        if self._needs_epochs and not self._has_epochs:
            raise refusals.epochs_needed(self._needs_epochs)
        self._pass_epoch = self.run.next_epoch
        self._check_options()
        for batch in self._batches:
            for microbatch in batch:
                self._stepped.clear()
                self._note_options()
                _set_rank_of_loggers(self.run.rank)
                self._in_loop = True
                try:
                    yield microbatch
                    self._finish_iteration()
                finally:
                    self._in_loop = False
        self._note_options()

    def _finish_iteration(self) -> None:
        """Call the step of the optimizers that the script left out, as it may while it accumulates."""
        missing = [
            optimizer
            for optimizer in self._optimizers
            if all(done is not optimizer for done in self._stepped)
        ]
        if missing and self._accumulate == 1:
            raise refusals.missing_step(len(missing))
        for optimizer in missing:
            self.optimizer_step(optimizer)
        self._check_options()

    def backward(
        self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Compute the gradients of a micro-batch.

        Accumulated gradients are the sum over the batches, as in a loop on one machine. The session has
        their mean.
        """
        if not self._in_loop:
            raise refusals.outside_loop("fabric.backward")
        loss = tensor * self._accumulate if self._accumulate > 1 else tensor
        super().backward(loss, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Add the micro-batch's gradients to the step; the last micro-batch commits it."""
        if not self._in_loop:
            raise refusals.outside_loop("optimizer.step()")
        self._check_options()
        self._stepped.append(optimizer)
        result = super().optimizer_step(optimizer, **kwargs)
        self._note_options()
        return result

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Check that the strategy clips to this norm. Return NaN: the norm is known at the commit only."""
        if norm_type != 2.0:
            raise refusals.refuse(f"fabric.clip_gradients(norm_type={norm_type:g})", "Use the norm 2.0.")
        if len(self._optimizers) > 1:
            raise refusals.refuse(
                "fabric.clip_gradients with several optimizers",
                "Pass BarnraiseStrategy(max_norm=...), which clips the gradient of all of them together, "
                "and remove the call.",
            )
        if self._max_norm != max_norm:
            raise refusals.unclipped(max_norm, self._max_norm)
        return torch.tensor(math.nan)

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Any, clip_val: float) -> None:
        """Raise RunError: the values of the whole step's gradient are not those of its micro-batches."""
        raise refusals.refuse("fabric.clip_gradients(clip_val=...)", "Clip by max_norm.")

    def _note_options(self) -> None:
        self._options = [_options_of(optimizer) for optimizer in self._optimizers]

    def _check_options(self) -> None:
        """Raise RunError if the script has changed options of an optimizer, which others do not see."""
        for optimizer, noted in zip(self._optimizers, self._options, strict=False):
            if _options_of(optimizer) != noted:
                raise refusals.changed_rate(optimizer)

    # files

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a file with the committed model, once on every machine.

        A worker that has joined late writes nothing for epochs that it has skipped.
        """
        if self._is_behind():
            log.info("%s is not written again: the training is in a later epoch", path)
        elif self.is_global_zero or self.local_rank == 0:
            with self._committed():
                content = self._convert_stateful_objects_in_state(state, filter=filter or {})
                self.checkpoint_io.save_checkpoint(content, path=path, storage_options=storage_options)
        self._has_saved = True

    def load_checkpoint(
        self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a file before the training; each worker reads its own."""
        if self._is_training:
            raise refusals.loaded_too_late()
        objects = state.values() if isinstance(state, dict) else [state]
        if not all(isinstance(thing, torch.nn.Module) for thing in objects):  # it may contain an epoch
            self._needs_epochs = "fabric.load of more than a model"
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        return remainder

    def _committed(self) -> contextlib.AbstractContextManager[None]:
        return self.run.committed() if self._is_training else contextlib.nullcontext()

    def _is_behind(self) -> bool:
        """Return True after an epoch that was over before this worker joined."""
        if not self._is_training:
            return False
        try:
            return self.run.done > (self._pass_epoch + 1) * len(self._batches)
        except TypeError:  # a stream
            return False

    # collectives

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers of the group. Return at once before the training, where there is none."""
        if self._has_saved:  # the barrier that Fabric appends: each machine has its own file
            self._has_saved = False
        elif self._is_training:
            self._check_collective("fabric.barrier")
            self.run.gather(torch.zeros(1))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all workers, stacked by rank; alone, the tensor itself."""
        if sync_grads:
            raise refusals.refuse(
                "fabric.all_gather(sync_grads=True)", "Compute the loss on each worker's samples."
            )
        self._check_collective("fabric.all_gather", group)
        rows = self._rows(tensor)
        return rows if self.run.world > 1 else tensor

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum or the mean over all workers, and write it into the tensor.

        The mean does not weigh workers by their samples.
        """
        operation = str(reduce_op).rpartition(".")[2].lower()
        if operation not in ("sum", "mean", "avg"):
            raise refusals.refuse(f"fabric.all_reduce(reduce_op={operation!r})", "Use 'sum' or 'mean'.")
        self._check_collective("fabric.all_reduce", group)
        total = self._rows(tensor).sum(0)
        tensor.copy_(total if operation == "sum" else total / self.run.world)
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Raise RunError: objects of other machines are not unpickled."""
        raise refusals.refuse("fabric.broadcast", _HERE)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Raise RunError: a worker that joins late would not know the decision."""
        raise refusals.refuse(
            "strategy.reduce_boolean_decision", "Decide by strategy.run.history or run.step."
        )

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.run.gather(tensor.detach().unsqueeze(0)).to(tensor.device)

    def _check_collective(self, call: str, group: Any = None) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            raise refusals.refuse(f"{call} with a group of its own", "Leave the group out.")
        if not self._is_training:
            raise refusals.collective_before_start(call)
        if self._in_loop:
            raise refusals.collective_in_loop(call)
        self._needs_epochs = self._needs_epochs or call  # if another epoch follows


class _BackwardSync:
    """Control of ``fabric.no_backward_sync``: nothing is sent before the last micro-batch of a step."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing, if the strategy accumulates."""
        if enabled and self._accumulate == 1:
            raise refusals.sync_without_accumulation()
        return contextlib.nullcontext()


class _SessionLoader:
    """The training's loader, as Fabric wraps it: a pass is an epoch, in micro-batches of this worker."""

    def __init__(self, strategy: BarnraiseStrategy, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._strategy, self._original = strategy, loader

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self._original)

    def __iter__(self) -> Iterator[Any]:
        return self._strategy.microbatches()


@cache
def _strategy_class(cls: Any, *packages: str) -> Any:
    """Return a subclass that also derives from the Strategy of each package."""
    bases = tuple(import_module(f"{package}.strategies").Strategy for package in packages)
    return types.new_class(cls.__name__, (cls, *bases), {}, lambda body: body.update(__doc__=cls.__doc__))


def _installed() -> str:
    """Return the first package of Fabric that is installed."""
    for package in _PACKAGES:
        try:
            import_module(package)
        except ModuleNotFoundError:
            continue
        return package
    raise RunError("Lightning Fabric is not installed here", hint="pip install lightning-fabric")


def _launched(name: str, alone: int) -> int:
    """Return a number that the agent has given to this worker."""
    return int(os.environ.get(name, alone)) if os.environ.get("BARNRAISE_LAUNCHED") else alone


def _set_rank_of_loggers(rank: int) -> None:
    """Let Lightning's loggers write on the main worker, which changes when one dies."""
    import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = rank


def _parameters(optimizer: Any) -> Sequence[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, such as the learning rate, as plain values."""
    return [
        {
            name: float(value) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _with_steps_of(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return a loader whose batches have the samples of ``count`` batches."""
    batch = loader.batch_size
    if batch is None:
        return loader  # the session rejects it
    if isinstance(loader.dataset, IterableDataset):
        raise refusals.refuse(
            "accumulation over an iterable dataset",
            "Give the loader a larger batch_size, without accumulate.",
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if samples % (batch * count) and not loader.drop_last:
        raise refusals.uneven_accumulation(samples, batch, count)
    return DataLoader(
        loader.dataset,
        batch_size=batch * count,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
