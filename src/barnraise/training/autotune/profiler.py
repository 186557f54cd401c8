"""A dry run: the first steps are measured, written down for the command line, and the script ends.

Each worker times its own units. At every commit the members tell each other what they have so far; when the
main member has seen enough it writes all of it into the run's folder, and everybody ends after the same step.
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

_ENOUGH_S = 3.0  # of steps after the first
_MOST_STEPS = 64


def is_dry_run() -> bool:
    return bool(os.environ.get(DRY_RUN))


def profiled(session: Session, batches: Iterable[Any]) -> Iterable[Any]:
    """The batches as they are; in a dry run, a few steps of them, after which the script ends."""
    return StepProfiler(session, batches) if is_dry_run() else batches


class _Tally:
    """Samples, and the seconds that they took."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0

    def add(self, samples: int, seconds: float) -> None:
        self.samples += samples
        self.seconds += max(0.0, seconds)


class StepProfiler:
    """Stands where the batches stood."""

    def __init__(self, session: Session, batches: Iterable[Any]) -> None:
        self._session = session
        self._batches = batches
        self._file = Path.cwd() / PROFILE_FILE  # before the script goes elsewhere
        self._units = session._data.units(session.done)
        # In the first step things still get ready. In a unit with which a step ends, gradients travel: it
        # counts only for a member that has no other.
        self._cold, self._last, self._warm = _Tally(), _Tally(), _Tally()
        self._commits: list[float] = []
        self._applying = 0.0
        self._applied_s: list[float] = []
        session._steps.on_commit.append(self._committed)
        for optimizer in session._optimizers:
            optimizer.register_step_pre_hook(self._applies)
            optimizer.register_step_post_hook(self._applied)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError for a stream, as always

    def __iter__(self) -> Iterator[Any]:
        session = self._session
        for batch in self._batches:
            piece, done, waited = session._current, session.done, session._pace._waited_s
            begin = time.monotonic()
            yield batch
            _synchronize()
            seconds = time.monotonic() - begin - (session._pace._waited_s - waited)
            tally = self._cold if done == 0 else self._last if session.done > done else self._warm
            tally.add(piece.span.size if piece is not None else 0, seconds)
        if len(self._commits) > 1:
            self._report(self._gathered())

    def _applies(self, *_: Any) -> None:
        _synchronize()
        self._applying = time.monotonic()

    def _applied(self, *_: Any) -> None:
        _synchronize()
        self._applied_s.append(time.monotonic() - self._applying)

    def _committed(self) -> None:
        self._commits.append(time.monotonic())
        said = self._gathered()
        if not said or said[0].is_ready:
            self._report(said)

    def _gathered(self) -> list[MeasuredStep]:
        """What every member has measured; nothing if the group broke meanwhile."""
        tally = next((one for one in (self._warm, self._last) if one.samples), self._cold)
        # Of the first step, the optimizer makes its state.
        optimizers = max(1, len(self._session._optimizers))
        applied = self._applied_s[optimizers:] or self._applied_s
        word = MeasuredStep(
            node=os.environ.get("BARNRAISE_NODE", ""),
            device=os.environ.get("BARNRAISE_DEVICE", "cpu"),
            samples=tally.samples,
            seconds=tally.seconds,
            is_warm=tally is not self._cold,
            optimizer_s=statistics.median(applied) * optimizers if applied else 0.0,
            is_ready=self._commits[-1] - self._commits[0] >= _ENOUGH_S or len(self._commits) >= _MOST_STEPS,
        )
        try:
            return [decode_measured(data) for data in self._session._circle.gather(encode(word))]
        except BarnraiseError as error:
            log.warning("the dry run ends without figures: %s", error.message)
            return []

    def _report(self, said: list[MeasuredStep]) -> None:
        """The main member writes it down; the script ends here, wherever it is."""
        session = self._session
        if said and session.is_main and session._model is not None:
            trained = session._sums.parameters
            known = {id(one) for one in trained}
            others = [one for one in session._model.parameters() if id(one) not in known]
            profile = StepProfile(
                parameters=sum(one.numel() for one in trained),
                gradient_bytes=sum(flat.nbytes for flat in session._sums.local.values()),
                frozen_bytes=sum(one.nbytes for one in others),
                is_lora=any("lora_" in name for name, _ in session._model.named_parameters()),
                batch=sum(unit.size for unit in self._units),
                unit=max(unit.size for unit in self._units),
                workers=tuple(said),
                steps_s=tuple(b - a for a, b in zip(self._commits, self._commits[1:], strict=False)),
            )
            self._file.write_bytes(encode(profile))
        raise SystemExit(0)


def _synchronize() -> None:
    """Devices compute after the call that asked them to has returned."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
