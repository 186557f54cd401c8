"""Optional held-out validation: the loss of the model with one update alone, before the update counts.

A file of the owner's computes the loss, on samples that only the hub has. It runs in a process of its own,
because its code may be slow, fail or exit. Trials run one after the other.
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
_LOSS_HINT = (
    "It needs a function loss(parameters) that takes a dict of tensors and returns a number; docs/hub.md."
)


class HeldOutResult(msgspec.Struct, frozen=True):
    """Answer of the validation process.

    ``loss``: None if it is not finite. ``failed``: why there is no loss.
    """

    loss: float | None = None
    failed: str = ""


class HeldOutTrial:
    """Client of the process that computes the losses of ``model``.

    The process is restarted after it exits or times out.
    """

    def __init__(self, script: Path, model: Path) -> None:
        self._script, self._model = script.resolve(), model.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process that loads the owner's file. Raise HubError if the file cannot be used."""
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
        answer = self._read_result(_START_S)
        if answer.failed:
            self._stop()
            raise HubError(f"{self._script.name} cannot validate updates: {answer.failed}", hint=_LOSS_HINT)

    def loss(self) -> HeldOutResult:
        """Return the loss of the model file as it is now.

        Raise HubError if the file cannot be used any more, or the hub stops.
        """
        if self._closed:
            raise HubError("the hub is stopping", hint="Start it again with `barnraise hub up`.")
        if self._process is None or self._process.poll() is not None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: so does its answer
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self._read_result(_TRIAL_S)

    def close(self) -> None:
        """Stop the process for good. Safe to call from any thread."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it never read
                    stream.close()

    def _read_result(self, limit_s: float) -> HeldOutResult:
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
            self._stop()
            return HeldOutResult(failed=f"its process exited or took longer than {limit_s:.0f} s")
        return msgspec.json.decode(line, type=HeldOutResult)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process with its children, which would keep its pipes open."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)


class _Head(NamedTuple):
    """The newest version, its state and its loss."""

    number: int
    state: torch.Tensor
    loss: float


class HeldOutCheck:
    """Held-out validation of one hub.

    Each update is tried on the newest version, not on the version it started from.
    """

    def __init__(self, hub: Hub, script: Path) -> None:
        self._hub = hub
        self._folder = hub.directory / "tried"
        self._trial = HeldOutTrial(script, self._folder / FILE_NAME)
        self._head: _Head | None = None
        self._trial.start()

    def close(self) -> None:
        self._trial.close()

    def __call__(self, path: Path, version: int, scale: float) -> UpdateVerdict:
        """Return the verdict on an update.

        Call it from one thread at a time. Raise HubRefused, without blame, if there is no answer.
        """
        try:
            head = self._newest()
        except FileNotFoundError as error:
            raise self._failure("its files were removed by a newer version") from error
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
                raise self._failure("the loss of the model itself is not finite")
            self._head = head = _Head(versions[-1].number, state, loss)
        return head

    def _loss(self, state: torch.Tensor) -> float | None:
        write_state(self._layout, state, self._folder, {})
        try:
            answer = self._trial.loss()
        except HubError as error:
            raise self._failure(error.message) from error
        if answer.failed:
            raise self._failure(answer.failed)
        return answer.loss

    def _failure(self, why: str) -> HubRefused:
        """Log the reason for the owner, and return an error that does not contain it."""
        logger.warning("the held-out validation of an update failed: %s", why)
        words = "the hub's held-out validation failed; the reason is in the hub's log"
        hint = "The update is not at fault and will be sent again."
        return HubRefused(503, "untried", words, hint=hint, retry_s=_RETRY_S)

    @property
    def _layout(self) -> VectorLayout:
        assert self._hub.layout is not None  # an update comes after the base
        return self._hub.layout
