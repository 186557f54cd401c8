"""Limits of a machine: when runs may use it, and what happens to those that may not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from barnraise.agent.limits.policy import HostConditions, choose_pause_action, is_expired, pause_reason
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.runs.record import RunRecord, WorkerSlot

NOON = datetime(2026, 5, 5, 12, 0, tzinfo=UTC)
ME, OTHER = bytes(32), bytes([1]) * 32


@pytest.mark.parametrize(
    ("limits", "conditions", "of_others", "of_own"),
    [
        ({}, {}, "", ""),
        ({"paused": True}, {}, "its user paused it", "its user paused it"),
        ({"paused": True, "paused_until": NOON.timestamp() + 5400}, {}, "until 13:30", "until 13:30"),
        ({"paused": True, "paused_until": NOON.timestamp() + 86400}, {}, "until 2026-05-06 12:00", "12:00"),
        ({"paused": True, "paused_until": NOON.timestamp()}, {}, "", ""),
        ({"hours": "22:00-07:00"}, {}, "from 22:00 to 07:00 only", ""),
        ({"hours": "11:00-13:00"}, {}, "", ""),
        ({}, {"on_battery": True}, "battery", ""),
        ({"battery": "allow"}, {"on_battery": True}, "", ""),
        ({}, {"metered": True}, "metered", ""),
        ({"metered": "allow"}, {"metered": True}, "", ""),
    ],
)
def test_reason_against_a_run_depends_on_its_starter(
    limits: Any, conditions: Any, of_others: str, of_own: str
) -> None:
    chosen, host = MachineLimits(**limits), HostConditions(NOON, **conditions)
    for is_own_run, expected in ((False, of_others), (True, of_own)):
        reason = pause_reason(chosen, host, is_own_run=is_own_run)
        assert expected in reason
        assert bool(reason) == bool(expected)


def test_pause_without_end_never_expires() -> None:
    assert not is_expired(MachineLimits(paused=True), 1e11)
    assert is_expired(MachineLimits(paused=True, paused_until=100.0), 100.0)
    assert not is_expired(MachineLimits(paused=True, paused_until=100.0), 99.9)


@pytest.mark.parametrize(
    ("nodes", "elastic", "action"),
    [
        ((ME, OTHER), True, "leave"),
        ((ME, OTHER), False, "keep"),
        ((ME,), True, "freeze"),
        ((ME,), False, "freeze"),
    ],
)
def test_pause_action_loses_nothing(nodes: tuple[bytes, ...], elastic: bool, action: str) -> None:
    slots = tuple(WorkerSlot(node, 0, "cpu", 1) for node in nodes)
    record = RunRecord(order=b"", signature=bytes(64), slots=slots, elastic=elastic)
    assert choose_pause_action(record, ME).action == action
