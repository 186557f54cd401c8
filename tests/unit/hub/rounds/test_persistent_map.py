"""Persistent maps: no version ever changes, and the cost of a decision does not grow with the members."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.hub.protocol.messages import (
    HubDataOrder,
    Lease,
    RoundConfig,
    SampleSpan,
    UpdateDeclaration,
    VersionStep,
    decode_message,
    encode_message,
)
from barnraise.hub.region.region import declare_update
from barnraise.hub.rounds.leases import ActiveLease, PendingUpdate, median_without
from barnraise.hub.rounds.persistent_map import LeaseTable, PersistentMap
from barnraise.hub.rounds.sample_pool import SamplePool, return_samples, subtract_spans
from barnraise.hub.rounds.state_machine import (
    GrantLease,
    LeaseRequested,
    RoundCommitted,
    RoundState,
    RunFounded,
    UpdateAccepted,
    UploadProgressed,
    decide,
    next_deadline,
)
from barnraise.hub.storage.log import Contribution
from tests.unit.processor_time import least_cpu_s

_SOME = st.integers(0, 20)
_CHANGES = st.lists(st.tuples(_SOME, st.integers(0, 5), st.none() | _SOME), max_size=40)
_LEASES = st.lists(st.tuples(_SOME, st.sampled_from("abcde"), st.none() | _SOME, _SOME), max_size=40)


@given(_CHANGES)
def test_persistent_map_versions_never_change(changes: list[tuple[int, int, int | None]]) -> None:
    versions: list[tuple[PersistentMap[int, int], dict[int, int]]] = [(PersistentMap(), {})]
    for place, key, value in changes:
        table, copy = versions[place % len(versions)]
        if value is None:
            after = {old_key: old_value for old_key, old_value in copy.items() if old_key != key}
            versions.append((table.without([key]), after))
        else:
            versions.append((table.put(key, value), {**copy, key: value}))
    for table, copy in versions:
        assert table == copy
        assert len(table) == len(copy)
        assert sorted(table.items()) == sorted(copy.items())


def lent(name: str, overdue: float, void: float) -> ActiveLease:
    return ActiveLease(name, f"node {name}", 0, (SampleSpan(0, 0, 1),), 1.0, overdue, void)


@given(_LEASES, st.lists(_SOME, min_size=1, max_size=5))
def test_leases_become_overdue_and_void_in_time(
    changes: list[tuple[int, str, int | None, int]], moments: list[int]
) -> None:
    versions: list[tuple[LeaseTable, dict[str, ActiveLease]]] = [(LeaseTable(), {})]
    for place, name, overdue, more in changes:
        table, copy = versions[place % len(versions)]
        if overdue is None:
            after = {old_name: old_lease for old_name, old_lease in copy.items() if old_name != name}
            versions.append((table.without([name]), after))
        else:
            lease = lent(name, overdue, overdue + more)
            versions.append((table.put(name, lease), {**copy, name: lease}))
        for now in moments:
            table, copy = versions[(place * 7 + now) % len(versions)]
            assert table.expected(now) == sum(active.overdue > now for active in copy.values())
            expired = {active.id for active in copy.values() if active.void <= now}
            assert {active.id for active in table.expired(now)} == expired
            assert {active.id for active in table.expired(now)} == expired, "asking changes nothing"
            deadlines = [active.void for active in copy.values()]
            deadlines += [active.overdue for active in copy.values() if active.overdue > now]
            assert table.next_deadline(now) == min(deadlines, default=None)
            for active in copy.values():
                assert table.of_member(active.node) == active


def test_median_without_excludes_own_value() -> None:
    assert median_without((), 5) == 0
    assert median_without((5,), 5) == 0
    assert median_without((5, 7), 5) == 7
    assert median_without((5, 7), 7) == 5
    assert median_without((1, 5, 7), 0) == 5
    assert median_without((1, 5, 7, 9), 9) == 5
    assert median_without((1, 5, 7, 9), 1) == 7


def round_s(members: int) -> float:
    """Return the CPU seconds per member in a round."""
    course = HubDataOrder(samples=1 << 40, batch=32)
    state = decide(RoundState(terms=RoundConfig()), RunFounded(course), 0.0).state
    begin = time.process_time()
    for version in range(2):
        leases, now = [], 100.0 * version
        for member in range(members):
            decision = decide(state, LeaseRequested(f"n{member}", f"{version}.{member}", version, 2.0), now)
            state = decision.state
            leases += [effect.lease for effect in decision.effects if isinstance(effect, GrantLease)]
        for lease in leases:
            state = decide(state, UploadProgressed(lease.id), now + 10).state
            next_deadline(state, now + 10)
        for lease in leases:
            update = PendingUpdate(lease.id, lease.node, lease.id, version, lease.samples - lease.samples % 3)
            state = decide(state, UpdateAccepted(update), now + 11).state
        state = decide(state, RoundCommitted(version + 1), now + 12).state
    assert len(state.usual) == members
    return (time.process_time() - begin) / members


def test_decision_cost_per_member_is_constant() -> None:
    """With copies of all leases at every step, ten times as many members cost ten times as much each."""
    few, many = (min(round_s(members) for _ in range(3)) for members in (200, 2000))
    assert many < 4 * few


def test_subtract_spans_returns_rest() -> None:
    spans = [SampleSpan(0, 10 * index, 10 * index + 10) for index in range(2000)]
    taken = [SampleSpan(0, 10 * index + 2, 10 * index + 5) for index in range(2000)]
    rest = subtract_spans(spans, taken)
    assert least_cpu_s(lambda: subtract_spans(spans, taken), 3) < 1.0, "each with each would be four million"
    assert rest is not None
    assert sum(span.size for span in rest) == 2000 * 7
    # Adjacent spans count as a single span, because a region declares the spans of its members side by side.
    assert subtract_spans([SampleSpan(0, 0, 4), SampleSpan(0, 4, 9)], [SampleSpan(0, 2, 6)]) == [
        SampleSpan(0, 0, 2),
        SampleSpan(0, 6, 9),
    ]
    assert return_samples(SamplePool(0, (SampleSpan(0, 0, 5),)), [SampleSpan(0, 9, 9)]) == SamplePool(
        0, (SampleSpan(0, 0, 5),)
    )


@pytest.mark.parametrize("leaves", [100, 10_000])
def test_region_of_thousands_declares_spans_in_one_message(leaves: int) -> None:
    parts = [
        Contribution(
            node=f"n{leaf}",
            lease=f"{leaf:032x}",
            samples=30,
            spans=(SampleSpan(0, 30 * leaf, 30 * leaf + 30),),
            behind=0,
            weight=30.0,
            scale=1.0,
            sha256=f"{leaf:064x}",
        )
        for leaf in reversed(range(leaves))
    ]
    lease = Lease(
        id="0" * 32, version=3, spans=(SampleSpan(0, 0, 30 * leaves),), steps=1, seconds=1.0, void_s=1.0
    )
    declaration = declare_update(VersionStep("delta", 3, "0" * 64, 10, "int8"), lease, parts)
    assert decode_message(UpdateDeclaration, encode_message(declaration)) == declaration
    assert (declaration.samples, declaration.trained) == (30 * leaves, lease.spans)


def test_subtract_spans_refuses_negative_spans() -> None:
    lent = [SampleSpan(0, 0, 20)]
    assert subtract_spans(lent, [SampleSpan(0, 0, 20)]) is not None
    assert subtract_spans(lent, [SampleSpan(0, 0, 20), SampleSpan(0, 30, 40), SampleSpan(0, 60, 50)]) is None
    assert subtract_spans(lent, [SampleSpan(0, 5, 5)]) is None
