"""A removed owner that keeps its key and its messages, against machines that slept during the removal.

``benchmarks.simulation.membership.removed_owner`` replays a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from barnraise.identity.trust import TrustLog
from barnraise.membership import history
from barnraise.membership.history import History
from barnraise.membership.node import MembershipNode
from barnraise.membership.peer_table import PeerTable
from benchmarks.simulation.membership.removed_owner import run_many, run_schedule

_SABOTEURS = 150


def _faults(count: int = _SABOTEURS) -> Iterator[str]:
    return (fault for seed in range(count) if (fault := run_schedule(seed).fault) is not None)


def _trust_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "check_link", lambda *arguments: None)


def _trust_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "_check_endorsed", lambda *arguments: None)


def _forget_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrustLog, "barring", lambda log, nodes: log)
    monkeypatch.setattr(History, "_check_declarers", lambda *arguments: None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_removed_owner_in_ten_thousand_schedules_never_returns(seeds: Callable[[int], Iterable[int]]) -> None:
    outcomes = run_many(list(seeds(10_000)))
    faults = [outcome for outcome in outcomes if outcome.fault is not None]
    assert not faults, [
        f"python -m benchmarks.simulation.membership.removed_owner --verbose --seed {outcome.seed}"
        for outcome in faults
    ]
    attacked = [outcome for outcome in outcomes if outcome.moves and not outcome.granted]
    assert len(attacked) > len(outcomes) / 2, "too few schedules test anything"


def test_removed_owner_in_few_schedules_never_returns() -> None:
    assert list(_faults(30)) == []


def test_seed_determines_the_schedule() -> None:
    assert [run_schedule(seed) for seed in range(5)] == [run_schedule(seed) for seed in range(5)]


def test_believing_any_branch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules can fail: without proof of decisions a removed owner returns everywhere."""
    _trust_signatures(monkeypatch)
    _trust_branches(monkeypatch)
    _forget_removals(monkeypatch)
    faults = list(_faults(60))
    assert any("takes the removed owner back" in fault for fault in faults)
    assert any("admits the second machine" in fault for fault in faults)


@pytest.mark.slow
def test_missing_signatures_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _trust_signatures(monkeypatch)
    assert any(_faults())


@pytest.mark.slow
def test_branch_that_one_machine_declares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _trust_branches(monkeypatch)
    assert any(_faults())


@pytest.mark.slow
def test_orders_without_a_current_quorum_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MembershipNode, "is_current", lambda member, now: member.is_member)
    assert any("orders" in fault for fault in _faults())


@pytest.mark.slow
def test_old_heartbeats_that_confirm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat from before the sleep must not confirm a view."""

    def stale(table: PeerTable, node: bytes, now: float) -> object:
        return table.peers[node].beat if node in table.peers else None

    monkeypatch.setattr(PeerTable, "fresh_beat", stale)
    assert any(_faults())
