"""State machine of the rounds: grants leases, accepts updates, closes rounds.

Pure: (state, event, now) -> decision.

A round starts when a version is committed. Members take leases: spans of the sample order, which is a pure
function of seed and epoch. A lease has as many samples as fit the round at the member's measured speed.

A round closes when every member whose lease is not overdue has delivered. It also closes when a quorum has
delivered and the grace window has passed. A lease stays valid for some more versions, and late updates count
less. Undelivered samples return to the pool, so that each sample counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from barnraise.core.errors import HubRefused
from barnraise.core.units import counted
from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig, SampleSpan
from barnraise.hub.rounds.grace_window import GraceWindow
from barnraise.hub.rounds.leases import (
    MAX_LEASE_ROUNDS,
    ActiveLease,
    PendingUpdate,
    can_be_compared,
    lease_seconds,
    lease_size,
    median_without,
    round_to_batch,
    untrained_spans,
)
from barnraise.hub.rounds.persistent_map import LeaseTable, PersistentMap
from barnraise.hub.rounds.sample_pool import SamplePool, has_samples, return_samples, take_samples

Kept = TypeVar("Kept", bound=PersistentMap[Any, Any])
_UPLOAD_S = 180.0  # between two pieces, which may wait for a busy hub
_ASKS_AGAIN_S = 60.0  # a member that waits for the first round asks at least so often
LEAST_BYTES_S = 8192  # an upload that moves slower does not keep its lease beyond the time that was told


def _new(kind: type[Kept]) -> Kept:
    """Declare a field with a new map as default.

    Old versions share storage with newer ones, so a shared default would leak memory.
    """
    made: Kept = msgspec.field(default_factory=kind)
    return made


class RoundState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the rounds of one hub."""

    terms: RoundConfig
    course: HubDataOrder | None = None
    version: int | None = None
    pool: SamplePool = SamplePool()
    lent: LeaseTable = _new(LeaseTable)
    waiting: PersistentMap[str, PendingUpdate] = _new(PersistentMap)
    closing: tuple[PendingUpdate, ...] = ()  # that are being merged
    delivered: PersistentMap[str, str] = _new(
        PersistentMap
    )  # members whose updates are pending or being merged
    quorum_at: float | None = None
    last_quorum: tuple[int, float] | None = None  # version that the last round began from, and its quorum_at
    grace: GraceWindow = GraceWindow()
    since: float = 0.0  # when the round began
    requested_at: PersistentMap[str, float] = _new(PersistentMap)  # last request for a lease, by member
    awaited: PersistentMap[str, float] = _new(
        PersistentMap
    )  # active members that have no lease of this round yet
    usual: PersistentMap[str, int] = _new(PersistentMap)  # the samples of each member's last delivered lease
    standing: tuple[int, ...] = ()  # sorted values of the members that were active when the round started
    is_region: bool = False  # samples come from the parent, which also ends the run
    wishes: PersistentMap[str, int] = _new(
        PersistentMap
    )  # samples that each member asked for since the last supply
    known: int = 0  # norms that say how large an update usually is
    part: float = 1.0  # of a wish that a region's members get, so that there is something for all

    @property
    def had_last_round(self) -> bool:
        """Return True once the run has as many versions as its rounds."""
        return 0 < self.terms.rounds <= (self.version or 0)

    @property
    def is_finished(self) -> bool:
        """Return True after the last round, or if no samples are free, leased or pending."""
        if self.had_last_round:
            return True
        busy = self.is_region or self.lent or self.waiting or self.closing
        return self.course is not None and not (busy or has_samples(self.pool, self.course))


# Events.
class RunFounded(NamedTuple):
    """The owner's base became version 0."""

    course: HubDataOrder


class LeaseRequested(NamedTuple):
    """A member asked for a lease."""

    node: str
    lease: str  # the id of a new lease, if there will be one
    version: int
    samples_per_s: float


class UpdateAccepted(NamedTuple):
    """An update passed its checks. ``known``: how many norms it adds to the running median."""

    update: PendingUpdate
    known: int = 1


class UploadProgressed(NamedTuple):
    """A piece of the update for a lease arrived."""

    lease: str
    arrived: int = 0  # bytes of it, in all


class LeaseAbandoned(NamedTuple):
    """A lease's update was refused, or its member left."""

    node: str


