"""Members of a simulated hub's rounds: leaves that train, and regions that have members of their own.

A leaf behaves like `hub.client.contributor`, with the pauses of `hub.client`; a region like `hub.region`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from barnraise.core.errors import ProtocolError
from barnraise.core.flow.retry import ReportedBackoff
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    Lease,
    RoundConfig,
    UpdateDeclaration,
    VersionStep,
    decode_message,
    encode_message,
)
from barnraise.hub.region.region import GATHER_S, declare_update, regional_terms
from barnraise.hub.rounds.leases import ActiveLease, PendingUpdate
from barnraise.hub.rounds.state_machine import ParentFinished, RefuseRequest, RoundCommitted, SamplesSupplied
from barnraise.hub.storage.log import Contribution
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.hub.hub import Costs, Reach, Server, SimulatedHub, Sizes

_POLL_S = 20.0
_MOST_DELTAS = 5  # beyond them the whole state is smaller
_TOO_LONG = RefuseRequest("message", "more spans than a message may have", "Deal out fewer samples.")


class Habits:
    """Common behaviour of all leaves: the chance that they vanish, and for how long."""

    def __init__(self, source: random.Random, vanish: float = 0.0, away_s: float = 0.0) -> None:
        self.source, self.vanish, self.away_s = source, vanish, away_s
        self.vanished = 0


class Leaf:
    __slots__ = (
        "habits",
        "hub",
        "lease",
        "name",
        "pauses",
        "questions",
        "reach",
        "received",
        "sent",
        "speed",
        "version",
    )

    def __init__(self, hub: SimulatedHub, name: str, speed: float, reach: Reach, habits: Habits) -> None:
        self.hub, self.name, self.speed, self.reach, self.habits = hub, name, speed, reach, habits
        self.version = 0
        self.lease: ActiveLease | None = None
        self.pauses: ReportedBackoff | None = None
        self.questions = self.sent = self.received = 0

    def ask(self) -> None:
        self.questions += 1
        self.hub.ask(self.name, self.version, self.speed, self.reach.delay_s, self._answered)

    def _answered(self, reply: ActiveLease | RefuseRequest) -> None:
        if isinstance(reply, ActiveLease):
            self.lease, self.pauses = reply, None
            self._train(reply)
        elif reply.kind == "delivered":
            self._look(_POLL_S)
        elif reply.kind == "behind":
            self._look(0.0)
        elif reply.kind != "finished":
            if self.pauses is None:
                clock = self.hub.clock
                self.pauses = ReportedBackoff("samples", _silent, self._sleep, lambda: clock.now)
            self.pauses.pause(reply.message, reply.retry_s)

    def _sleep(self, seconds: float) -> None:
        self.hub.clock.later(seconds, partial(self._look, 0.0))

    def _train(self, lease: ActiveLease) -> None:
        habits = self.habits
        if habits.vanish and habits.source.random() < habits.vanish:
            habits.vanished += 1
            self.hub.clock.later(habits.away_s, partial(self._look, 0.0))
        else:
            self.hub.clock.later(lease.samples / self.speed, self._push)

    def _push(self) -> None:
        lease = self.lease
        assert lease is not None
        self.questions += 2
        self.sent += self.hub.sizes.update
        name = f"{lease.id}-{self.name}"
        update = PendingUpdate(name, self.name, lease.id, lease.version, lease.samples)
        self.hub.push(update, self.reach, self._pushed)

    def _pushed(self, refused: RefuseRequest | None) -> None:
        self._look(0.0 if refused else _POLL_S)

    def _look(self, wait_s: float) -> None:
        self.questions += 1
        self.hub.head(self.version, wait_s, self._headed)

    def _headed(self, version: int | None) -> None:
        if version is None:
            self.ask()
            return
        deltas = min(version - self.version, _MOST_DELTAS)
        self.questions += 1
        self.received += deltas * self.hub.sizes.delta
        self.hub.fetch(deltas, self.reach, partial(self._fetched, version))

    def _fetched(self, version: int) -> None:
        self.version = version
        self.ask()


class Region(SimulatedHub):
    """A hub whose samples come from another."""

    is_region = True

    def __init__(
        self,
        clock: FakeClock,
        name: str,
        parent: SimulatedHub,
        reach: Reach,
        course: HubDataOrder,
        costs: Costs,
        server: Server,
        sizes: Sizes,
    ) -> None:
        terms: RoundConfig = regional_terms(parent.terms)
        super().__init__(clock, name, terms, course, costs, server, sizes)
        self.parent, self.reach = parent, reach
        self.lease: ActiveLease | None = None
        self.came_to_nothing = 0  # updates of rounds that the parent did not take
        self._watched: int | None = None

    def begin(self) -> None:
        """Start the region's turn: sync, gather requests, lease, and distribute, until its round is over."""
        self._watched = None
        self.parent.head(self.version, 0.0, self._synced)

    def _synced(self, version: int | None) -> None:
        if version is None or self.state.closing:
            self._gather(None)
        else:
            self._fetch(version, partial(self._adopt, version))

    def _adopt(self, version: int) -> None:
        self.step(RoundCommitted(version))
        self.announce()
        self._gather(None)

    def _gather(self, seen: int | None) -> None:
        count = len(self.state.wishes)
        is_known = seen is None and count and self.lease is not None
        if count != seen and not is_known:
            self.clock.later(GATHER_S, partial(self._gather, count))
            return
        wished = sum(self.state.wishes.values())
        if wished:
            rate = wished / self.parent.terms.round_s
            self.parent.ask(self.name, self.version, rate, self.reach.delay_s, self._leased)
        else:
            self.begin()

    def _leased(self, reply: ActiveLease | RefuseRequest) -> None:
        if isinstance(reply, ActiveLease):
            self.lease, self._watched = reply, self.version
            self.step(SamplesSupplied(reply.spans))
            self.clock.later(max(0.0, reply.void - self.clock.now), partial(self._give_up, reply))
        elif reply.kind == "finished":
            self.step(ParentFinished())
        else:
            self.clock.later(max(reply.retry_s, 0.1), self.begin)

    def _give_up(self, lease: ActiveLease) -> None:
        if self.lease is lease and self._watched is not None:
            self.begin()

    def announce(self) -> None:
        super().announce()
        if self._watched is not None and (self.version != self._watched or self.lease is None):
            self.begin()

    def finish(self, parts: list[Contribution]) -> None:
        """Pass the members' updates to the parent as one update."""
        lease = self.lease
        if lease is None or lease.version != self.version:
            self._nothing(parts, None)
            return
        update = self._declared(lease, parts)
        if update is None:
            self.tally.refuse(_TOO_LONG.kind)
            self._passed(parts, _TOO_LONG)
        else:
            self.parent.push(update, self.reach, partial(self._passed, parts))

    def _declared(self, lease: ActiveLease, parts: list[Contribution]) -> PendingUpdate | None:
        """Return the update as its declaration is parsed, or None if the declaration is too long."""
        own = Lease(
            id=lease.id, version=lease.version, spans=lease.spans, steps=0, seconds=lease.seconds, void_s=0.0
        )
        step = VersionStep("delta", lease.version, f"{self.version:064x}", self.sizes.update, "int8")
        try:
            declaration = decode_message(UpdateDeclaration, encode_message(declare_update(step, own, parts)))
        except ProtocolError:
            return None
        name = f"{lease.id}-{self.name}"
        return PendingUpdate(
            name, self.name, lease.id, declaration.version, declaration.samples, declaration.trained
        )

    def _passed(self, parts: list[Contribution], refused: RefuseRequest | None) -> None:
        if refused is None:
            self._await(parts)
        else:
            self.lease = None
            self.parent.head(self.version, _POLL_S, partial(self._nothing, parts))

    def _await(self, parts: list[Contribution]) -> None:
        self.parent.head(self.version, _POLL_S, partial(self._receive_head, parts))

    def _receive_head(self, parts: list[Contribution], version: int | None) -> None:
        if version is None:
            self._await(parts)
        else:
            self._fetch(version, partial(self._write, parts, version))

    def _nothing(self, parts: list[Contribution], version: int | None) -> None:
        self.came_to_nothing += len(parts)
        if version is None:
            self._write([], self.version)
        else:
            self._fetch(version, partial(self._write, [], version))

    def _write(self, parts: list[Contribution], version: int) -> None:
        self.journal.write(partial(self.commit, parts, version))

    def _fetch(self, version: int, then: Callable[[], None]) -> None:
        deltas = min(version - self.version, _MOST_DELTAS)
        self.into.carried += deltas * self.sizes.delta
        self.parent.fetch(deltas, self.reach, then)


def _silent(words: str) -> None:
    """Ignore what a client reports about its pauses."""
