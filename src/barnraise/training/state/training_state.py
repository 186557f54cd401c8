"""Training state: the model, its optimizers and schedulers, and objects that the script tracks.

Of the model, it contains what is trained or has changed. The rest is the base, of which it has only hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Protocol

import msgspec
import torch
from blake3 import blake3
from msgspec import Meta
from torch.optim import Optimizer

from barnraise.checkpoint.adapter_files import AdapterDescription
from barnraise.checkpoint.serialization import FlatState, digest, flatten, tensor_bytes, unflatten
from barnraise.core.errors import ProtocolError, RunError
from barnraise.training.gradients.reducer import match_layout
from barnraise.training.recovery.state_transfer import sketch, window_of
from barnraise.training.state.frozen_base import FrozenBase
from barnraise.training.state.model_tensors import load_state, state_of, tensors_of
from barnraise.training.state.trained_set import BaseDescription
from barnraise.training.sync import Sync, next_sync

_WINDOW_BYTES = 256 << 10
_MAX_EXTRA_BYTES = 64 << 20

_Hash = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Notes(Protocol):
    """Small state of a framework, such as a list of losses, that changes between commits.

    Checkpoints contain it, and workers that join get it from a worker that has the state. Unlike a tracked
    object, it is not compared, so its changes cost nothing while no worker joins.
    """

    def dump(self) -> bytes:
        """Return the state as it was at the last commit."""

    def load(self, content: bytes) -> None:
        """Load what `dump` returned, here or on another machine."""


class TrainingState:
    """Everything that a commit changes on one worker.

    ``covered``: committed batches. ``epoch_start``: their number when the current epoch started.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[Optimizer],
        schedulers: list[Any],
        tracked: dict[str, Any],
        base: FrozenBase | None = None,
    ) -> None:
        """Set the objects; ``base`` is made of the model and the optimizers if it is not given."""
        self.model = model
        self.base = base if base is not None else FrozenBase(model, _trained_by(optimizers))
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.tracked = tracked
        self.notes: Notes | None = None
        self.adapter: AdapterDescription | None = None  # of a PEFT model
        self.epoch = 0
        self.covered = 0
        self.epoch_start = 0
        self.sync = Sync()
        self.coming: Sync | None = None  # from the next commit on
        self.outer: torch.optim.SGD | None = None  # of LocalSGD rounds
        # Error feedback of all workers, summed; set only while a checkpoint is saved or restored.
        self.residuals: dict[str, torch.Tensor] = {}

    def flatten(self, done: int, *, is_checkpoint: bool = False) -> FlatState:
        """Return the whole state as a skeleton and tensors; ``done``: committed steps.

        A checkpoint also has the notes, and what an export needs.
        """
        self.base.refresh()
        extra = self._extra() if is_checkpoint else {}
        return flatten({**extra, **self._tree(done), "base": self.base.describe()})

    def _tree(self, done: int) -> dict[str, Any]:
        model = state_of(self.model)
        return {
            "model": {name: value for name, value in model.items() if name not in self.base.names},
            "optimizers": [self._shared_state(optimizer.state_dict()) for optimizer in self.optimizers],
            "outer": None if self.outer is None else self.outer.state_dict(),
            "schedulers": [_without_callables(scheduler.state_dict()) for scheduler in self.schedulers],
            "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
            "done": done,
            "epoch": self.epoch,
            "covered": self.covered,
            "epoch_began": self.epoch_start,
            "sync": msgspec.to_builtins(self.sync),
            "coming": None if self.coming is None else msgspec.to_builtins(self.coming),
            "residuals": self.residuals,
        }

    def _extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {} if self.notes is None else {"notes": self.notes.dump()}
        return extra if self.adapter is None else {**extra, "adapter": self.adapter._asdict()}

    def _shared_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Drop the optimizer's memory with local steps, because each worker has its own."""
        return {**state, "state": {}} if self.sync.is_local else state

    def update_sync(self, proposed: Sync | None, *, is_alone: bool = False) -> Sync | None:
        """Handle the `Sync` that rank 0 sent with a commit. Return the one that is applied now, if any."""
        due, self.coming = next_sync(self.sync, self.coming, proposed)
        if due is not None:
            self.apply_sync(due, is_alone=is_alone)
        return due

    def apply_sync(self, sync: Sync, *, is_alone: bool = False) -> None:
        """Use this `Sync` from the next step on. All workers do so at the same commit."""
        if self.sync.is_local and not sync.is_local and not is_alone:
            for optimizer in self.optimizers:
                optimizer.state.clear()  # it differs between workers
        self.sync = sync
        if not sync.is_local:
            self.outer = None
            return
        if self.outer is None:
            self.outer = torch.optim.SGD(_trained_by(self.optimizers), lr=sync.rate)
        for group in self.outer.param_groups:
            group.update(lr=sync.rate, momentum=sync.momentum, nesterov=sync.momentum > 0)

    def load(self, parts: FlatState, source: str = "the others", *, is_checkpoint: bool = False) -> int:
        """Load a flattened state. Return its number of committed steps.

        Raise RunError if the frozen base is another one than that of the ``source``, before anything is
        loaded.
        """
        state = unflatten(parts.skeleton, parts.tensors)
        self._load_model(state, source, is_checkpoint=is_checkpoint)
        self.apply_sync(msgspec.convert(state["sync"], Sync))
        self.coming = msgspec.convert(state["coming"], Sync | None)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            memory = optimizer.state_dict()["state"] if self.sync.is_local else saved["state"]
            _load_optimizer(optimizer, {**saved, "state": memory})
        if self.outer is not None:
            _load_optimizer(self.outer, state["outer"])
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(_with_lambdas(scheduler, saved))
        if set(state["tracked"]) != set(self.tracked):
            raise RunError(
                f"this worker tracks {sorted(self.tracked)}, the others track {sorted(state['tracked'])}",
                hint="Call run.track before run.prepare, with the same names everywhere.",
            )
        for name, thing in self.tracked.items():
            thing.load_state_dict(state["tracked"][name])
        self.epoch, self.epoch_start = int(state["epoch"]), int(state["epoch_began"])
        self.covered = int(state["covered"])
        self.residuals = state["residuals"]
        if self.notes is not None and "notes" in state:  # of a checkpoint
            self.notes.load(state["notes"])
        return int(state["done"])

    def _load_model(self, state: dict[str, Any], source: str, *, is_checkpoint: bool) -> None:
        self.base.refresh()
        received = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
        described = _description_of(state.get("base"))
        base = self.base.check_received(received, described, source=source, is_checkpoint=is_checkpoint)
        values = {name: value for name, value in state["model"].items() if name not in base}
        load_state(self.model, values, kept=tensors_of(self.model).keys() - values.keys())
        self.base.adopt(base)
        self.base.follow(described)

    def saved_model(self, *, complete: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors that `run.save` writes, and metadata about those that it leaves out."""
        state = self.base.refresh()
        if complete or not self.base.has_frozen_parameters:
            return tensors_of(self.model), {}
        own = self.base.hashes()
        hashes = {name: own[name] for name in sorted(self.base.names) if name in own}
        return state, {"base": msgspec.json.encode(hashes).decode()}

    def window_digest(self, step: int) -> bytes:
        """Hash a part of one tensor of the state; successive steps cover all of it."""
        tensors = list(self.base.refresh().values())
        turn, index = divmod(step, len(tensors))
        return blake3(tensor_bytes(window_of(tensors[index], _WINDOW_BYTES, turn))).digest()

    def fingerprint(self, done: int, *, is_full: bool) -> bytes:
        """Return a hash by which workers with different states are found.

        If not ``is_full``, hash a sketch and all tracked objects. The script changes those, so a joining
        worker that replayed every step does not have their changes.
        """
        parts = self.flatten(done)
        if is_full:
            return digest(parts)
        tracked = flatten({name: thing.state_dict() for name, thing in self.tracked.items()})
        return sketch(parts, done) + digest(tracked)

    @property
    def max_bytes(self) -> int:
        """Return an upper limit for the size of a state, with the memory of optimizers.

        The others may have more state than this worker: any tensor of the model once, and what optimizers
        keep of those that they hold.
        """
        own = 8 * _bytes_of(flatten(self._tree(0)).tensors)  # without waiting for hashes
        model = tensors_of(self.model)
        base = _bytes_of(model[name] for name in self.base.names)
        return own + base + 7 * _bytes_of(self.base.held()) + _MAX_EXTRA_BYTES


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _trained_by(optimizers: list[Optimizer]) -> list[torch.nn.Parameter]:
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group if parameter.requires_grad]


def _description_of(received: Any) -> BaseDescription | None:
    """Return what a state says of its base. Raise ProtocolError if it cannot be read."""
    try:
        described = msgspec.convert(received, _ReceivedBase | None)
    except msgspec.ValidationError as error:
        raise ProtocolError("the base of a state cannot be read") from error
    if described is None:
        return None
    return BaseDescription(described.hashes, described.trained, described.unfrozen)


class _ReceivedBase(msgspec.Struct, frozen=True):
    hashes: dict[str, _Hash] | None
    trained: tuple[str, ...]
    unfrozen: dict[str, bool]


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    for parameter, memory in optimizer.state.items():
        for name, value in memory.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                memory[name] = match_layout(parameter, value)


def _with_lambdas(scheduler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Add the empty entry that LambdaLR expects for the state of its functions."""
    lambdas = getattr(scheduler, "lr_lambdas", None)
    return state if lambdas is None else {**state, "lr_lambdas": [None] * len(lambdas)}


def _without_callables(state: dict[str, Any]) -> dict[str, Any]:
    """Drop functions from a scheduler's state, because they cannot be serialized."""
    return {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"}