class ClockTick(NamedTuple):
    """Time has passed without another event."""


class UpdateDropped(NamedTuple):
    """Spans of the round that is being merged do not count."""

    spans: tuple[SampleSpan, ...]


class RoundCommitted(NamedTuple):
    version: int
    known: int = 0  # norms more


class MergeFailed(NamedTuple):
    """The merge of these updates failed."""

    updates: tuple[PendingUpdate, ...]


class ParentFinished(NamedTuple):
    """A regional hub's parent has no samples left."""


class SamplesSupplied(NamedTuple):
    """A regional hub got a lease: its members get these samples, and their old leases end."""

    spans: tuple[SampleSpan, ...]


Event = (
    RunFounded
    | SamplesSupplied
    | ParentFinished
    | LeaseRequested
    | UpdateAccepted
    | UploadProgressed
    | LeaseAbandoned
    | ClockTick
    | UpdateDropped
    | RoundCommitted
    | MergeFailed
)


# Effects.
class GrantLease(NamedTuple):
    """A lease is granted or granted again."""

    lease: ActiveLease


class ReleaseLease(NamedTuple):
    """A lease ended without an update."""

    lease: str


class QueueUpdate(NamedTuple):
    """An update waits for its round, and its lease ended."""

    update: PendingUpdate
    behind: int


class DropUpdate(NamedTuple):
    """A pending update will not count."""

    update: str


class MergeRound(NamedTuple):
    """Merge these updates into the next version."""

    updates: tuple[PendingUpdate, ...]


class RefuseRequest(NamedTuple):
    """The request is refused with this reason."""

    kind: str
    message: str
    hint: str
    retry_s: float = 0.0

    def error(self) -> HubRefused:
        """Return the error that the member gets."""
        return HubRefused(409, self.kind, self.message, hint=self.hint, retry_s=self.retry_s)


Effect = GrantLease | ReleaseLease | QueueUpdate | DropUpdate | MergeRound | RefuseRequest

_WAIT = "Ask again in a few seconds."
_NEXT = "Wait for the next version: GET /v1/head."
BEGIN_AGAIN = "Pull the head, take a new lease and start again."
NO_BASE = RefuseRequest("no-base", "the owner has not pushed the base yet", _WAIT, 2.0)
BASE_THERE = RefuseRequest("base-there", "the run has its base already", "Pull it: GET /v1/head.")
RUN_OVER = RefuseRequest("lease-over", "all rounds of the run are over", "Pull the final state.")


class RoundDecision(NamedTuple):
    """The new state, the effects to apply, and the reason."""

    state: RoundState
    effects: tuple[Effect, ...]
    reason: str


def decide(state: RoundState, event: Event, now: float) -> RoundDecision:
    """Decide about an event. Void leases are released first."""
    expiry = _expire_leases(state, now)
    state = expiry.state
    if isinstance(event, RunFounded):
        decision = _set_base(state, event.course)
    elif isinstance(event, ParentFinished):
        decision = RoundDecision(_replace(state, is_region=False), (), "the run is over")
    elif isinstance(event, SamplesSupplied):
        decision = _supply_samples(state, event.spans, now)
    elif isinstance(event, LeaseRequested):
        decision = _request_lease(state, event, now)
    elif isinstance(event, UpdateAccepted):
        decision = _accept_update(state, event, now)
    elif isinstance(event, UploadProgressed):
        decision = _extend_lease(state, event, now)
    elif isinstance(event, LeaseAbandoned):
        own, node = state.lent.of_member(event.node), (event.node,)
        without_member = _replace(
            state, requested_at=state.requested_at.without(node), awaited=state.awaited.without(node)
        )
        decision = _release_leases(without_member, () if own is None else (own,), "its member gave it up")
    elif isinstance(event, UpdateDropped):
        decision = RoundDecision(_replace(state, pool=return_samples(state.pool, event.spans)), (), "")
    elif isinstance(event, RoundCommitted):
        decision = _commit(_replace(state, known=state.known + event.known), event.version, now)
    elif isinstance(event, MergeFailed) and event.updates == state.closing:
        again = PersistentMap({update.id: update for update in state.closing} | dict(state.waiting))
        decision = RoundDecision(
            _replace(state, closing=(), waiting=again), (), "the merge failed and is repeated"
        )
    else:
        decision = RoundDecision(state, (), "")
    closed_now = _close_round(decision.state, now)
    reasons = [reason for reason in (expiry.reason, decision.reason, closed_now.reason) if reason]
    return RoundDecision(
        closed_now.state, expiry.effects + decision.effects + closed_now.effects, "; ".join(reasons)
    )


