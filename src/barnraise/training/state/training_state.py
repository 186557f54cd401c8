"""All that a commit changes: the model, its optimizers and schedulers, and what the user tracks."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.optim import Optimizer

from barnraise.checkpoint.serialization import FlatState, as_bytes, assemble, digest, dismantle
from barnraise.core.errors import RunError
from barnraise.training.gradients.reducer import laid_out_as
from barnraise.training.recovery.state_transfer import sketch, window_of
from barnraise.training.state.names_in_state import load_state, state_of, tensors_of
from barnraise.training.sync import Sync, heard

_WINDOW_BYTES = 256 << 10
_MOST_BESIDES = 64 << 20


class TrainingState:
    """Taken apart and put together as one."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[Optimizer],
        schedulers: list[Any],
        tracked: dict[str, Any],
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.tracked = tracked
        self.epoch = 0  # the pass over the data that is at hand
        self.covered = 0  # batches of the data that are committed
        self.epoch_began = 0  # how many they were when it did
        self.sync = Sync()
        self.coming: Sync | None = None  # from the next commit on
        self.outer: torch.optim.SGD | None = None  # of rounds
        # Only on its way to and from a checkpoint: what codecs keep on all members together.
        self.residuals: dict[str, torch.Tensor] = {}

    def parts(self, done: int) -> FlatState:
        return dismantle(
            {
                "model": state_of(self.model),
                "optimizers": [self._shared(one.state_dict()) for one in self.optimizers],
                "outer": None if self.outer is None else self.outer.state_dict(),
                "schedulers": [_plain(one.state_dict()) for one in self.schedulers],
                "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
                "done": done,
                "epoch": self.epoch,
                "covered": self.covered,
                "epoch_began": self.epoch_began,
                "sync": msgspec.to_builtins(self.sync),
                "coming": None if self.coming is None else msgspec.to_builtins(self.coming),
                "residuals": self.residuals,
            }
        )

    def _shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """In rounds, what an optimizer remembers is each member's own."""
        return {**state, "state": {}} if self.sync.is_local else state

    def hear(self, word: Sync | None, *, is_alone: bool = False) -> Sync | None:
        """What the first member said with the sum of a commit; returns what is adopted now, if anything."""
        due, self.coming = heard(self.sync, self.coming, word)
        if due is not None:
            self.adopt(due, is_alone=is_alone)
        return due

    def adopt(self, sync: Sync, *, is_alone: bool = False) -> None:
        """From the next step on. All members do it at the same commit."""
        if self.sync.is_local and not sync.is_local and not is_alone:
            for one in self.optimizers:
                one.state.clear()  # they differ from member to member
        self.sync = sync
        if not sync.is_local:
            self.outer = None
            return
        if self.outer is None:
            groups = [group["params"] for one in self.optimizers for group in one.param_groups]
            trained = [parameter for group in groups for parameter in group if parameter.requires_grad]
            self.outer = torch.optim.SGD(trained, lr=sync.rate)
        for group in self.outer.param_groups:
            group.update(lr=sync.rate, momentum=sync.momentum, nesterov=sync.momentum > 0)

    def load(self, parts: FlatState) -> int:
        """Returns how many steps it has behind it."""
        state = assemble(parts.skeleton, parts.tensors)
        load_state(self.model, state["model"])
        self.adopt(msgspec.convert(state["sync"], Sync))
        self.coming = msgspec.convert(state["coming"], Sync | None)
        for one, found in zip(self.optimizers, state["optimizers"], strict=True):
            own = one.state_dict()["state"] if self.sync.is_local else found["state"]
            _load(one, {**found, "state": own})
        if self.outer is not None:
            _load(self.outer, state["outer"])
        for one, found in zip(self.schedulers, state["schedulers"], strict=True):
            one.load_state_dict(_with_lambdas(one, found))
        if set(state["tracked"]) != set(self.tracked):
            raise RunError(
                f"this worker tracks {sorted(self.tracked)}, the others {sorted(state['tracked'])}",
                hint="Call run.track before run.prepare, with the same names everywhere.",
            )
        for name, thing in self.tracked.items():
            thing.load_state_dict(state["tracked"][name])
        self.epoch, self.epoch_began = int(state["epoch"]), int(state["epoch_began"])
        self.covered = int(state["covered"])
        self.residuals = state["residuals"]
        return int(state["done"])

    def window(self, step: int) -> bytes:
        """A hash of a part of one tensor of the model, another one at each step: all of it in time."""
        tensors = list(tensors_of(self.model).values())
        turn, place = divmod(step, len(tensors))
        return blake3(as_bytes(window_of(tensors[place], _WINDOW_BYTES, turn))).digest()

    def fingerprint(self, done: int, *, wholly: bool) -> bytes:
        """To find who lacks the state; if not ``wholly``, of a sketch, and of all that the user tracks.

        That is changed by the script: a newcomer that followed the others did not see it.
        """
        parts = self.parts(done)
        if wholly:
            return digest(parts)
        tracked = dismantle({name: thing.state_dict() for name, thing in self.tracked.items()})
        return sketch(parts, done) + digest(tracked)

    @property
    def most_bytes(self) -> int:
        """More than this state can ever have, with what optimizers add to it."""
        tensors = self.parts(0).tensors
        return 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors) + _MOST_BESIDES


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                kept[name] = laid_out_as(parameter, value)


def _with_lambdas(scheduler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Those whose rate is a function of the user's ask for the state of these functions."""
    lambdas = getattr(scheduler, "lr_lambdas", None)
    return state if lambdas is None else {**state, "lr_lambdas": [None] * len(lambdas)}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without what it can make again."""
    return {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"}
