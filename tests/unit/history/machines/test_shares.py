"""Shares of all samples of a run, also of a machine that was away for a while."""

from __future__ import annotations

import pytest

from barnraise.history.entries import MembershipChange
from barnraise.history.machines.shares import with_recent_shares, with_total_shares
from barnraise.history.view import MachineView

A, B = b"\x0a", b"\x0b"
MACHINES = tuple(MachineView(node=node.hex(), name=node.hex(), state="trains") for node in (A, B))


def _samples_between(start: float, end: float) -> int:
    return round(10 * (end - max(0.0, start)))


def test_share_of_a_window_counts_by_its_samples() -> None:
    readings = {A: [(30.0, 0.5), (40.0, 1.0)], B: [(30.0, 0.5)]}
    desk, nas = with_total_shares(MACHINES, readings, [], _samples_between)
    assert desk.share == pytest.approx((150 + 100) / 400)
    assert nas.share == pytest.approx(150 / 400)


def test_time_away_is_not_in_a_share() -> None:
    readings = {A: [(10.0, 0.5), (50.0, 1.0), (60.0, 0.5)], B: [(10.0, 0.5), (60.0, 0.5)]}
    _, nas = with_total_shares(MACHINES, readings, [MembershipChange(50, B, "recovered")], _samples_between)
    assert nas.share == pytest.approx((50 + 50) / 600)


def test_recent_shares_and_speeds_add_up() -> None:
    machines = [MachineView(node="a", name="a", state="trains", share=0.4)]
    machines += [MachineView(node="b", name="b", state="trains", share=0.4)]
    machines += [MachineView(node="c", name="c", state="joining")]
    desk, nas, mac = with_recent_shares(machines, 200.0)
    assert (desk.share, nas.share, mac.share) == (0.5, 0.5, None)
    assert (desk.trained_per_s, nas.trained_per_s, mac.trained_per_s) == (100.0, 100.0, None)