def staleness_weight(behind: int) -> float:
    """Return the weight factor of an update that is ``behind`` versions behind."""
    return 1.0 / math.sqrt(1.0 + behind)


def next_deadline(state: RoundState, now: float) -> float:
    """Return the time of the next tick if no event happens."""
    next_lease = state.lent.next_deadline(now)
    moments = [] if next_lease is None else [next_lease]
    if state.quorum_at is not None:
        moments.append(state.quorum_at + state.grace.seconds(state.terms))
    if state.waiting and _expected_members(state, now):
        moments.append(state.since + state.terms.grace * state.terms.round_s)
    return min(moments, default=now + 60.0)


def _request_lease(state: RoundState, event: LeaseRequested, now: float) -> RoundDecision:
    course, version = state.course, state.version
    if course is None or version is None:
        return RoundDecision(state, (NO_BASE,), NO_BASE.message)
    was_around = event.node in state.requested_at
    state = _replace(state, requested_at=state.requested_at.put(event.node, now))
    if event.version != version:
        message = f"version {event.version} was asked for, the head is {version}"
        return _refused(state, "behind", message, "Pull the head, then ask again.")
    if state.had_last_round:
        return _refused(state, "finished", "all rounds of the run are over", "Pull the final state.")
    if event.node in state.delivered:
        return _refused(state, "delivered", "this round already has an update of this member", _NEXT, 1.0)
    if _is_before_first_round(state):
        missing = missing_members(state, now)
        state = _replace(state, awaited=state.awaited.put(event.node, now))
        if missing:
            more = counted(missing, "more member")
            message = f"the first round starts with {state.terms.wait_for} members and waits for {more}"
            return _refused(state, "too-few", message, _WAIT, 2.0)
        state = _replace(state, since=now + _ASKS_AGAIN_S)  # those that waited ask again within this time
    usual = state.usual.get(event.node, 0)
    middle = median_without(state.standing, usual if was_around else 0)
    wish = lease_size(state.terms, course, event.samples_per_s, usual, middle)
    if state.is_region:
        state = _replace(state, wishes=state.wishes.put(event.node, wish))
    own = state.lent.of_member(event.node)
    if (
        own is not None and own.version == version
    ):  # the time must not restart, or the round would never close
        return RoundDecision(state, (GrantLease(own),), f"the lease of {own.samples} samples again")
    if own is not None:  # it begins again: the same samples, from the head
        samples, spans, pool = own.samples, own.spans, state.pool
        name = own.id
    else:
        name = event.lease
        spans, pool = take_samples(state.pool, course, round_to_batch(course, wish * state.part))
        samples = sum(span.size for span in spans)
    if not samples:
        if state.is_finished:
            return _refused(
                state, "finished", "all samples of the run are trained on", "Pull the final state."
            )
        wait = 1.0 if state.is_region else 5.0
        return _refused(state, "all-lent", "other members hold all remaining samples", _WAIT, wait)
    seconds = lease_seconds(state.terms, samples, event.samples_per_s)
    void = now + seconds * (2 + state.terms.stale_limit)
    lease = ActiveLease(name, event.node, version, spans, seconds, now + seconds, void, void)
    awaited = state.awaited.without((event.node,))
    after = _replace(state, pool=pool, lent=state.lent.put(name, lease), awaited=awaited)
    return RoundDecision(
        after, (GrantLease(lease),), f"{samples} samples from version {version}, {seconds:.1f} s"
    )


def missing_members(state: RoundState, now: float) -> int:
    """Return how many members the first round still waits for; 0 once it has started."""
    if not _is_before_first_round(state):
        return 0
    here = sum(now - when <= _ASKS_AGAIN_S for when in state.requested_at.values())
    return max(0, state.terms.wait_for - here)


def _is_before_first_round(state: RoundState) -> bool:
    """Return True while a run that waits for several members has granted no lease."""
    has_started = state.lent or state.waiting or state.closing
    return state.terms.wait_for > 1 and state.version == 0 and not has_started


