"""Decision which runs and environments of this machine can be removed, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from barnraise.core.units import counted

_DAY_S = 86400.0
UNUSED_S = 7 * _DAY_S


class StoredRun(NamedTuple):
    """Run that has files on this machine. ``step``: its newest complete checkpoint here, 0 without one."""

    run: str
    is_active: bool
    has_succeeded: bool
    step: int
    changed_at: float
    resumes: tuple[str, ...] = ()


class CleanChoice(NamedTuple):
    """Run or environment, whether it is removed, and the reason."""

    name: str
    is_removed: bool
    reason: str


def choose_runs(
    stored: Sequence[StoredRun], *, only: str = "", everything: bool = False
) -> list[CleanChoice]:
    """Choose the runs to remove.

    Active runs stay, and the runs that they continue. Without ``everything``, runs that did not succeed and
    have a checkpoint stay, and the newest checkpoint of all. ``only`` chooses one run and no other.
    """
    kept = {item.run: "it is active" for item in stored if item.is_active}
    for item in stored:
        for earlier in item.resumes if item.is_active else ():
            kept.setdefault(earlier, f"run {item.run} continues it")
    if not only and not everything:
        kept |= _resumable(stored, kept)
    choices = []
    for item in stored:
        if item.run in kept:
            choices.append(CleanChoice(item.run, False, kept[item.run]))
        elif only and item.run != only:
            choices.append(CleanChoice(item.run, False, "another run was named"))
        else:
            choices.append(CleanChoice(item.run, True, "it has ended"))
    return choices


def _resumable(stored: Sequence[StoredRun], kept: Mapping[str, str]) -> dict[str, str]:
    """Return the runs whose checkpoints a person may still want, with the reason."""
    ended = [item for item in stored if item.run not in kept]
    reasons = {item.run: "it can be resumed" for item in ended if item.step and not item.has_succeeded}
    newest = max((item for item in ended if item.step), key=lambda item: item.changed_at, default=None)
    if newest is not None:
        reasons.setdefault(newest.run, "it has the newest checkpoint")
    for item in ended:  # one that never saved is resumed from the checkpoint of an earlier run
        if not item.step and not item.has_succeeded:
            earlier = next((run for run in item.resumes if _step(ended, run)), None)
            if earlier is not None:
                reasons.setdefault(earlier, f"run {item.run} can be resumed from it")
    return reasons


def _step(stored: Sequence[StoredRun], run: str) -> int:
    return next((item.step for item in stored if item.run == run), 0)


def choose_environments(
    used_at: Mapping[str, float], active: Iterable[str], now: float, *, everything: bool = False
) -> list[CleanChoice]:
    """Choose the environments to remove: those that no active run uses, if not used for a week."""
    in_use = set(active)
    choices = []
    for key, at in sorted(used_at.items()):
        idle_s = max(0.0, now - at)
        if key in in_use:
            choices.append(CleanChoice(key, False, "an active run uses it"))
        elif not at:
            choices.append(CleanChoice(key, True, "its build did not finish"))
        elif everything or idle_s > UNUSED_S:
            choices.append(CleanChoice(key, True, f"not used for {counted(round(idle_s / _DAY_S), 'day')}"))
        else:
            choices.append(CleanChoice(key, False, "it was used within a week"))
    return choices


def lost_sentence(item: StoredRun) -> str:
    """Return the sentence about a checkpoint that is lost; empty without one."""
    if not item.step:
        return ""
    return (
        f"run {item.run} can then no longer be resumed or exported from this machine "
        f"(its checkpoint of step {item.step} is removed)"
    )
