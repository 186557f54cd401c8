"""State machine of the rounds: each sample counts once if members vanish, and rounds close by the rule."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig, SampleSpan
from barnraise.hub.rounds.grace_window import LEAST
from barnraise.hub.rounds.leases import PendingUpdate
from barnraise.hub.rounds.persistent_map import PersistentMap
from barnraise.hub.rounds.sample_pool import SamplePool, return_samples, take_samples
from barnraise.hub.rounds.state_machine import (
    ClockTick,
    DropUpdate,
    GrantLease,
    LeaseAbandoned,
    LeaseRequested,
    MergeFailed,
    MergeRound,
    ParentFinished,
    QueueUpdate,
    RefuseRequest,
    ReleaseLease,
    RoundCommitted,
    RoundState,
    RunFounded,
    SamplesSupplied,
    UpdateAccepted,
    UploadProgressed,
    decide,
    next_deadline,
    staleness_weight,
)
from barnraise.hub.server.status import describe_wait

TERMS = RoundConfig(round_s=10.0, grace=0.5, quorum=0.6, stale_limit=1, first_batches=2)
COURSE = HubDataOrder(samples=100, batch=5, epochs=2)


class Table:
    """State of a hub, with short methods for its events."""

    def __init__(self, terms: RoundConfig = TERMS, course: HubDataOrder = COURSE) -> None:
        self.state = decide(RoundState(terms=terms), RunFounded(course), 0.0).state
        self.number = 0

    def lease(self, node: str, now: float, rate: float = 0.0) -> GrantLease | RefuseRequest:
        self.number += 1
        request = LeaseRequested(node, f"lease-{self.number}", self.state.version or 0, rate)
        self.state, effects, _ = decide(self.state, request, now)
        (reply,) = [effect for effect in effects if isinstance(effect, GrantLease | RefuseRequest)]
        return reply

    def deliver(
        self, lent: GrantLease | RefuseRequest, now: float, samples: int | None = None
    ) -> tuple[object, ...]:
        assert isinstance(lent, GrantLease)
        lease = lent.lease
        update = PendingUpdate(f"u-{lease.id}", lease.node, lease.id, lease.version, samples or lease.samples)
        self.state, effects, _ = decide(self.state, UpdateAccepted(update), now)
        return effects

    def tick(self, now: float) -> tuple[object, ...]:
        self.state, effects, _ = decide(self.state, ClockTick(), now)
        return effects

    def commit(self, now: float) -> None:
        self.state = decide(self.state, RoundCommitted((self.state.version or 0) + 1), now).state


def _closes(effects: tuple[object, ...]) -> bool:
    return any(isinstance(effect, MergeRound) for effect in effects)


def test_lease_before_base_is_refused() -> None:
    _, (refused,), _ = decide(RoundState(terms=TERMS), LeaseRequested("a", "l", 0, 0.0), 0.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "no-base"


def test_round_closes_when_all_members_delivered() -> None:
    table = Table()
    first, second = table.lease("a", 0.0), table.lease("b", 0.0)
    assert not _closes(table.deliver(first, 1.0))
    assert "waits for b (training for 1 s)" in describe_wait(table.state, {}, 1.0)
    effects = table.deliver(second, 2.0)
    assert _closes(effects)
    table.commit(3.0)
    assert (table.state.version, table.state.waiting, table.state.closing) == (1, {}, ())


def test_quorum_waits_for_grace_window() -> None:
    table = Table()
    leases = [table.lease(name, 0.0, rate=1.0) for name in "abc"]
    for lease in leases[:2]:
        assert not _closes(table.deliver(lease, 1.0))
    assert not _closes(table.tick(5.9))
    assert next_deadline(table.state, 5.9) == 6.0
    assert _closes(table.tick(6.0))
    # What arrives while the round is merged is for the next one, and one version behind.
    effects = table.deliver(leases[2], 6.5)
    assert isinstance(effects[0], QueueUpdate)
    assert effects[0].behind == 1
    assert staleness_weight(1) < staleness_weight(0)


def test_overdue_lease_does_not_delay_round_and_samples_return() -> None:
    table = Table()
    first, second = table.lease("a", 0.0, rate=1.0), table.lease("b", 0.0, rate=1.0)
    assert isinstance(second, GrantLease)
    assert not _closes(table.deliver(first, 1.0)), "one of two is not a quorum"
    assert _closes(table.tick(second.lease.overdue))
    table.commit(second.lease.overdue + 1)
    table.tick(second.lease.void)
    assert table.state.pool.returned == second.lease.spans
    (refused,) = table.deliver(second, second.lease.void + 1)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "lease-over"


def test_upload_in_progress_extends_lease() -> None:
    table = Table()
    first, second = table.lease("a", 0.0, rate=1.0), table.lease("b", 0.0, rate=1.0)
    assert isinstance(second, GrantLease)
    table.deliver(first, 1.0)
    now, arrived = second.lease.overdue - 0.1, 0
    while now < second.lease.void:
        arrived += 500_000  # at 0.8 Mbit/s
        table.state = decide(table.state, UploadProgressed(second.lease.id, arrived), now).state
        assert not table.state.closing
        now += 5.0
    assert _closes(table.tick(second.lease.void)), "its round waits no longer"
    table.commit(second.lease.void)
    (counted, *_) = table.deliver(second, second.lease.void + 60)
    assert isinstance(counted, QueueUpdate), "but its update still counts"


def test_upload_of_single_bytes_does_not_extend_lease() -> None:
    """Restarting the upload does not extend it either; at the end of a run no other member makes versions."""
    table = Table()
    lent = table.lease("a", 0.0, rate=1.0)
    assert isinstance(lent, GrantLease)
    now, arrived = 1.0, 0
    while now < 2 * lent.lease.void:
        arrived += 1
        table.state = decide(table.state, UploadProgressed(lent.lease.id, arrived % 30), now).state
        now += 1.0
    assert not table.state.lent
    assert table.state.pool.returned == lent.lease.spans


def test_update_too_far_behind_is_refused() -> None:
    table = Table()
    slow = table.lease("slow", 0.0)
    for now in (0.0, 60.0):
        table.deliver(table.lease("fast", now, rate=1.0), now + 1)
        table.tick(now + 55.0)
        table.commit(now + 55.0)
    assert table.state.version == 2
    *_, refused = table.deliver(slow, 120.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "stale"
    assert table.state.pool.returned == slow.lease.spans


def test_repeated_request_returns_same_samples() -> None:
    table = Table()
    first = table.lease("a", 0.0)
    table.deliver(table.lease("b", 0.0), 1.0)
    assert _closes(table.tick(60.0)), "a is overdue, its lease is not void"
    table.commit(60.0)
    again = table.lease("a", 61.0)
    assert isinstance(again, GrantLease)
    assert isinstance(first, GrantLease)
    assert (again.lease.spans, again.lease.version) == (first.lease.spans, 1)


def test_lease_fits_speed_and_claimed_speed_is_trusted_gradually() -> None:
    table = Table(course=HubDataOrder(samples=10_000, batch=5))
    sizes = []
    for number in range(4):
        lent = table.lease("a", number * 10.0, rate=1000.0)
        assert isinstance(lent, GrantLease)
        sizes.append(lent.lease.samples)
        table.deliver(lent, number * 10.0 + 1)
        table.commit(number * 10.0 + 2)
    assert sizes == [10, 40, 160, 640]
    slow = table.lease("b", 50.0, rate=0.01)
    assert isinstance(slow, GrantLease)
    assert slow.lease.samples == 5, "one batch at least"


def test_untrained_samples_return_to_pool() -> None:
    table = Table()
    lent = table.lease("a", 0.0)
    table.deliver(lent, 1.0, samples=7)
    assert table.state.pool.returned == (SampleSpan(0, 7, 10),)


def test_member_that_delivered_waits_for_next_version() -> None:
    table = Table()
    table.lease("b", 0.0)
    table.deliver(table.lease("a", 0.0), 1.0)
    refused = table.lease("a", 2.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "delivered"


def test_failed_merge_is_repeated_with_same_updates() -> None:
    table = Table()
    table.deliver(table.lease("a", 0.0), 1.0)
    closing = table.state.closing
    assert closing
    table.state, effects, _ = decide(table.state, MergeFailed(closing), 2.0)
    assert effects == (MergeRound(closing),)
    table.commit(3.0)
    table.deliver(table.lease("a", 3.0), 4.0)
    following = table.state.closing
    assert following not in ((), closing)
    table.state, effects, _ = decide(table.state, MergeFailed(closing), 5.0)
    assert (table.state.closing, effects) == (following, ()), "what fails after its commit repeats no other"


def test_run_finishes_without_free_samples() -> None:
    table = Table(course=HubDataOrder(samples=10, batch=5))
    lent = table.lease("a", 0.0)
    refused = table.lease("b", 0.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "all-lent"
    table.deliver(lent, 1.0)
    assert not table.state.is_finished
    table.commit(2.0)
    assert table.state.is_finished
    refused = table.lease("b", 3.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "finished"


@given(st.lists(st.integers(1, 40), max_size=30))
def test_pool_never_loses_or_doubles_sample(sizes: list[int]) -> None:
    course = HubDataOrder(samples=37, batch=1, epochs=3)
    pool, held = SamplePool(), []
    for number, size in enumerate(sizes):
        spans, pool = take_samples(pool, course, size)
        held.append(spans)
        if number % 3 == 2:
            pool = return_samples(pool, held.pop(number % len(held)))
    rest, _ = take_samples(pool, course, 1000)
    held.append(rest)
    seen = Counter(
        (span.epoch, place) for spans in held for span in spans for place in range(span.first, span.last)
    )
    assert len(seen) == 37 * 3
    assert set(seen.values()) == {1}


_WORDS = st.sampled_from(["ask", "deliver", "part", "tick", "commit", "fail", "leave"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_WORDS, st.integers(0, 3), st.floats(0.1, 30.0)), max_size=80))
def test_each_sample_counts_once_after_any_events(script: list[tuple[str, int, float]]) -> None:
    table, now = Table(), 0.0
    out: dict[int, list[GrantLease]] = {}
    counted: Counter[tuple[int, int]] = Counter()

    def note(lent: GrantLease, samples: int) -> None:
        places = [(s.epoch, p) for s in lent.lease.spans for p in range(s.first, s.last)]
        counted.update(places[:samples])

    for word, member, later in script:
        now += later
        if word == "ask":
            reply = table.lease(f"n{member}", now)
            if isinstance(reply, GrantLease):
                out.setdefault(member, []).append(reply)
        elif word in ("deliver", "part") and out.get(member):
            lent = out[member].pop()
            samples = lent.lease.samples if word == "deliver" else max(1, lent.lease.samples // 2)
            if any(isinstance(effect, QueueUpdate) for effect in table.deliver(lent, now, samples)):
                note(lent, samples)
        elif word == "commit" and table.state.closing:
            table.commit(now)
        elif word == "fail" and table.state.closing:
            table.state = decide(table.state, MergeFailed(table.state.closing), now).state
        elif word == "leave":
            table.state = decide(table.state, LeaseAbandoned(f"n{member}"), now).state
        else:
            table.tick(now)
    assert set(counted.values()) <= {1}
    free = Counter((s.epoch, p) for s in table.state.pool.returned for p in range(s.first, s.last))
    lent_now = Counter(
        (s.epoch, p)
        for lease in table.state.lent.values()
        for s in lease.spans
        for p in range(s.first, s.last)
    )
    together = counted + free + lent_now
    assert set(together.values()) <= {1}
    assert len(together) == table.state.pool.cursor


def test_region_leases_samples_of_parent() -> None:
    state = decide(RoundState(terms=TERMS, is_region=True), RunFounded(COURSE), 0.0).state
    table = Table()
    table.state = state
    refused = table.lease("a", 0.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "all-lent"
    table.state = decide(
        table.state, SamplesSupplied((SampleSpan(0, 40, 50), SampleSpan(1, 0, 10))), 1.0
    ).state
    first, second = table.lease("a", 1.0), table.lease("b", 1.0)
    assert isinstance(first, GrantLease)
    assert isinstance(second, GrantLease)
    assert (first.lease.spans, second.lease.spans) == ((SampleSpan(0, 40, 50),), (SampleSpan(1, 0, 10),))
    table.deliver(first, 2.0)
    table.state, effects, _ = decide(table.state, SamplesSupplied((SampleSpan(1, 50, 60),)), 3.0)
    assert effects == (ReleaseLease(second.lease.id), DropUpdate("u-" + first.lease.id))
    assert not table.state.is_finished
    table.state = decide(table.state, SamplesSupplied(()), 4.0).state
    assert decide(table.state, ParentFinished(), 5.0).state.is_finished


def test_region_drops_samples_of_finished_round() -> None:
    table = Table()
    table.state = decide(RoundState(terms=TERMS, is_region=True), RunFounded(COURSE), 0.0).state
    table.state = decide(table.state, SamplesSupplied((SampleSpan(0, 40, 60),)), 1.0).state
    table.deliver(table.lease("a", 1.0), 2.0)
    assert table.state.closing
    table.commit(11.0)
    refused = table.lease("b", 11.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "all-lent"


def test_lease_is_rounded_to_eighth_of_batch() -> None:
    table = Table(course=HubDataOrder(samples=100_000, batch=64))
    table.deliver(table.lease("a", 0.0), 1.0)
    table.commit(1.0)
    lent = table.lease("a", 1.0, rate=12.5)
    assert isinstance(lent, GrantLease)
    assert lent.lease.samples == 120, "of 125 in a round of ten seconds"


def test_region_shares_samples_among_all_requests() -> None:
    table = Table()
    table.state = decide(RoundState(terms=TERMS, is_region=True), RunFounded(COURSE), 0.0).state
    for node, rate in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        assert isinstance(table.lease(node, 0.0, rate), RefuseRequest)
    assert table.state.wishes == {"a": 10, "b": 10, "c": 5}
    table.state = decide(table.state, SamplesSupplied((SampleSpan(0, 0, 20),)), 1.0).state
    lent = [table.lease(node, 1.0) for node in "abc"]
    assert [grant.lease.samples for grant in lent if isinstance(grant, GrantLease)] == [8, 8, 4]
    assert isinstance(table.lease("late", 1.0), RefuseRequest)
    assert table.state.wishes == {"a": 10, "b": 10, "c": 10, "late": 10}, "for the next time"
    table.state = decide(table.state, SamplesSupplied((SampleSpan(0, 20, 60),)), 2.0).state
    full_grant = table.lease("a", 2.0)
    assert isinstance(full_grant, GrantLease)
    assert full_grant.lease.samples == 10, "there is enough for all"


def test_update_may_name_its_samples() -> None:
    table = Table(course=HubDataOrder(samples=100, batch=5))
    lent = table.lease("a", 0.0)
    assert isinstance(lent, GrantLease)
    lease = lent.lease
    for spans, expected in (
        (
            (SampleSpan(0, 2, 4), SampleSpan(0, 6, 9)),
            (SampleSpan(0, 0, 2), SampleSpan(0, 4, 6), SampleSpan(0, 9, 10)),
        ),
        ((SampleSpan(0, 2, 4), SampleSpan(0, 3, 6)), None),
        ((SampleSpan(0, 8, 13),), None),
        ((SampleSpan(1, 0, 5),), None),
    ):
        update = PendingUpdate("u", "a", lease.id, 0, 5, spans)
        state, effects, _ = decide(table.state, UpdateAccepted(update), 1.0)
        if expected is None:
            assert isinstance(effects[0], RefuseRequest)
        else:
            assert state.pool.returned == expected


def test_fast_member_does_not_make_versions_alone() -> None:
    """The others still fetch the last version; the round waits for them for one grace window."""
    table = Table(course=HubDataOrder(samples=100_000, batch=5))
    for lent in [table.lease(name, 0.0, rate=1.0) for name in "abm"]:
        table.deliver(lent, 9.0)
    table.commit(10.0)
    alone = table.lease("m", 10.1, rate=1e12)
    assert not _closes(table.deliver(alone, 10.2))
    assert next_deadline(table.state, 10.2) == 15.0
    others = [table.lease(name, 11.0, rate=1.0) for name in "ab"]
    assert not _closes(table.tick(15.0)), "they have leases now, so the round waits for them"
    table.deliver(others[0], 16.0)
    assert _closes(table.deliver(others[1], 16.5))


def test_round_waits_only_grace_window_for_absent_members() -> None:
    table = Table(course=HubDataOrder(samples=100_000, batch=5))
    for lent in [table.lease(name, 0.0, rate=1.0) for name in "ab"]:
        table.deliver(lent, 9.0)
    table.commit(10.0)
    table.deliver(table.lease("a", 10.0), 12.0)
    assert _closes(table.tick(15.0))
    table.commit(60.0)
    assert _closes(table.deliver(table.lease("a", 60.0), 60.1)), "it is alone by now"


def test_round_does_not_wait_for_member_that_left() -> None:
    table = Table(course=HubDataOrder(samples=100_000, batch=5))
    first, second = table.lease("a", 0.0), table.lease("b", 0.0)
    table.deliver(first, 1.0)
    table.deliver(second, 1.0)
    table.commit(2.0)
    table.state = decide(table.state, LeaseAbandoned("b"), 2.0).state
    assert _closes(table.deliver(table.lease("a", 2.0), 2.1))


def test_first_round_waits_for_members() -> None:
    """All that asked take part in it: the fastest does not close it while the others ask again."""
    terms = msgspec.structs.replace(TERMS, wait_for=3)
    table = Table(terms, HubDataOrder(samples=100_000, batch=5))
    for node in "ab":
        refused = table.lease(node, 0.0)
        assert isinstance(refused, RefuseRequest)
        assert (refused.kind, refused.retry_s) == ("too-few", 2.0)
    waits = "2 of 3 members asked for samples; the first round waits for 1 more"
    assert describe_wait(table.state, {}, 1.0) == waits
    third = table.lease("c", 20.0)
    assert isinstance(third, GrantLease)
    assert not _closes(table.deliver(third, 21.0)), "the two that waited ask again"
    others = [table.lease(node, 40.0, rate=1.0) for node in "ab"]
    assert not _closes(table.deliver(others[0], 41.0))
    assert _closes(table.deliver(others[1], 42.0))
    table.commit(43.0)
    assert isinstance(table.lease("a", 44.0), GrantLease), "later rounds follow the quorum alone"


def test_first_round_does_not_count_members_that_left_or_are_silent() -> None:
    table = Table(msgspec.structs.replace(TERMS, wait_for=2), HubDataOrder(samples=100_000, batch=5))
    table.lease("a", 0.0)
    table.state = decide(table.state, LeaseAbandoned("a"), 1.0).state
    assert isinstance(table.lease("b", 2.0), RefuseRequest)
    assert isinstance(table.lease("c", 100.0), RefuseRequest), "b was not heard for too long"
    assert isinstance(table.lease("b", 101.0), GrantLease)
    lent = table.lease("c", 102.0)
    table.state = decide(table.state, LeaseAbandoned("b"), 103.0).state
    assert _closes(table.deliver(lent, 104.0)), "a round that has started does not wait for new members"


def test_run_is_over_after_its_rounds() -> None:
    """A late update and a request get an answer that ends the member's part; nothing is merged any more."""
    table = Table(msgspec.structs.replace(TERMS, rounds=2), HubDataOrder(samples=100_000, batch=5))
    table.deliver(table.lease("a", 0.0), 1.0)
    table.commit(2.0)
    assert not table.state.is_finished
    leases = [table.lease(node, 3.0, rate=1.0) for node in "abc"]
    for lease in leases[:2]:
        table.deliver(lease, 4.0)
    assert _closes(table.tick(9.0))
    table.commit(10.0)
    assert table.state.is_finished
    (late,) = table.deliver(leases[2], 11.0)
    assert isinstance(late, RefuseRequest)
    assert late.kind == "lease-over"
    refused = table.lease("a", 12.0)
    assert isinstance(refused, RefuseRequest)
    assert refused.kind == "finished"


