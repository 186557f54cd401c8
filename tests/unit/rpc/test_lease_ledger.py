"""An object lives exactly as long as some rank has a lease on it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from barnraise.rpc.lease_ledger import LeaseLedger


def test_object_is_freed_with_its_last_lease() -> None:
    ledger = LeaseLedger()
    assert ledger.create(7, 1) is None
    assert ledger.grant(7, 2) is None
    assert ledger.grant(7, 2) is None
    assert not ledger.release(7, 1)
    assert not ledger.release(7, 2)
    assert ledger.release(7, 2)
    assert 7 not in ledger
    assert ledger.leases == 0


def test_handed_on_reference_outlives_that_of_its_sender() -> None:
    ledger = LeaseLedger()
    ledger.create(0, 1)
    ledger.grant(0, 2)
    assert ledger.lose(1) == []
    assert ledger.holds(0, 2)
    assert not ledger.holds(0, 1)
    assert ledger.lose(2) == [0]


def test_lost_rank_gets_no_lease_any_more() -> None:
    ledger = LeaseLedger()
    ledger.create(0, 1)
    ledger.lose(2)
    assert ledger.grant(0, 2) == "rank 2 is lost"
    assert ledger.create(1, 2) == "rank 2 is lost"
    assert 1 not in ledger


def test_freed_object_gets_no_lease_any_more() -> None:
    ledger = LeaseLedger()
    ledger.create(0, 1)
    ledger.release(0, 1)
    assert ledger.grant(0, 2) == "all references to the object are released"


def test_release_without_lease_changes_nothing() -> None:
    ledger = LeaseLedger()
    ledger.create(0, 1)
    assert not ledger.release(0, 2)
    assert not ledger.release(5, 1)
    assert ledger.holds(0, 1)
    assert ledger.held_by(1) == 1


_RANKS = st.integers(0, 3)
_EVENTS = st.one_of(
    st.tuples(st.just("create"), st.integers(0, 4), _RANKS),
    st.tuples(st.just("grant"), st.integers(0, 4), _RANKS),
    st.tuples(st.just("release"), st.integers(0, 4), _RANKS),
    st.tuples(st.just("lose"), st.just(0), _RANKS),
)


@given(st.lists(_EVENTS, max_size=60))
def test_ledger_agrees_with_a_plain_count(events: list[tuple[str, int, int]]) -> None:
    """Every object has a lease, and every lease that was given and not taken back is counted."""
    ledger = LeaseLedger()
    leases: Counter[tuple[int, int]] = Counter()
    lost: set[int] = set()
    known: set[int] = set()
    for kind, serial, rank in events:
        alive = {number for number, _ in +leases}
        if kind == "create" and serial not in known:
            known.add(serial)
            if ledger.create(serial, rank) is None:
                leases[serial, rank] += 1
            assert (serial in ledger) == (rank not in lost)
        elif kind == "grant":
            granted = ledger.grant(serial, rank) is None
            assert granted == (serial in alive and rank not in lost)
            leases[serial, rank] += granted
        elif kind == "release":
            is_last = leases.total() and {key for key in +leases if key[0] == serial} == {(serial, rank)}
            freed = ledger.release(serial, rank)
            assert freed == bool(is_last and leases[serial, rank] == 1)
            leases[serial, rank] = max(0, leases[serial, rank] - 1)
        elif kind == "lose":
            lost.add(rank)
            leases = Counter({key: count for key, count in leases.items() if key[1] != rank})
            freed_now = ledger.lose(rank)
            assert set(freed_now) == alive - {number for number, _ in +leases}
        assert ledger.leases == leases.total()
        assert {number for number in range(5) if number in ledger} == {number for number, _ in +leases}
