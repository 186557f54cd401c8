"""Profiler of a dry run: measures the first steps, writes the profile, and ends the script.

Each worker times its own micro-batches. At every commit the workers exchange their measurements. When rank 0
has enough, it writes the profile into the run's folder, and all workers exit after the same step.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from barnraise.agent_client.profile import (
    DRY_RUN,
    PROFILE_FILE,
    MeasuredStep,
    StepProfile,
    decode_measured,
    encode,
)
from barnraise.core.errors import BarnraiseError

if TYPE_CHECKING:
    from barnraise.training.session import Session

log = logging.getLogger("barnraise.training")

_ENOUGH_S = 3.0  # of steps after the first one
_MAX_STEPS = 64


def is_dry_run() -> bool:
    """Return True in a worker of a dry run."""
    return bool(os.environ.get(DRY_RUN))


def profiled(session: Session, batches: Iterable[Any]) -> Iterable[Any]:
    """Return the batches; in a dry run, wrapped by a profiler that ends the script."""
    return StepProfiler(session, batches) if is_dry_run() else batches


class _Tally:
    """Sum of samples and seconds."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0

    def add(self, samples: int, seconds: float) -> None:
        self.samples += samples
        self.seconds += max(0.0, seconds)


class StepProfiler:
    """Iterable over the batches that measures them."""

    def __init__(self, session: Session, batches: Iterable[Any]) -> None:
        self._session = session
        self._batches = batches
        self._file = Path.cwd() / PROFILE_FILE  # before the script changes the directory
        self._microbatches = session._data.microbatches(session.done)
        # The first step includes warm-up. A step's last micro-batch also sends gradients, so it counts only
        # for a worker that has no other.
        self._cold, self._last, self._warm = _Tally(), _Tally(), _Tally()
        self._commits: list[float] = []
        self._step_start = 0.0
        self._optimizer_s: list[float] = []
        session._step_loop.on_commit.append(self._on_commit)
        for optimizer in session._optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError for a stream, as always

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield self._measured(batch)
        if len(self._commits) > 1:
            self._report(self._exchange())

    def _measured(self, batch: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of a batch, and measure them."""
        session = self._session
        for microbatch in batch:
            part, done, waited = session._current, session.done, session._throughput.waited_s
            start = time.perf_counter()
            yield microbatch
            _synchronize()
            seconds = time.perf_counter() - start - (session._throughput.waited_s - waited)
            tally = self._cold if done == 0 else self._last if session.done > done else self._warm
            tally.add(part.span.size if part is not None else 0, seconds)

    def _before_step(self, *_: Any) -> None:
        _synchronize()
        self._step_start = time.perf_counter()

    def _after_step(self, *_: Any) -> None:
        _synchronize()
        self._optimizer_s.append(time.perf_counter() - self._step_start)

    def _on_commit(self) -> None:
        self._commits.append(time.perf_counter())
        measured = self._exchange()
        if not measured or measured[0].is_ready:
            self._report(measured)

    def _exchange(self) -> list[MeasuredStep]:
        """Return the measurements of all workers; empty if the group failed."""
        tally = next((candidate for candidate in (self._warm, self._last) if candidate.samples), self._cold)
        # In its first step an optimizer creates its state.
        optimizers = max(1, len(self._session._optimizers))
        applied = self._optimizer_s[optimizers:] or self._optimizer_s
        own = MeasuredStep(
            node=os.environ.get("BARNRAISE_NODE", ""),
            device=os.environ.get("BARNRAISE_DEVICE", "cpu"),
            samples=tally.samples,
            seconds=tally.seconds,
            is_warm=tally is not self._cold,
            optimizer_s=statistics.median(applied) * optimizers if applied else 0.0,
            is_ready=self._commits[-1] - self._commits[0] >= _ENOUGH_S or len(self._commits) >= _MAX_STEPS,
        )
        try:
            messages = self._session._manager.group.all_gather_bytes(encode(own))
            return [decode_measured(message) for message in messages]
        except BarnraiseError as error:
            log.warning("the dry run ends without a profile: %s", error.message)
            return []

    def _report(self, measured: list[MeasuredStep]) -> None:
        """Write the profile on rank 0, and exit the script."""
        session = self._session
        if measured and session.is_main and session._model is not None:
            trained = session._reducer.parameters
            known = {id(parameter) for parameter in trained}
            others = [parameter for parameter in session._model.parameters() if id(parameter) not in known]
            profile = StepProfile(
                parameters=sum(parameter.numel() for parameter in trained),
                gradient_bytes=sum(flat.nbytes for flat in session._reducer.local.values()),
                frozen_bytes=sum(parameter.nbytes for parameter in others),
                is_lora=any("lora_" in name for name, _ in session._model.named_parameters()),
                batch=sum(unit.size for unit in self._microbatches),
                unit=max(unit.size for unit in self._microbatches),
                workers=tuple(measured),
                steps_s=tuple(b - a for a, b in zip(self._commits, self._commits[1:], strict=False)),
            )
            self._file.write_bytes(encode(profile))
        raise SystemExit(0)


def _synchronize() -> None:
    """Wait for the device, which computes asynchronously."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