def test_restarted_hub_merges_nothing_after_its_last_round() -> None:
    """It may have been killed between the commit and the release of what waited."""
    update = PendingUpdate("u", "a", "l", 0, 5)
    state = RoundState(
        terms=msgspec.structs.replace(TERMS, rounds=1),
        course=COURSE,
        version=1,
        waiting=PersistentMap({"u": update}),
    )
    assert decide(state, ClockTick(), 100.0).effects == ()
    assert next_deadline(state, 100.0) > 101.0, "it must not be asked again at once"


def test_grace_window_learns_how_late_updates_are() -> None:
    table, now = Table(course=HubDataOrder(samples=1_000_000, batch=5)), 0.0
    for _ in range(LEAST):
        leases = [table.lease(node, now, rate=1.0) for node in "abc"]
        for lease in leases[:2]:
            assert not _closes(table.deliver(lease, now + 1.0))
        assert _closes(table.deliver(leases[2], now + 1.5))
        table.commit(now + 2.0)
        now += 2.0
    leases = [table.lease(node, now, rate=1.0) for node in "abc"]
    for lease in leases[:2]:
        table.deliver(lease, now + 1.0)
    assert next_deadline(table.state, now + 1.0) == now + 2.25, "a quarter of the five seconds"
    assert not _closes(table.tick(now + 2.2))
    assert _closes(table.tick(now + 2.25))
    known = len(table.state.grace.delays)
    table.deliver(leases[2], now + 4.0)  # while the round is merged
    assert table.state.grace.delays[known:] == (3.0,), "the window would have had to be so long"


def test_claimed_speed_is_limited_by_median_of_others() -> None:
    table, now = Table(course=HubDataOrder(samples=1_000_000_000, batch=5)), 0.0
    sizes = []
    for _ in range(8):
        lent = [table.lease(name, now, rate=1.0) for name in "ab"]
        large = table.lease("m", now, rate=1e12)
        assert isinstance(large, GrantLease)
        sizes.append(large.lease.samples)
        for grant in (large, *lent):
            table.deliver(grant, now + 4.0)
        table.commit(now + 10.0)
        now += 10.0
    assert sizes == [10, 40, 160, 320, 320, 320, 320, 320]


def test_lease_duration_is_limited_to_some_rounds() -> None:
    for rate in (1e-9, 1e-320):
        lent = Table().lease("a", 0.0, rate=rate)
        assert isinstance(lent, GrantLease)
        assert lent.lease.seconds == 3 * 10.0 * 1.5 + 5.0


def test_repeated_request_does_not_restart_lease_time() -> None:
    table = Table()
    first = table.lease("a", 0.0, rate=1.0)
    assert table.lease("a", 9.0, rate=1e-9) == first
    assert isinstance(first, GrantLease)
    table.tick(first.lease.void)
    assert not table.state.lent
