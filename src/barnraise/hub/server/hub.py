"""The hub itself: holds the state of the rounds, performs what they decide, and answers members.

It lives in one event loop. Decisions are pure and at once; then the log is written, and only then anybody is
answered. If the log cannot be written, the state is read from it anew: what is not in it did not happen.
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
from barnraise.hub.aggregation import update_checks
from barnraise.hub.aggregation.aggregator import Aggregator, ClosedRound, RoundResult
from barnraise.hub.protocol.invites import hash_token, use_grant
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseRequest,
    RoundConfig,
    RunDescription,
    VectorLayout,
    VersionHead,
)
from barnraise.hub.protocol.replay_guard import LatestSigned
from barnraise.hub.rounds import state_machine
from barnraise.hub.rounds.restore import covered_by, recalled
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
from barnraise.hub.server.health import DiskLatency, HealthMonitor, HealthStatus
from barnraise.hub.server.status import RoundWaits, described
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import FOLLOWS, SUCCEEDS, HubFounding, hub_blobs
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
_NOTED_EVERY_S = 60.0  # of a member what does not count: nobody fills the page alone
MakeAggregator = Callable[[BlobStore, RoundConfig, VectorLayout], Aggregator]


class Hub:
    """Of one run."""

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
        self.signed, self.troubles, self.disk = LatestSigned(), HealthStatus(now), DiskLatency(now)
        self._make_finisher, self._is_region = make_finisher, is_region
        self._log = HubLog(directory)
        self._reader = HubLog(directory)
        self._writer: HubLogWriter | None = None
        self._finisher: asyncio.Task[Aggregator] | None = None
        self._changed = ChangeEvent()
        self._tasks: set[asyncio.Task[None]] = set()
        self._discarded: set[str] = set()  # blobs that go with the next commit
        self._epoch = 0  # of the state: a merge that began before it was read anew does not count
        self._reloading = asyncio.Lock()
        self._joining = asyncio.Lock()
        self._merge_backoff = BackoffTimer(_MERGE_BACKOFF)
        self._notes = RateLimit(1 / _NOTED_EVERY_S, 1.0)
        self.waits = RoundWaits()
        self._wake = asyncio.Event()
        self.on_commit: Callable[[CommittedRound], None] = lambda _: None

    async def start(self) -> None:
        self.read()
        if self.is_mirror:
            raise HubError(
                f"{self.directory} is a mirror of another hub",
                hint="Follow on with `--follow`, or let its owner sign that it takes over.",
            )
        self._writer = HubLogWriter(self._log, self.disk)
        self._prepare()
        founding = self.founding
        if founding.owner not in self.members:
            owner = MemberRecord(node=founding.owner, name="owner", role="owner", since=self.clock())
            self.members[owner.node] = owner
            await self.write([change(HubLog.put_member, owner)])
        swept = await asyncio.to_thread(self.blobs.sweep, self.needed_blobs())
        head = "no base yet" if not self.versions else f"version {self.versions[-1].number}"
        logger.info("the hub of %s begins with %s; %d orphans were swept", founding.name, head, swept)
        self._spawn(self._tick())
        lookout = HealthMonitor(self.troubles, self.disk, self.clock, self.now)
        self._spawn(run_until_done(lookout.turn, "the hub could not look after its machine", 5.0))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._finisher is not None:
            (await self._finisher).close()
        self._log.close()
        self._reader.close()

    # What anybody may know.

    @property
    def version(self) -> int | None:
        return self.state.version

    def description(self) -> RunDescription:
        return described(self.id, self.founding, self.layout, self.state, self.store)

    async def head(self, after: int | None, wait: float) -> VersionHead:
        """At once if there is something newer than ``after``; otherwise when there is, or when time is up."""
        await self.until(lambda: self._has_news(after), wait)
        if self.version is None:
            raise state_machine.NO_BASE.error()
        steps = steps_after(self.versions, after)
        waits = "" if steps else self.waits.said(self.state, self.members, self.now())
        return VersionHead(
            version=self.version, steps=steps, waits_for=waits, finished=self.state.is_finished
        )

    async def until(self, holds: Callable[[], bool], wait: float) -> None:
        """Asks again at every version, for so many seconds at most."""
        until = self.now() + wait
        while not holds() and (left := until - self.now()) > 0:
            await self._changed.wait(left)

    def _has_news(self, after: int | None) -> bool:
        return self.version is not None and (after != self.version or self.state.is_finished)

    # What members ask for.

    async def join(self, node: str, message: JoinRequest) -> JoinResponse:
        async with self._joining:  # or one use is read by many before the first has used it up
            grant = use_grant(self._reader.grant(hash_token(message.token)), node, self.clock())
            member = self.members.get(node)
            if member is None:
                member = MemberRecord(node=node, name=message.name, role=grant.role, since=self.clock())
                logger.info("%s (%s) joins as %s", member.name, node[:9], member.role)
            self.members[node] = member
            await self.write([change(HubLog.put_grant, grant), change(HubLog.put_member, member)])
        return JoinResponse(role=member.role, description=self.description())

    def has_invited(self, token: str) -> bool:
        """Whether there is such an invite, used up or not."""
        return self._reader.grant(hash_token(token)) is not None

    def member(self, node: str) -> MemberRecord:
        """HubRefused for whoever is none, or is in quarantine."""
        member = self.members.get(node)
        if member is None:
            raise HubRefused(403, "member", "this machine is not a member of the run", hint=_JOIN)
        if member.quarantine:
            raise HubRefused(403, "quarantine", f"in quarantine: {member.quarantine}", hint=_PARDON)
        return member

    async def lease(self, node: str, message: LeaseRequest) -> Lease:
        if self.member(node).role == "mirror":
            raise HubRefused(403, "role", "a mirror does not train", hint=_JOIN)
        name = secrets.token_hex(16)
        decision = await self.step(
            state_machine.LeaseRequested(node, name, message.version, message.samples_per_s)
        )
        lent = next((one.lease for one in decision.effects if isinstance(one, GrantLease)), None)
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
        """Its lease returns to the pool."""
        self.member(node)
        await self.step(state_machine.LeaseAbandoned(node))

    def replica(self, node: str, after: int | None) -> LogReplica:
        """For a mirror, or for the owner."""
        if self.member(node).role not in ("mirror", "owner"):
            raise HubRefused(403, "role", "only a mirror may copy the hub", hint=_JOIN)
        return replica_of(self._reader, after)

    # What the parts of the hub use.

    def needed_blobs(self) -> set[str]:
        """Of the chain, of the run's code, and of updates that wait."""
        return self.own_blobs() | {one.sha256 for one in self.arrivals.values()}

    def own_blobs(self) -> set[str]:
        """What no member may send as its own: the chain and the run's code."""
        return named_blobs(self.versions) | self.founding.blobs

    def let_go(self, blob: str) -> None:
        """At once, or with the next commit: what is being merged may become a blob of the same name."""
        if self.state.closing:
            self._discarded.add(blob)
        elif blob not in self.needed_blobs():
            self.blobs.remove(blob)

    async def finisher(self) -> Aggregator:
        if self._finisher is None:
            raise state_machine.NO_BASE.error()
        return await asyncio.shield(self._finisher)

    async def step(self, event: Event, changes: Changes | None = None) -> RoundDecision:
        """Decide, write, perform. ``changes`` are written along, unless it is refused: HubRefused (409)."""
        before = self.state.pool
        decision = decide(self.state, event, self.now())
        self.state = decision.state
        refusal = next((one for one in decision.effects if isinstance(one, RefuseRequest)), None)
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
                self._spawn(self._finish(effect))
        self._wake.set()
        if refusal is not None:
            raise refusal.error()
        return decision

    async def write(self, changes: Changes) -> None:
        """HubRefused (503) if the disk does not take it; the state is then as the log has it."""
        epoch = self._epoch
        assert self._writer is not None, "it was started"
        try:
            await self._writer.write([*changes, *self.signed.changes()] if changes else [])
        except HubError as error:
            async with self._reloading:
                if self._epoch == epoch:
                    logger.error("%s: going back to what the log holds", error.message)
                    self.read()
                    self._prepare()
                    self._writer.start_again()
                    self._wake.set()
            raise HubRefused(503, "disk", error.message, hint=error.hint, retry_s=5.0) from error

    async def found(self, base: CommittedRound, layout: VectorLayout, course: HubDataOrder) -> None:
        """The owner's base is there."""
        if self.version is not None:
            raise state_machine.BASE_THERE.error()
        await self.adopt([base], layout, course)

    async def adopt(
        self, versions: Sequence[CommittedRound], layout: VectorLayout, course: HubDataOrder
    ) -> None:
        """Versions of the chain that another hub made; their blobs are here."""
        facts = [change(HubLog.set_fact, "layout", layout), change(HubLog.set_fact, "course", course)]
        await self.write([*facts, *(change(HubLog.put_version, one) for one in versions)])
        before = named_blobs(self.versions)
        self.versions += versions
        self.layout = layout
        if self.state.course is None:
            await self.step(state_machine.RunFounded(course))
        await self.step(state_machine.RoundCommitted(self.versions[-1].number))
        self._prepare()
        self._changed.announce()
        await asyncio.to_thread(self.blobs.remove_all, before - self.needed_blobs())

    async def note(self, node: str, kind: str, reason: str) -> None:
        """A refusal, for the page; some kinds count, and bring their sender into quarantine."""
        if kind not in update_checks.COUNTED and self._notes.take(node, self.now()) > 0:
            return
        refusal = RefusedUpdate(node=node, kind=kind, reason=reason, time=self.clock())
        self.refusals = [*self.refusals, refusal][-MOST_REFUSALS:]
        changes = [change(HubLog.put_refusal, refusal)]
        member = self.members.get(node)
        logger.warning("refused (%s) of %s: %s", kind, member.name if member else node[:9], reason)
        if member is not None:
            after = update_checks.after_refusal(member, kind, reason, self.founding.terms)
            self.members[node] = after
            changes.append(change(HubLog.put_member, after))
        await self.write(changes)

    async def refuse(self, node: str, kind: str, reason: str) -> bool:
        """Note it and take the member's lease back; whether it is in quarantine now."""
        await self.note(node, kind, reason)
        await self.step(state_machine.LeaseAbandoned(node))
        return node in self.members and bool(self.members[node].quarantine)

    async def pardon(self, node: str) -> None:
        """End a member's quarantine and forget its refusals."""
        await self._set_quarantine(node, "")

    async def expel(self, node: str) -> None:
        """Ban a member until the owner pardons it. Its updates that wait for their round still count."""
        if node == self.founding.owner:
            raise HubRefused(403, "role", "the owner cannot be sent away", hint="Name another member.")
        await self._set_quarantine(node, "the owner sent this machine away")
        await self.step(state_machine.LeaseAbandoned(node))

    async def _set_quarantine(self, node: str, why: str) -> None:
        member = self.members.get(node)
        if member is None:
            raise HubRefused(404, "member", "nobody has this id here", hint="Copy it from the hub's page.")
        after = msgspec.structs.replace(member, refusals=0, quarantine=why)
        self.members[node] = after
        await self.write([change(HubLog.put_member, after)])

    # How a round ends.

    async def _finish(self, close: MergeRound) -> None:
        epoch = self._epoch
        try:
            finisher = await self.finisher()
            arrivals = tuple(self.arrivals[one.id] for one in close.updates)
            merged = await asyncio.to_thread(finisher.finish, self._closed(arrivals))
            if self._epoch == epoch:
                await self._commit(arrivals, merged)
            self._merge_backoff.reset()
        except Exception as error:  # noqa: BLE001  # whatever it is, the round must not hang
            wait_s = self._merge_backoff.next_wait()
            logger.error("the round could not be merged, it is tried again in %.1f s: %s", wait_s, error)
            await asyncio.sleep(wait_s)
            await self._tick_once(
                state_machine.MergeFailed(close.updates)
                if self._epoch == epoch
                else state_machine.ClockTick()
            )

    def _closed(self, arrivals: tuple[AcceptedUpdate, ...]) -> ClosedRound:
        chain = tuple(self.versions[last_base(self.versions) :])
        strangers, seen = update_checks.stranger_nodes(self.members), tuple(self.seen)
        return ClosedRound(arrivals, strangers, self.versions[-1], chain, self.clock(), seen)

    async def _commit(self, arrivals: tuple[AcceptedUpdate, ...], merged: RoundResult) -> None:
        """One transaction: the version, its contributors, and the end of their updates."""
        versions, refused = merged.versions, merged.refused
        spans = tuple(span for one in arrivals if one.update.id in refused for span in one.spans)
        decision = decide(self.state, state_machine.UpdateDropped(spans), self.now())
        self.state = decision.state
        changes = changes_of(decision.effects)  # of leases that end at this very moment
        changes += [change(HubLog.end_arrival, one.update.id) for one in arrivals]
        changes.append(change(HubLog.put_pool, self.state.pool))
        norms = update_checks.confirmed_norms(
            arrivals, merged.contributions, update_checks.stranger_nodes(self.members)
        )
        changes += [change(HubLog.put_norms, norms)] if norms else []
        for place, version in enumerate(versions):
            parts = merged.contributions if place == 0 else ()
            changes.append(change(HubLog.put_version, version, parts))
        await self.write(changes)  # nobody sees the version before this
        before = named_blobs(self.versions)
        self.versions += versions
        self.seen = update_checks.replace_norms(self.seen, norms)
        self.covered += sum(version.samples for version in versions)
        number = self.versions[-1].number
        for one in arrivals:
            del self.arrivals[one.update.id]
        await self.step(state_machine.RoundCommitted(number, len(norms)))
        self._changed.announce()
        for version in versions:
            self.on_commit(version)
            logger.info("version %d: %d updates, %d samples", number, version.members, version.samples)
        for one in arrivals:
            if one.update.id in refused:
                verdict = refused[one.update.id]
                await self.refuse(one.update.node, verdict.kind, verdict.reason)
        gone = before | {one.sha256 for one in arrivals} | self._discarded | merged.spent
        self._discarded.clear()
        await asyncio.to_thread(self.blobs.remove_all, gone - self.needed_blobs())

    async def _tick(self) -> None:
        await self._tick_once()
        while True:
            pause = max(0.02, min(30.0, state_machine.next_moment(self.state, self.now()) - self.now()))
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
        except Exception:  # nobody waits for whoever ticks: it would only be gone
            logger.exception("the rounds could not go on, it is tried again")
            await asyncio.sleep(1.0)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _prepare(self) -> None:
        """What merges needs torch, whose import takes a while: the hub answers meanwhile."""
        if self._finisher is None and self.layout is not None:
            terms, layout = self.founding.terms, self.layout
            work = asyncio.to_thread(self._make_finisher, self.blobs, terms, layout)
            self._finisher = asyncio.create_task(work)

    def read(self) -> None:
        """The state as the log has it. Leases get their whole time again."""
        found = self._reader.read()
        founding = read_fact(found.facts, "founding", HubFounding)
        if founding is None:
            raise HubError(f"there is no hub in {self.directory}", hint="Found one with `barnraise hub up`.")
        self.founding = founding
        self.signed.recall(found.facts)
        self.is_mirror = FOLLOWS in found.facts and SUCCEEDS not in found.facts
        self.layout = read_fact(found.facts, "layout", VectorLayout)
        self.versions = list(found.versions)
        self.members = dict(found.members)
        self.arrivals = {one.update.id: one for one in found.arrivals}
        self.refusals = list(found.refusals)
        self.seen = list(found.seen)
        self.state = recalled(found, founding, self.now(), is_region=self._is_region)
        self.covered = covered_by(found, self.state)
        self._epoch += 1
        self._changed.announce()


_JOIN = "Join with an invite: `barnraise join --invite ...`."
_PARDON = "Ask the owner of the hub to let this machine in again: `barnraise hub pardon`."
