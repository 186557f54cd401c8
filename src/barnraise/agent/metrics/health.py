"""Health of an agent: which facts about it are problems, and how bad they are together. Pure."""

from __future__ import annotations

from typing import NamedTuple

from barnraise.agent.diagnostics.checks import ENOUGH_FREE_BYTES, LEAST_FREE_BYTES
from barnraise.agent_client.metrics.requests import HealthState
from barnraise.core.units import format_size


class HealthFacts(NamedTuple):
    """Facts about an agent that a monitor should know.

    ``blocked``: why the cluster cannot decide here. ``silent``: machines of the view that do not answer.
    ``free_bytes``: of the disk with the state directory; None if it cannot be read.
    """

    blocked: str
    silent: tuple[str, ...]
    free_bytes: int | None


class HealthVerdict(NamedTuple):
    """State of an agent, and its problems, the worst first."""

    state: HealthState
    problems: tuple[str, ...]


def judge_health(facts: HealthFacts) -> HealthVerdict:
    """Return the state of an agent. A machine that is off is no problem: people switch theirs off."""
    failing, degraded = [], []
    if facts.blocked:
        failing.append(facts.blocked)
    if facts.free_bytes is None:
        failing.append("the disk with the state directory cannot be read")
    elif facts.free_bytes < LEAST_FREE_BYTES:
        failing.append(f"{_free(facts.free_bytes)}: the agent cannot keep its decisions")
    elif facts.free_bytes < ENOUGH_FREE_BYTES:
        degraded.append(_free(facts.free_bytes))
    degraded += [f"{name} does not answer" for name in facts.silent]
    state: HealthState = "failing" if failing else "degraded" if degraded else "ok"
    return HealthVerdict(state, (*failing, *degraded))


def _free(count: int) -> str:
    return f"only {format_size(count)} are free on the disk with the state directory"
