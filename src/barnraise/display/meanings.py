"""Meanings of the words that all displays use for times and shares. Pure."""

from __future__ import annotations

from barnraise.history.sentences import counted, listed
from barnraise.history.view import PlanView, RunView

PHASE_MEANINGS = (
    "data: loading samples. compute: the model, forward and backward. communication: summing gradients, with "
    "waiting for slower machines. vote: all machines agree that the step counts. other: the rest. "
    "activations: waiting for those of other machines, of a split model. A dash: no plan predicts it."
)


def share_meaning(view: RunView) -> str:
    """Return what the samples per second and the share of a machine mean."""
    if view.ended_at is not None:
        return "share: of all samples of the run."
    return "samples/s: its part of the run's samples per second; share: of the samples of the last 15 s."


def recent_meaning(view: RunView) -> str:
    """Return which steps the speed, the time of a step and the time left are means of."""
    return f"mean of the newest {counted(view.recent_steps, view.counts)}" if view.recent_steps else ""


def plan_title(plan: PlanView) -> str:
    """Return the machines of a plan and how they synchronize."""
    if not plan.shares or not plan.sync:
        return plan.name
    return f"{listed(list(plan.shares))}: {plan.sync}"