def versions_behind(state: RoundState, version: int) -> int:
    """Return how many versions an update from this version would be behind if it were merged next."""
    assert state.version is not None
    return state.version + (1 if state.closing else 0) - version


def _set_base(state: RoundState, course: HubDataOrder) -> RoundDecision:
    pool = SamplePool(course.samples * course.epochs) if state.is_region else state.pool
    after = _replace(state, course=course, version=0, pool=pool)
    return RoundDecision(after, (), "the owner's base is version 0")


def _commit(state: RoundState, version: int, now: float) -> RoundDecision:
    around = _active_members(state, now)
    here = _nodes_of(state.waiting.values())
    # A region's remaining samples belong to its parent again, so updates for them would not count.
    is_over = state.is_region and version != state.version
    after = _replace(
        state,
        version=version,
        pool=SamplePool(state.pool.cursor) if is_over else state.pool,
        closing=(),
        delivered=here,
        quorum_at=None,
        since=now,
        requested_at=PersistentMap(around),
        awaited=PersistentMap(
            {
                node: when
                for node, when in around.items()
                if node not in here and not state.lent.of_member(node)
            }
        ),
        standing=tuple(sorted(state.usual[node] for node in around if node in state.usual)),
    )
    return RoundDecision(after, (), f"version {version} is committed")


def _nodes_of(updates: Iterable[PendingUpdate]) -> PersistentMap[str, str]:
    return PersistentMap({update.node: update.id for update in updates})


def _supply_samples(state: RoundState, spans: tuple[SampleSpan, ...], now: float) -> RoundDecision:
    assert state.course is not None
    effects: tuple[Effect, ...] = (
        *(ReleaseLease(name) for name in state.lent),
        *(DropUpdate(name) for name in state.waiting),
    )
    pool = SamplePool(state.course.samples * state.course.epochs, spans)
    supply, wished = sum(span.size for span in spans), sum(state.wishes.values())
    part = min(1.0, supply / wished) if wished else 1.0
    after = _replace(
        state,
        pool=pool,
        lent=LeaseTable(),
        waiting=PersistentMap(),
        delivered=_nodes_of(state.closing),
        awaited=PersistentMap(_active_members(state, now)),
        quorum_at=None,
        since=now,
        wishes=PersistentMap(),
        part=part,
    )
    return RoundDecision(after, effects, f"{supply} samples to deal out, of {wished} that members wish for")


def lease_for(state: RoundState, update: PendingUpdate) -> ActiveLease | RefuseRequest:
    """Return the lease that an update is for, or the reason why there is none."""
    lease = state.lent.get(update.lease)
    if lease is None or lease.node != update.node:
        return RefuseRequest("lease-over", "the lease of this update has ended", BEGIN_AGAIN)
    if update.version != lease.version or not 0 < update.samples <= lease.samples:
        message = f"the lease is for {lease.samples} samples from version {lease.version}"
        return RefuseRequest("lease-differs", message, BEGIN_AGAIN)
    if untrained_spans(lease, update) is None:
        return RefuseRequest("lease-differs", "the update covers samples outside its lease", BEGIN_AGAIN)
    return lease


def _accept_update(state: RoundState, event: UpdateAccepted, now: float) -> RoundDecision:
    update = event.update
    lease = lease_for(state, update)
    if isinstance(lease, RefuseRequest):
        return RoundDecision(state, (lease,), lease.message)
    if state.had_last_round:  # it could only count for a version that there will not be
        return RoundDecision(state, (RUN_OVER,), RUN_OVER.message)
    late = versions_behind(state, update.version)
    if late > state.terms.stale_limit:
        returned = _release_leases(state, (lease,), "its update is too far behind")
        message = f"the update is {late} versions behind, at most {state.terms.stale_limit} are allowed"
        refuse = RefuseRequest("stale", message, BEGIN_AGAIN)
        return RoundDecision(returned.state, (*returned.effects, refuse), returned.reason)
    after = _replace(
        state,
        lent=state.lent.without((lease.id,)),
        waiting=state.waiting.put(update.id, update),
        delivered=state.delivered.put(update.node, update.id),
        pool=return_samples(state.pool, untrained_spans(lease, update) or ()),
        usual=state.usual.put(update.node, update.samples),
        known=state.known + event.known,
        grace=_learned_grace(state, update, now),
    )
    return RoundDecision(
        after, (QueueUpdate(update, late),), f"an update of {update.samples} samples, {late} behind"
    )


