"""The optional trial of each update before it counts: what would the model's loss be with this one alone?

The loss is computed by a file of the owner's, on samples that only the hub has, in a process of its own: its
code can take long, fail or end without the hub. Trials come one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from barnraise.core.errors import HubError, HubRefused
from barnraise.hub.aggregation.update_checks import UpdateVerdict, judge_held_out
from barnraise.hub.protocol.messages import VectorLayout
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.export import FILE_NAME, newest_state, write_state

logger = logging.getLogger(__name__)
_START_S = 120.0  # torch, the owner's imports and data
_TRIAL_S = 120.0
_RETRY_S = 15.0
_LOSS_HINT = "It needs a function loss(parameters) that takes a dict of tensors and returns a number; docs/hub.md."


class HeldOutResult(msgspec.Struct, frozen=True):
    """``loss``: None if it is not finite. ``failed``: why there is none."""

    loss: float | None = None
    failed: str = ""


class HeldOutTrial:
    """The process that computes the losses of ``model``; started again after it ended or was too slow."""

    def __init__(self, script: Path, model: Path) -> None:
        self._script, self._model = script.resolve(), model.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """HubError if the file cannot be used."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "barnraise.hub.aggregation.held_out_process",
            str(self._script),
            str(self._model),
        ]
        self._process = subprocess.Popen(
            command,
            cwd=self._script.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the hub, which ends it with all that it has started
        )
        answer = self._answer(_START_S)
        if answer.failed:
            self._end()
            raise HubError(f"{self._script.name} cannot try updates: {answer.failed}", hint=_LOSS_HINT)

    def loss(self) -> HeldOutResult:
        """Of the model as it is now. HubError if the file cannot be used any more, or the hub ends."""
        if self._closed:
            raise HubError("the hub ends", hint="It goes on with `barnraise hub up`.")
        if self._process is None or self._process.poll() is not None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: so does its answer
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self._answer(_TRIAL_S)

    def close(self) -> None:
        """From any thread: a trial that goes on ends, and none begins."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it never read
                    stream.close()

    def _answer(self, limit_s: float) -> HeldOutResult:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        in_time = threading.Timer(limit_s, _kill, (process,))
        in_time.start()
        try:
            line = process.stdout.readline()
        finally:
            in_time.cancel()
        if not line.endswith(b"\n"):
            self._end()
            return HeldOutResult(failed=f"its process ended, or took longer than {limit_s:.0f} s")
        return msgspec.json.decode(line, type=HeldOutResult)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started, which would keep its pipes open."""
    if os.name == "nt":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)


class _Head(NamedTuple):
    """The newest version as it was last tried."""

    number: int
    state: torch.Tensor
    loss: float


class HeldOutCheck:
    """Of one hub. Each update is tried on the newest version, whichever it begins from."""

    def __init__(self, hub: Hub, script: Path) -> None:
        self._hub = hub
        self._folder = hub.directory / "tried"
        self._trial = HeldOutTrial(script, self._folder / FILE_NAME)
        self._head: _Head | None = None
        self._trial.start()

    def close(self) -> None:
        self._trial.close()

    def __call__(self, path: Path, version: int, scale: float) -> UpdateVerdict:
        """From one thread at a time. HubRefused, without blame, if there is no answer."""
        try:
            head = self._newest()
        except FileNotFoundError as error:
            raise self._untried("a version that came meanwhile has taken its files") from error
        terms = self._hub.founding.terms
        form = VectorForm(self._layout.numel, terms.chunk, terms.codec, version)
        state = head.state.clone()
        for index, values in enumerate(VectorFile(path, form).chunks()):
            state[form.slice(index)].sub_(values, alpha=scale)
        return judge_held_out(head.loss, self._loss(state))

    def _newest(self) -> _Head:
        head, hub = self._head, self._hub
        versions = tuple(hub.versions)  # more may come meanwhile
        if head is None or head.number != versions[-1].number:
            state = newest_state(hub.blobs, versions, hub.founding.terms, self._layout)
            loss = self._loss(state)
            if loss is None:
                raise self._untried("the loss of the model itself is not finite")
            self._head = head = _Head(versions[-1].number, state, loss)
        return head

    def _loss(self, state: torch.Tensor) -> float | None:
        write_state(self._layout, state, self._folder, {})
        try:
            answer = self._trial.loss()
        except HubError as error:
            raise self._untried(error.message) from error
        if answer.failed:
            raise self._untried(answer.failed)
        return answer.loss

    def _untried(self, why: str) -> HubRefused:
        """The owner's words are for the owner."""
        logger.warning("an update could not be tried on held-out samples: %s", why)
        words = "the hub's own check of updates failed; its owner sees why in its log"
        hint = "Nothing is wrong with the update: it is sent again."
        return HubRefused(503, "untried", words, hint=hint, retry_s=_RETRY_S)

    @property
    def _layout(self) -> VectorLayout:
        assert self._hub.layout is not None  # an update comes after the base
        return self._hub.layout
