"""The hub object: it holds the state of the rounds, applies its decisions and answers members.

It lives in one event loop. A decision is pure and immediate; then the log is written; only then the request
is answered. If the log cannot be written, the hub reloads its state from the log. An event that is not in the
log did not happen.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec

from barnraise.core.errors import HubError, HubRefused
from barnraise.core.flow.backoff import Backoff, BackoffTimer
from barnraise.core.flow.events import ChangeEvent
from barnraise.core.flow.rate_limit import RateLimit
from barnraise.core.flow.supervised_task import run_until_done
from barnraise.core.logs.audit_log import AuditLog
from barnraise.hub.aggregation import update_checks
from barnraise.hub.aggregation.aggregator import Aggregator, ClosedRound, RoundResult
from barnraise.hub.protocol.admission import ASK_FOR_INVITE, check_proof
from barnraise.hub.protocol.invites import short_key
from barnraise.hub.protocol.messages import (
    ExpelResponse,
    HubDataOrder,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseRequest,
    RegionOrders,
    RoundConfig,
    RunDescription,
    VectorLayout,
    VersionHead,
)
from barnraise.hub.protocol.replay_guard import LatestSigned
from barnraise.hub.rounds import state_machine
from barnraise.hub.rounds.restore import covered_samples, restore_state
from barnraise.hub.rounds.state_machine import (
    DropUpdate,
    Event,
    GrantLease,
    MergeRound,
    RefuseRequest,
    RoundDecision,
    RoundState,
    decide,
)
from barnraise.hub.server import membership
from barnraise.hub.server.health import DiskLatency, HealthMonitor, HealthStatus
from barnraise.hub.server.status import RoundWaits, describe_run
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import FOLLOWS, PARENT, SUCCEEDS, HubFounding, hub_blobs
from barnraise.hub.storage.log import (
    MOST_REFUSALS,
    AcceptedUpdate,
    Changes,
    CommittedRound,
    HubLog,
    HubLogWriter,
    LogReplica,
    MemberRecord,
    RefusedUpdate,
    UpdateFingerprint,
    change,
    changes_of,
    read_fact,
)
from barnraise.hub.storage.versions import last_base, named_blobs, replica_of, steps_after
from barnraise.identity.node_id import NodeId

logger = logging.getLogger(__name__)
_MERGE_BACKOFF = Backoff(0.5, 30.0)
_NOTED_EVERY_S = 60.0  # rate limit of uncounted refusals, so that one member cannot fill the page
MakeAggregator = Callable[[BlobStore, RoundConfig, VectorLayout], Aggregator]


class Hub:
    """Coordinator of one run."""

    founding: HubFounding
    is_mirror: bool
    layout: VectorLayout | None
    versions: list[CommittedRound]
    members: dict[str, MemberRecord]
    arrivals: dict[str, AcceptedUpdate]
    refusals: list[RefusedUpdate]
    seen: list[UpdateFingerprint]
    state: RoundState
    covered: int  # samples that the chain has behind it
    store: str | None = None  # the origin where members find blobs, too
    parent: NodeId | None  # the hub above, of a region
    seats = membership.SeatsForParent()  # of a region

    def __init__(
        self,
        directory: Path,
        hub: NodeId,
        make_finisher: MakeAggregator,
        is_region: bool = False,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self.id, self.clock, self.now = directory, hub, clock, now
        self.blobs = hub_blobs(directory)
        self.signed, self.health, self.disk = LatestSigned(), HealthStatus(now), DiskLatency(now)
        self._make_aggregator, self.is_region = make_finisher, is_region
        self._log = HubLog(directory)
        self._audit = AuditLog(directory, now=clock)
        self._reader = HubLog(directory)
        self._writer: HubLogWriter | None = None
        self._aggregator: asyncio.Task[Aggregator] | None = None
        self._changed = ChangeEvent()
        self._tasks: set[asyncio.Task[None]] = set()
        self._discarded: set[str] = set()  # blobs that go with the next commit
        self._epoch = 0  # of the state: a merge from before a reload does not count
        self._reloading = asyncio.Lock()
        self._joining = asyncio.Lock()
        self._merge_backoff = BackoffTimer(_MERGE_BACKOFF)
        self._notes = RateLimit(1 / _NOTED_EVERY_S, 1.0)
        self.waits = RoundWaits()
        self._wake = asyncio.Event()
        self.on_commit: Callable[[CommittedRound], None] = lambda _: None

    async def start(self) -> None:
        """Load the state, remove orphaned blobs and start the background tasks.

        Raise HubError in a mirror's directory.
        """
        self.reload()
        if self.is_mirror:
            raise HubError(
                f"{self.directory} is a mirror of another hub",
                hint="Continue with `--follow`, or let its owner sign a handover.",
            )
        self._writer = HubLogWriter(self._log, self.disk)
        self._load_aggregator()
        founding = self.founding
        if founding.owner not in self.members:
            owner = MemberRecord(node=founding.owner, name="owner", role="owner", since=self.clock())
            self.members[owner.node] = owner
            await self.write([change(HubLog.put_member, owner)])
        swept = await asyncio.to_thread(self.blobs.sweep, self.needed_blobs())
        head = "no base yet" if not self.versions else f"version {self.versions[-1].number}"
        logger.info(
            "the hub of %s starts with %s; %d orphaned blobs were removed", founding.name, head, swept
        )
        self._spawn(self._tick())
        lookout = HealthMonitor(self.health, self.disk, self.clock, self.now)
        self._spawn(run_until_done(lookout.run_once, "the health check failed", 5.0))

    async def close(self) -> None:
        """Cancel the background tasks and close the log."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._aggregator is not None:
            (await self._aggregator).close()
        self._log.close()
        self._reader.close()

    # Public information.

    @property
    def version(self) -> int | None:
        return self.state.version

    def description(self) -> RunDescription:
        """Return the public description of the run."""
        return describe_run(self.id, self.founding, self.layout, self.state, self.store)

    async def head(self, after: int | None, wait: float) -> VersionHead:
        """Return the steps after a version. Wait up to ``wait`` seconds if there are none."""
        await self.wait_until(lambda: self._has_news(after), wait)
        if self.version is None:
            raise state_machine.NO_BASE.error()
        steps = steps_after(self.versions, after)
        waits = "" if steps else self.waits.text(self.state, self.members, self.now())
        return VersionHead(
            version=self.version, steps=steps, waits_for=waits, finished=self.state.is_finished
        )

    async def wait_until(self, holds: Callable[[], bool], wait: float) -> None:
        """Wait until ``holds`` is true, checking after every version, or until the time is up."""
        until = self.now() + wait
        while not holds() and (left := until - self.now()) > 0:
            await self._changed.wait(left)

    def _has_news(self, after: int | None) -> bool:
        return self.version is not None and (after != self.version or self.state.is_finished)

    # Requests of members.

    async def join(self, node: str, message: JoinRequest) -> JoinResponse:
        """Add a member by its invite, or because the hub above sent it. Raise HubRefused (403) otherwise."""
        async with self._joining:  # or one use is read by many before the first has used it up
            admitted = self.admission(node, message)
            member, is_new = admitted.member, node not in self.members
            if is_new:
                logger.info("%s (%s) joins as %s", member.name, node[:9], member.role)
            self.members[node] = member
            changes = [change(HubLog.put_member, member)]
            changes += [change(HubLog.put_grant, admitted.grant)] if admitted.grant is not None else []
            await self.write(changes)
            if is_new:
                self._audit.write(
                    "invite-used",
                    subject=f"{member.name} ({node[:9]})",
                    by="the hub above" if admitted.grant is None else f"invite {short_key(member.invite)}",
                    detail=f"joined {self.founding.name} as {member.role}",
                )
        return JoinResponse(role=member.role, description=self.description())

    def admission(self, node: str, message: JoinRequest) -> membership.Admission:
        """Return the member as it would join now. Raise HubRefused (403) if it cannot."""
        grant = self._reader.grant(message.invite)
        signer = NodeId.parse(grant.key) if grant is not None else self.parent
        if signer is None:
            raise HubRefused(403, "invite", "no invite of this hub has this key", hint=ASK_FOR_INVITE)
        check_proof(message, signer, NodeId.parse(node), self.id, self.founding.name)
        if grant is None:
            parents_clock = self.seats.parents_clock(self.now())
            return membership.admit_by_parent(message, node, self.seats, self.members, parents_clock)
        return membership.admit_by_invite(message, node, grant, self.members, self.clock())

    def has_invite(self, key: str) -> bool:
        """Tell whether this is the key of an invite that was neither withdrawn nor has expired."""
        grant = self._reader.grant(key)
        return grant is not None and not grant.withdrawn and self.clock() < grant.expires

    async def give_seat(self, node: str, region: str, id_there: str) -> MemberRecord:
        """Give a member a seat at a region instead of the one here."""
        after = membership.give_seat(self.member(node), region, id_there)
        await self._put_member(after)
        await self.step(state_machine.LeaseAbandoned(node))
        return after

    async def follow_orders(self, orders: RegionOrders) -> None:
        """Exclude the members whose seats the hub above has ended."""
        self.seats = self.seats._replace(orders=orders, received=self.now())
        for member in membership.newly_ended(self.members, orders):
            logger.info("%s (%s): %s", member.name, member.node[:9], member.quarantine)
            await self._put_member(member)
            await self.step(state_machine.LeaseAbandoned(member.node))

    def member(self, node: str) -> MemberRecord:
        """Return the record of a member. Raise HubRefused (403) if the node is unknown or in quarantine."""
        member = self.members.get(node)
        if member is None:
            raise HubRefused(403, "member", "this machine is not a member of the run", hint=_JOIN)
        if member.quarantine:
            raise HubRefused(403, "quarantine", f"in quarantine: {member.quarantine}", hint=_PARDON)
        return member

    async def lease(self, node: str, message: LeaseRequest) -> Lease:
        """Grant a lease, or return the one that the member holds."""
        member = self.member(node)
        if member.role == "mirror":
            raise HubRefused(403, "role", "a mirror cannot train", hint=_JOIN)
        if membership.has_seat_below(member):
            raise HubRefused(403, "seated", "this machine has its seat at a region", hint=_JOIN)
        name = secrets.token_hex(16)
        decision = await self.step(
            state_machine.LeaseRequested(node, name, message.version, message.samples_per_s)
        )
        lent = next((effect.lease for effect in decision.effects if isinstance(effect, GrantLease)), None)
        assert lent is not None
        assert self.state.course is not None
        return Lease(
            id=lent.id,
            version=lent.version,
            spans=lent.spans,
            steps=-(-lent.samples // self.state.course.batch),
            seconds=lent.seconds,
            void_s=max(0.0, lent.void - self.now()),
            covered=self.covered,
            members=max(len(self.state.lent), self.versions[-1].members),
        )

    async def leave(self, node: str) -> None:
        """Return the member's lease to the sample pool."""
        self.member(node)
        await self.step(state_machine.LeaseAbandoned(node))

    def replica(self, node: str, after: int | None) -> LogReplica:
        """Return a copy of the log for a mirror or the owner. Raise HubRefused (403) for other roles."""
        if self.member(node).role not in ("mirror", "owner"):
            raise HubRefused(403, "role", "only a mirror may copy the hub", hint=_JOIN)
        return replica_of(self._reader, after)

    # For the other modules of the hub.

    def needed_blobs(self) -> set[str]:
        """Return the blobs of the versions, of the run's code and of pending updates."""
        return self.own_blobs() | {arrival.sha256 for arrival in self.arrivals.values()}

    def own_blobs(self) -> set[str]:
        """Return the blobs that no member may upload: those of the versions and the run's code."""
        return named_blobs(self.versions) | self.founding.blobs

    def release_blob(self, blob: str) -> None:
        """Remove an unneeded blob now, or at the next commit if a merge is running.

        The merge may produce a blob of the same name.
        """
        if self.state.closing:
            self._discarded.add(blob)
        elif blob not in self.needed_blobs():
            self.blobs.remove(blob)

    async def aggregator(self) -> Aggregator:
        """Return the aggregator once it is loaded. Raise HubRefused if the run has no base yet."""
        if self._aggregator is None:
            raise state_machine.NO_BASE.error()
        return await asyncio.shield(self._aggregator)

    async def step(self, event: Event, changes: Changes | None = None) -> RoundDecision:
        """Decide about an event, write the log, then apply the effects.

        Write ``changes`` in the same transaction. Raise HubRefused (409) if the event is refused; ``changes``
        are not written then.
        """
        before = self.state.pool
        decision = decide(self.state, event, self.now())
        self.state = decision.state
        refusal = next((effect for effect in decision.effects if isinstance(effect, RefuseRequest)), None)
        todo: Changes = [] if refusal else list(changes or [])
        todo += changes_of(decision.effects)
        for effect in decision.effects:
            if isinstance(effect, DropUpdate) and effect.update in self.arrivals:
                self._discarded.add(self.arrivals.pop(effect.update).sha256)
        if self.state.pool != before:
            todo.append(change(HubLog.put_pool, self.state.pool))
        if decision.reason:
            logger.debug("%s", decision.reason)
        await self.write(todo)
        for effect in decision.effects:
            if isinstance(effect, MergeRound):
                self._spawn(self._merge_round(effect))
        self._wake.set()
        if refusal is not None:
            raise refusal.error()
        return decision

    async def write(self, changes: Changes) -> None:
        """Write changes to the log.

        Raise HubRefused (503) if the disk fails; the state is reloaded from the log then.
        """
        epoch = self._epoch
        assert self._writer is not None, "it was started"
        try:
            await self._writer.write([*changes, *self.signed.changes()] if changes else [])
        except HubError as error:
            async with self._reloading:
                if self._epoch == epoch:
                    logger.error("%s: reloading the state from the log", error.message)
                    self.reload()
                    self._load_aggregator()
                    self._writer.resume()
                    self._wake.set()
            raise HubRefused(503, "disk", error.message, hint=error.hint, retry_s=5.0) from error

    async def set_base(self, base: CommittedRound, layout: VectorLayout, course: HubDataOrder) -> None:
        """Set the owner's base as version 0. Raise HubRefused if there is one already."""
        if self.version is not None:
            raise state_machine.BASE_THERE.error()
        await self.adopt_versions([base], layout, course)

    async def adopt_versions(
        self, versions: Sequence[CommittedRound], layout: VectorLayout, course: HubDataOrder
    ) -> None:
        """Append versions that another hub made. Their blobs must be here."""
        facts = [change(HubLog.set_fact, "layout", layout), change(HubLog.set_fact, "course", course)]
        await self.write([*facts, *(change(HubLog.put_version, version) for version in versions)])
        before = named_blobs(self.versions)
        self.versions += versions
        self.layout = layout
        if self.state.course is None:
            await self.step(state_machine.RunFounded(course))
        await self.step(state_machine.RoundCommitted(self.versions[-1].number))
        self._load_aggregator()
        self._changed.announce()
        await asyncio.to_thread(self.blobs.remove_all, before - self.needed_blobs())

    async def record_refusal(self, node: str, kind: str, reason: str) -> None:
        """Record a refusal for the status page. Some kinds count towards the member's quarantine."""
        if kind not in update_checks.COUNTED and self._notes.take(node, self.now()) > 0:
            return
        refusal = RefusedUpdate(node=node, kind=kind, reason=reason, time=self.clock())
        self.refusals = [*self.refusals, refusal][-MOST_REFUSALS:]
        changes = [change(HubLog.put_refusal, refusal)]
        member = self.members.get(node)
        logger.warning("refused (%s) from %s: %s", kind, member.name if member else node[:9], reason)
        if member is not None:
            after = update_checks.after_refusal(member, kind, reason, self.founding.terms)
            self.members[node] = after
            changes.append(change(HubLog.put_member, after))
        await self.write(changes)

    async def refuse_update(self, node: str, kind: str, reason: str) -> bool:
        """Record a refusal and release the member's lease. Return True if the member is in quarantine now."""
        await self.record_refusal(node, kind, reason)
        await self.step(state_machine.LeaseAbandoned(node))
        return node in self.members and bool(self.members[node].quarantine)

    async def pardon(self, node: str) -> None:
        """End a member's quarantine and forget its refusals."""
        await self._put_member(msgspec.structs.replace(self._known(node), refusals=0, quarantine=""))

    async def expel(self, node: str) -> ExpelResponse:
        """Ban a member until the owner pardons it, and withdraw the invites that it used.

        Its updates that wait for their round still count. Return the invite, and its other members.
        """
        if node == self.founding.owner:
            raise HubRefused(403, "role", "the owner cannot be expelled", hint="Name another member.")
        member = membership.expelled(self._known(node), "the owner expelled this machine")
        why = f"a machine that came with it, {member.name}, was expelled"
        await self._put_member(member, [change(HubLog.withdraw_used_by, node, why)])
        self._audit.write("member-expelled", subject=f"{member.name} ({node[:9]})", by="the hub's owner")
        await self.step(state_machine.LeaseAbandoned(node))
        invite = member.invite if self._reader.grant(member.invite) is not None else ""
        return ExpelResponse(invite=invite, others=membership.came_together(self.members, node))

    def _known(self, node: str) -> MemberRecord:
        member = self.members.get(node)
        if member is None:
            raise HubRefused(404, "member", "no member has this id", hint="Copy it from the hub's page.")
        return member

    async def _put_member(self, member: MemberRecord, changes: Changes | None = None) -> None:
        self.members[member.node] = member
        await self.write([change(HubLog.put_member, member), *(changes or [])])

    # Merging and committing a round.

    async def _merge_round(self, close: MergeRound) -> None:
        """Merge a closed round and commit the result; retry after a failure."""
        epoch = self._epoch
        try:
            finisher = await self.aggregator()
            arrivals = tuple(self.arrivals[update.id] for update in close.updates)
            merged = await asyncio.to_thread(finisher.merge, self._closed_round(arrivals))
            if self._epoch == epoch:
                await self._commit(arrivals, merged)
            self._merge_backoff.reset()
        except Exception as error:  # noqa: BLE001  # the round must not hang after any error
            wait_s = self._merge_backoff.next_wait()
            logger.error("merging the round failed, retrying in %.1f s: %s", wait_s, error)
            await asyncio.sleep(wait_s)
            await self._tick_once(
                state_machine.MergeFailed(close.updates)
                if self._epoch == epoch
                else state_machine.ClockTick()
            )

    def _closed_round(self, arrivals: tuple[AcceptedUpdate, ...]) -> ClosedRound:
        chain = tuple(self.versions[last_base(self.versions) :])
        strangers, seen = update_checks.stranger_nodes(self.members), tuple(self.seen)
        invites = {node: member.invite for node, member in self.members.items()}
        return ClosedRound(arrivals, strangers, self.versions[-1], chain, self.clock(), seen, invites)

    async def _commit(self, arrivals: tuple[AcceptedUpdate, ...], merged: RoundResult) -> None:
        """Commit a merged round in one transaction: the version, its contributions and the end of its
        updates."""
        versions, refused = merged.versions, merged.refused
        spans = tuple(span for arrival in arrivals if arrival.update.id in refused for span in arrival.spans)
        decision = decide(self.state, state_machine.UpdateDropped(spans), self.now())
        self.state = decision.state
        changes = changes_of(decision.effects)  # of leases that end at this very moment
        changes += [change(HubLog.delete_arrival, arrival.update.id) for arrival in arrivals]
        changes.append(change(HubLog.put_pool, self.state.pool))
        norms = update_checks.confirmed_norms(
            arrivals, merged.contributions, update_checks.stranger_nodes(self.members)
        )
        changes += [change(HubLog.put_norms, norms)] if norms else []
        for place, version in enumerate(versions):
            parts = merged.contributions if place == 0 else ()
            changes.append(change(HubLog.put_version, version, parts))
        await self.write(changes)  # the version is public from here on
        before = named_blobs(self.versions)
        self.versions += versions
        self.seen = update_checks.replace_norms(self.seen, norms)
        self.covered += sum(version.samples for version in versions)
        number = self.versions[-1].number
        for arrival in arrivals:
            del self.arrivals[arrival.update.id]
        await self.step(state_machine.RoundCommitted(number, len(norms)))
        self._changed.announce()
        for version in versions:
            self.on_commit(version)
            logger.info("version %d: %d updates, %d samples", number, version.members, version.samples)
        for arrival in arrivals:
            if arrival.update.id in refused:
                verdict = refused[arrival.update.id]
                await self.refuse_update(arrival.update.node, verdict.kind, verdict.reason)
        outdated = before | {arrival.sha256 for arrival in arrivals} | self._discarded | merged.spent
        self._discarded.clear()
        await asyncio.to_thread(self.blobs.remove_all, outdated - self.needed_blobs())

    async def _tick(self) -> None:
        await self._tick_once()
        while True:
            pause = max(0.02, min(30.0, state_machine.next_deadline(self.state, self.now()) - self.now()))
            self._wake.clear()
            try:
                async with asyncio.timeout(pause):  # wait_for would miss a cancellation at the same moment
                    await self._wake.wait()
            except TimeoutError:
                await self._tick_once()

    async def _tick_once(self, event: Event = state_machine.ClockTick()) -> None:  # noqa: B008  # it is immutable
        try:
            await self.step(event)
        except HubError as error:
            logger.error("%s", error.message)
            await asyncio.sleep(1.0)
        except Exception:  # an error would end the background task silently
            logger.exception("an event of the rounds failed and is repeated")
            await asyncio.sleep(1.0)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _load_aggregator(self) -> None:
        """Load the aggregator in a thread.

        It imports torch, which takes a while; the hub answers meanwhile.
        """
        if self._aggregator is None and self.layout is not None:
            terms, layout = self.founding.terms, self.layout
            work = asyncio.to_thread(self._make_aggregator, self.blobs, terms, layout)
            self._aggregator = asyncio.create_task(work)

    def reload(self) -> None:
        """Load the state from the log. Every lease gets its whole time again."""
        snapshot = self._reader.read()
        founding = read_fact(snapshot.facts, "founding", HubFounding)
        if founding is None:
            raise HubError(f"there is no hub in {self.directory}", hint="Create one with `barnraise hub up`.")
        self.founding = founding
        self.signed.restore(snapshot.facts)
        self.is_mirror = FOLLOWS in snapshot.facts and SUCCEEDS not in snapshot.facts
        self.parent = NodeId(snapshot.facts[PARENT]) if PARENT in snapshot.facts else None
        self.layout = read_fact(snapshot.facts, "layout", VectorLayout)
        self.versions = list(snapshot.versions)
        self.members = dict(snapshot.members)
        self.arrivals = {arrival.update.id: arrival for arrival in snapshot.arrivals}
        self.refusals = list(snapshot.refusals)
        self.seen = list(snapshot.seen)
        self.state = restore_state(snapshot, founding, self.now(), is_region=self.is_region)
        self.covered = covered_samples(snapshot, self.state)
        self._epoch += 1
        self._changed.announce()


_JOIN = "Join with an invite: `barnraise join --invite ...`."
_PARDON = "Ask the owner of the hub to run `barnraise hub pardon`."
