"""Verdict about an agent's health: what makes it failing, and what only needs a look."""

from __future__ import annotations

import pytest

from barnraise.agent.diagnostics.checks import ENOUGH_FREE_BYTES, LEAST_FREE_BYTES
from barnraise.agent.metrics.health import HealthFacts, judge_health

FINE = HealthFacts(blocked="", silent=(), free_bytes=ENOUGH_FREE_BYTES)
BLOCKED = "waiting for pc: there is no majority without it"


@pytest.mark.parametrize(
    ("facts", "state", "problems"),
    [
        (FINE, "ok", []),
        (FINE._replace(silent=("pc", "nas")), "degraded", ["pc does not answer", "nas does not answer"]),
        (FINE._replace(free_bytes=ENOUGH_FREE_BYTES - 1), "degraded", ["only 2 GiB are free"]),
        (FINE._replace(free_bytes=LEAST_FREE_BYTES - 1), "failing", ["cannot keep its decisions"]),
        (FINE._replace(free_bytes=None), "failing", ["cannot be read"]),
        (FINE._replace(blocked=BLOCKED, silent=("pc",)), "failing", [BLOCKED, "pc does not answer"]),
    ],
)
def test_problems_and_state(facts: HealthFacts, state: str, problems: list[str]) -> None:
    verdict = judge_health(facts)
    assert verdict.state == state
    assert len(verdict.problems) == len(problems)
    assert all(part in problem for part, problem in zip(problems, verdict.problems, strict=True))
