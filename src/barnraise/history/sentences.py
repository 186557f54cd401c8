"""Sentences about a run: its headline and its events in plain words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.history.entries import ChangeKind
from barnraise.history.view import MachineView, PlanView

_CHANGES: dict[ChangeKind, str] = {
    "joining": "{name} is joining",
    "joined": "{name} joined",
    "left": "{name} left",
    "paused": "{name} is paused",
    "resumed": "{name} trains again",
    "evicted": "{name} was evicted",
    "died": "{name} died",
    "recovered": "{name} has recovered and trains again",
    "refused": "{name} does not take part",
}
_STATES = {
    "joining": "{name} is joining",
    "paused": "{name} is paused",
    "left": "{name} has left",
    "evicted": "{name} was evicted",
    "died": "{name} has died",
    "refused": "{name} does not take part",
}
_MOST_NAMED = 3


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Return a time in its two largest units: ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``1 d 4 h``."""
    whole = max(0, round(seconds))
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def because(sentence: str, reason: str) -> str:
    """Return a sentence with its reason after a colon."""
    return f"{sentence}: {reason}" if reason else sentence


def plan_reason(plan: PlanView) -> str:
    """Return the reason of a plan without the plan's name, with which planners begin it."""
    return plan.reason.removeprefix(plan.name).lstrip(".: ")


def change_text(change: ChangeKind, name: str, reason: str) -> str:
    """Return a change of the machines in words."""
    return because(_CHANGES[change].format(name=name), reason)


def running_headline(machines: Sequence[MachineView], *, steps: int) -> str:
    """Return what a run does now: "2 of 3 machines train; nas is paused: its link slows the others"."""
    training = [machine for machine in machines if machine.state == "trains"]
    others = [machine for machine in machines if machine.state in _STATES]
    if not steps:
        return f"{counted(len(training or machines), 'machine')} prepare the first step".replace(
            "1 machine prepare", "1 machine prepares"
        )
    if not others:
        count = len(training)
        start = "1 machine trains" if count == 1 else f"all {count} machines train"
    else:
        verb = "trains" if len(training) == 1 else "train"
        start = f"{len(training)} of {len(machines)} machines {verb}"
    parts = [because(_STATES[other.state].format(name=other.name), other.state_reason) for other in others]
    if len(parts) > _MOST_NAMED:
        left = len(parts) - _MOST_NAMED + 1
        parts = [*parts[: _MOST_NAMED - 1], f"{counted(left, 'other')} do not train"]
    return "; ".join([start, *parts])


def ended_headline(state: str, outcome: str, *, steps: str, elapsed_s: float) -> str:
    """Return how a run ended: "finished after 600 steps in 20 min 4 s"."""
    took = f"after {steps} in {duration(elapsed_s)}"
    if state == "ended":
        return f"finished {took}"
    return because(f"{'stopped' if state == 'stopped' else 'failed'} {took}", outcome)
