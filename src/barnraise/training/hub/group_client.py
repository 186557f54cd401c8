"""A group's place at a hub: what its members hold alike of it, and how the one who speaks for them does.

The version that all began with, the lease and how far it is trained are part of the state of a training, so
any member can go on with them. One of them speaks to the hub at a time, in a thread of its own: whoever waits
for the hub can still hear that somebody came or went. That two of them speak, because a network is cut,
does no harm: to the hub they are one member, with one lease, which counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.hub.port import FlatParameters, HubPort, LeasedData, LeasedWork, RoundUpdate
from barnraise.training.state.training_state import TrainingState
from barnraise.training.steps.background_task import BackgroundTask

UNREADABLE = "what a member says of the hub's lease cannot be read"


class HubAnswer(NamedTuple):
    """What the hub made of it: the next version, and what to train from there."""

    state: torch.Tensor
    task: LeasedWork


class GroupHubClient:
    """``beyond`` is None on a machine that cannot speak to a hub."""

    def __init__(
        self, beyond: HubPort | None, sums: GradientReducer, data: LeasedData, state: TrainingState
    ) -> None:
        self._beyond, self._data, self._state = beyond, data, state
        self._flat = FlatParameters(state.model, sums)
        self._form = self._flat.form(data.course)
        self._base = torch.zeros(self._flat.size)
        self._began: float | None = None  # when this process got the task at hand
        self._last: LeasedWork | None = None  # what this process was given by the hub
        self._talk: BackgroundTask[HubAnswer] | None = None
        self._asked: tuple[int, LeasedWork | None] = (-1, None)  # for which step, and with which task done

    # the state

    def state_dict(self) -> dict[str, Any]:
        return {"base": self._base, "task": encode_task(self._data.task), "place": self._data.place}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self._base.copy_(found["base"])
        task = decode_task(found["task"])
        if task != self._data.task:
            self._began = None
        self._data.task, self._data.place = task, int(found["place"])

    @property
    def size(self) -> int:
        return self._flat.size

    @property
    def is_due(self) -> bool:
        """Whether the hub is to be asked before anything can be trained."""
        return self._data.is_trained

    @property
    def has_begun(self) -> bool:
        return self._data.task is not None

    def go_forward(self) -> None:
        """A commit: a step of the lease is trained."""
        self._data.go_forward()

    def take(self, answer: HubAnswer) -> int:
        """A commit: the model is the next version. Returns how many batches went by, here and elsewhere."""
        batch = self._data.course.batch
        was = self._data.task
        self._forget_talk()
        self._base.copy_(answer.state)
        self._flat.write(self._base)
        self._data.task, self._data.place = answer.task, 0
        self._began = time.monotonic()
        if was is None:
            self._state.epoch = self._data.epoch or 0
        return max(0, answer.task.covered // batch - (0 if was is None else was.covered // batch))

    # speaking

    @property
    def speaks(self) -> bool:
        return self._beyond is not None

    def speak(self, done: int, loss: Callable[[], float | None], patience_s: float) -> HubAnswer | None:
        """Ask the hub what comes after this step, if it was not asked yet; None: it has not answered."""
        asked = (done, self._data.task)
        if self._asked != asked:
            self._forget_talk()  # it was about something that others have settled meanwhile
        if self._talk is None:
            self._talk, self._asked = BackgroundTask(self._question(loss()), "barnraise-hub"), asked
        self._talk.wait(patience_s)
        return self._talk.result() if self._asked == asked and self._talk.has_ended else None

    def _forget_talk(self) -> None:
        """With its copies of the model; one that still goes on has the line to the hub, and is waited for."""
        if self._talk is not None and self._talk.has_ended:
            self._talk = None

    def _question(self, loss: float | None) -> Callable[[], HubAnswer]:
        """All of the model that it needs is copied now."""
        beyond, task, form = self._beyond, self._data.task, self._form
        assert beyond is not None
        if task is None:
            state, handed = self._flat.read(), None
        else:
            state = self._base.clone()
            took_s = time.monotonic() - self._began if self._began is not None else 0.0
            speed = self._data.leased / took_s if took_s > 0 else 0.0
            change = self._flat.change(self._base)
            if not change.isfinite().all():
                raise RunError(
                    "what was changed since the hub's last version is not finite",
                    hint="Lower the learning rate, or clip the gradient with run.clip_grad_norm.",
                )
            handed = RoundUpdate(change, self._data.leased, loss, speed)

        def ask() -> HubAnswer:
            if handed is None or task is None:
                found = beyond.begin(form, state)
            else:
                if task != self._last:
                    beyond.go_on(form, task)
                found = beyond.exchange(handed, state)
            self._data.check(found)
            self._last = found
            return HubAnswer(state, found)

        return ask


def encode_task(task: LeasedWork | None) -> bytes:
    return msgspec.msgpack.encode(task)


def decode_task(data: bytes) -> LeasedWork | None:
    return decode(_tasks, data, UNREADABLE)


def answer_of(tensors: list[torch.Tensor], size: int) -> HubAnswer:
    """From a member's result, which came as bytes; ProtocolError if it is not of this model."""
    if len(tensors) != 2 or tensors[0].numel() != 4 * size:
        raise ProtocolError("a version of the hub is not of this model")
    task = decode_task(bytes(tensors[1].numpy()))
    if task is None:
        raise ProtocolError(UNREADABLE)
    return HubAnswer(tensors[0].view(torch.float32), task)


_tasks: msgspec.msgpack.Decoder[LeasedWork | None] = msgspec.msgpack.Decoder(LeasedWork | None)