def _learned_grace(state: RoundState, update: PendingUpdate, now: float) -> GraceWindow:
    """Return the grace window after an update, which came after the quorum of its round or before it."""
    quorum_at = None
    if state.last_quorum is not None and state.last_quorum[0] == update.version:
        quorum_at = state.last_quorum[1]
    elif update.version == state.version:
        quorum_at = state.quorum_at
    return state.grace if quorum_at is None else state.grace.with_delay(now - quorum_at)


def _extend_lease(state: RoundState, event: UploadProgressed, now: float) -> RoundDecision:
    """Extend the lease of an upload in progress: one second per 8 KiB received, while its update could still
    count."""
    lease = state.lent.get(event.lease)
    if lease is None or versions_behind(state, lease.version) > state.terms.stale_limit:
        return RoundDecision(state, (), "")
    until = now + state.terms.grace * state.terms.round_s + state.terms.slack_s
    overdue = max(lease.overdue, min(until, lease.patience))
    void = max(lease.void, min(now + _UPLOAD_S, lease.patience + event.arrived / LEAST_BYTES_S))
    kept = msgspec.structs.replace(lease, overdue=overdue, void=void)
    return RoundDecision(_replace(state, lent=state.lent.put(lease.id, kept)), (), "")


def _expire_leases(state: RoundState, now: float) -> RoundDecision:
    expired = tuple(state.lent.expired(now))
    return (
        _release_leases(state, expired, "its update did not arrive")
        if expired
        else RoundDecision(state, (), "")
    )


def _release_leases(state: RoundState, leases: tuple[ActiveLease, ...], why: str) -> RoundDecision:
    pool = return_samples(state.pool, [span for lease in leases for span in lease.spans])
    after = _replace(state, pool=pool, lent=state.lent.without(lease.id for lease in leases))
    reason = "; ".join(f"{lease.samples} samples of {lease.node[:9]} return: {why}" for lease in leases)
    return RoundDecision(after, tuple(ReleaseLease(lease.id) for lease in leases), reason)


def _active_members(state: RoundState, now: float) -> dict[str, float]:
    """Return the members that asked for a lease during the last rounds, and when."""
    longest = MAX_LEASE_ROUNDS * state.terms.round_s + state.terms.slack_s
    return {node: when for node, when in state.requested_at.items() if now - when <= longest}


def _expected_members(state: RoundState, now: float) -> int:
    """Return the number of active members that still fetch the new version.

    They are waited for, so that one fast member cannot produce versions alone.
    """
    is_late = now >= state.since + state.terms.grace * state.terms.round_s
    if is_late or state.course is None or not has_samples(state.pool, state.course):
        return 0
    return len(state.awaited)


def _close_round(state: RoundState, now: float) -> RoundDecision:
    if state.had_last_round or not state.waiting or state.closing:
        return RoundDecision(state, (), "")
    if not can_be_compared(state.waiting.values(), state.known):
        return RoundDecision(state, (), "")
    here, out = len(state.waiting), state.lent.expected(now) + _expected_members(state, now)
    if not out:
        why = f"all {here} updates that were expected are here"
    elif here < math.ceil(state.terms.quorum * (here + out)):
        return RoundDecision(
            _replace(state, quorum_at=None) if state.quorum_at is not None else state, (), ""
        )
    elif state.quorum_at is None:
        return RoundDecision(
            _replace(state, quorum_at=now), (), f"the quorum is there: {here} of {here + out}"
        )
    elif now < state.quorum_at + state.grace.seconds(state.terms):
        return RoundDecision(state, (), "")
    else:
        why = f"{here} of {here + out} updates are here and the grace window has passed"
    updates = tuple(sorted(state.waiting.values()))
    assert state.version is not None
    last_quorum = None if state.quorum_at is None else (state.version, state.quorum_at)
    after = _replace(
        state, waiting=PersistentMap(), closing=updates, quorum_at=None, last_quorum=last_quorum
    )
    return RoundDecision(after, (MergeRound(updates),), why)


def _refused(state: RoundState, kind: str, message: str, hint: str, retry_s: float = 0.0) -> RoundDecision:
    return RoundDecision(state, (RefuseRequest(kind, message, hint, retry_s),), message)


def _replace(state: RoundState, **changes: object) -> RoundState:
    return msgspec.structs.replace(state, **changes)
