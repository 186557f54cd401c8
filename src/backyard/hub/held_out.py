"""The optional trial of each update before it counts: what would the model's loss be with this one alone?

The loss is computed by a file of the owner's, on samples that only the hub has, in a process of its own: its
code can take long, fail or end without the hub. Trials come one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from backyard.core.errors import HubError, HubRefused
from backyard.hub.admission import Verdict, judge_held_out
from backyard.hub.chain import steps_after
from backyard.hub.exporting import write_state
from backyard.hub.service import Hub
from backyard.hub.vectors import Form, VectorFile, add_vector

logger = logging.getLogger(__name__)
_START_S = 120.0  # torch, the owner's imports and data
_TRIAL_S = 120.0
_RETRY_S = 15.0
_MEND = "It needs a function loss(parameters) that takes a dict of tensors and returns a number; docs/hub.md."


class Answer(msgspec.Struct, frozen=True):
    """``loss``: None if it is not finite. ``failed``: why there is none."""

    loss: float | None = None
    failed: str = ""


class Trial:
    """The process that computes losses; started again after it ended or was too slow."""

    def __init__(self, script: Path) -> None:
        self._script = script.resolve()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """HubError if the file cannot be used."""
        command = [sys.executable, "-P", "-m", "backyard.hub.trying", str(self._script)]
        self._process = subprocess.Popen(
            command, cwd=self._script.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        answer = self._answer(_START_S)
        if answer.failed:
            self.close()
            raise HubError(f"{self._script.name} cannot try updates: {answer.failed}", hint=_MEND)

    def loss(self, model: Path) -> Answer:
        if self._process is None or self._process.poll() is not None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: so does its answer
            self._process.stdin.write(f"{model}\n".encode())
            self._process.stdin.flush()
        return self._answer(_TRIAL_S)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it never read
                    stream.close()

    def _answer(self, limit_s: float) -> Answer:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        in_time = threading.Timer(limit_s, process.kill)
        in_time.start()
        try:
            line = process.stdout.readline()
        finally:
            in_time.cancel()
        if not line.endswith(b"\n"):
            self.close()
            return Answer(failed=f"its process ended, or took longer than {limit_s:.0f} s")
        return msgspec.json.decode(line, type=Answer)


class _Head(NamedTuple):
    """The newest version as it was last tried."""

    number: int
    state: torch.Tensor
    loss: float


class HeldOutCheck:
    """Of one hub. Each update is tried on the newest version, whichever it begins from."""

    def __init__(self, hub: Hub, script: Path) -> None:
        self._hub, self._trial = hub, Trial(script)
        self._file = hub.directory / "tried" / "model.safetensors"
        self._head: _Head | None = None
        self._lock = threading.Lock()
        self._trial.start()

    def close(self) -> None:
        self._trial.close()

    def __call__(self, path: Path, version: int, scale: float) -> Verdict:
        """HubRefused, without blame, if there is no answer."""
        with self._lock:
            try:
                head = self._newest()
            except FileNotFoundError as error:
                raise self._untried("a version that came meanwhile has taken its files") from error
            form = self._form(self._hub.founding.terms.codec, version)
            state = head.state.clone()
            for index, values in enumerate(VectorFile(path, form).chunks()):
                state[form.slice(index)].sub_(values, alpha=scale)
            return judge_held_out(head.loss, self._loss(state))

    def _newest(self) -> _Head:
        head, hub = self._head, self._hub
        if head is None or head.number != hub.versions[-1].number:
            state = torch.zeros(self._numel)
            for step in steps_after(tuple(hub.versions), None):
                form = self._form(step.codec, step.version)
                add_vector(hub.blobs.path(step.sha256), form, state, is_base=step.kind == "base")
            number, loss = hub.versions[-1].number, self._loss(state)
            if loss is None:
                raise self._untried("the loss of the model itself is not finite")
            self._head = head = _Head(number, state, loss)
        return head

    def _loss(self, state: torch.Tensor) -> float | None:
        assert self._hub.layout is not None
        write_state(self._hub.layout, state, self._file.parent, {})
        try:
            answer = self._trial.loss(self._file)
        except HubError as error:
            raise self._untried(error.message) from error
        if answer.failed:
            raise self._untried(answer.failed)
        return answer.loss

    def _untried(self, why: str) -> HubRefused:
        logger.warning("an update could not be tried on held-out samples: %s", why)
        words = f"the hub's own check of updates failed: {why}"
        hint = "Nothing is wrong with the update: it is sent again. The hub's owner sees why in its log."
        return HubRefused(503, "untried", words, hint=hint, retry_s=_RETRY_S)

    @property
    def _numel(self) -> int:
        assert self._hub.layout is not None
        return self._hub.layout.numel

    def _form(self, codec: str, version: int) -> Form:
        return Form(self._numel, self._hub.founding.terms.chunk, codec, version)
