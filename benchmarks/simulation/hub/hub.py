"""Hub without sockets, disk or tensors: its own decisions, with waits in place of the rest.

The real `hub.rounds.state_machine` leases samples, counts updates and closes rounds. A member's request
passes the hub's event loop, its line, its upload slots and its log, as in `hub.server` and `hub.storage`.
Each step takes the measured time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig
from barnraise.hub.rounds.leases import ActiveLease, PendingUpdate
from barnraise.hub.rounds.persistent_map import PersistentMap
from barnraise.hub.rounds.sample_pool import first_samples
from barnraise.hub.rounds.state_machine import (
    ClockTick,
    DropUpdate,
    Event,
    GrantLease,
    LeaseRequested,
    MergeRound,
    RefuseRequest,
    RoundCommitted,
    RoundDecision,
    RoundState,
    RunFounded,
    UpdateAccepted,
    UploadProgressed,
    decide,
    lease_for,
    next_deadline,
    staleness_weight,
    versions_behind,
)
from barnraise.hub.server.upload_slots import AT_ONCE
from barnraise.hub.storage.log import Contribution
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.hub.queues import Journal, Line, Places, Processor, Then

_SPARE_S = 0.02  # between two ticks, as in the hub


class Costs(NamedTuple):
    """Seconds of a hub's processor: of its event loop, and of threads beside it. Measured."""

    ask_s: float = 0.002  # a lease
    push_s: float = 0.004  # an update: declared, received, answered
    push_mb_s: float = 0.005  # and for each of its megabytes
    admit_s: float = 0.002  # the same, in threads
    admit_mb_s: float = 0.010
    head_s: float = 0.002  # a question for the head, and for the blob
    pull_mb_s: float = 0.005
    read_mb_s: float = 0.002  # the same, in threads
    merge_mb_s: float = 0.003  # for each update of a round
    sync_s: float = 0.002  # of the disk
    handshake_s: float = 0.004  # of a new connection


class Server(NamedTuple):
    """Resources of the server that a hub runs on."""

    cores: int = 2
    mbps: float = 1000.0
    gigabytes: float = 4.0
    month_terabytes: float = 20.0


class Reach(NamedTuple):
    """A member's line, and its way to the hub."""

    up_mbps: float
    down_mbps: float
    delay_s: float


class Sizes(NamedTuple):
    """Sizes of the transferred messages, in bytes."""

    update: int
    delta: int
    words: int  # everything else that a member sends and hears in a round


class Closed(NamedTuple):
    """A round that became a version."""

    at: float
    updates: int
    samples: int


class Tally:
    """Counts of the accepted, late and refused updates of a hub's members."""

    def __init__(self) -> None:
        self.counted = self.late = self.samples = 0
        self.refused: dict[str, int] = {}
        self.rounds: list[Closed] = []

    def refuse(self, kind: str) -> None:
        self.refused[kind] = self.refused.get(kind, 0) + 1


Answer = Callable[[ActiveLease | RefuseRequest], None]
OnReply = Callable[[RefuseRequest | None], None]


class SimulatedHub:
    """The hub of a run."""

    is_region = False

    def __init__(
        self,
        clock: FakeClock,
        name: str,
        terms: RoundConfig,
        course: HubDataOrder,
        costs: Costs,
        server: Server,
        sizes: Sizes,
    ) -> None:
        self.clock, self.name, self.terms, self.course = clock, name, terms, course
        self.costs, self.server, self.sizes = costs, server, sizes
        self.cpu = Processor(clock, [0.0] * server.cores)
        self.into, self.out = Line(clock, server.mbps), Line(clock, server.mbps)
        self.places = Places(clock, AT_ONCE)
        self.journal = Journal(clock, costs.sync_s)
        self.tally = Tally()
        self.state = RoundState(terms=terms, is_region=self.is_region)
        self.arrivals: dict[str, Contribution] = {}
        self.parts: list[Contribution] = []  # of all rounds, in their order
        self._waiters: dict[int, Callable[[int | None], None]] = {}
        self._names = itertools.count()
        self._tick_at = float("inf")

    def found(self) -> None:
        self.step(RunFounded(self.course))

    @property
    def version(self) -> int:
        assert self.state.version is not None
        return self.state.version

    # what members ask for

    def ask(self, node: str, version: int, rate: float, delay_s: float, answer: Answer) -> None:
        self.cpu.loop(self.costs.ask_s, partial(self._asked, node, version, rate, delay_s, answer))

    def _asked(self, node: str, version: int, rate: float, delay_s: float, answer: Answer) -> None:
        decision = self.step(LeaseRequested(node, f"{next(self._names):032x}", version, rate))
        for effect in decision.effects:
            if isinstance(effect, GrantLease):
                send_lease = partial(self.clock.later, 2 * delay_s, partial(answer, effect.lease))
                self.journal.write(send_lease)
                return
            if isinstance(effect, RefuseRequest):
                self.clock.later(2 * delay_s, partial(answer, effect))
                return

    def push(self, update: PendingUpdate, reach: Reach, answer: OnReply) -> None:
        """Declare an update; its body follows when an upload slot is free."""
        refused = lease_for(self.state, update)
        if isinstance(refused, RefuseRequest):
            self.cpu.loop(self.costs.ask_s, partial(self._tell, refused, reach, answer))
            return
        self.step(UploadProgressed(update.lease))
        self.places.enter(partial(self._receive, update, reach, answer))

    def _receive(self, update: PendingUpdate, reach: Reach, answer: OnReply) -> None:
        received = partial(self._received, update, reach, answer)
        self.into.carry(self.sizes.update, reach.up_mbps, received)

    def _received(self, update: PendingUpdate, reach: Reach, answer: OnReply) -> None:
        megabytes = self.sizes.update / 1e6
        admit = partial(self._admit, update, reach, answer)
        synced = partial(self.clock.later, 2 * self.costs.sync_s, admit)  # the file, and its directory
        thread_s = self.costs.admit_s + self.costs.admit_mb_s * megabytes
        thread = partial(self.cpu.thread, thread_s, synced)
        self.cpu.loop(self.costs.push_s + self.costs.push_mb_s * megabytes, thread)

    def _admit(self, update: PendingUpdate, reach: Reach, answer: OnReply) -> None:
        self.step(UploadProgressed(update.lease))
        lent = lease_for(self.state, update)
        if isinstance(lent, RefuseRequest):
            self._leave(lent, reach, answer)
            return
        late = versions_behind(self.state, update.version)
        decision = self.step(UpdateAccepted(update), self._contribution(update, lent, late))
        refused = next((effect for effect in decision.effects if isinstance(effect, RefuseRequest)), None)
        if refused is not None:
            self.arrivals.pop(update.id)
            self._leave(refused, reach, answer)
            return
        self.tally.counted += 1
        self.tally.late += late > 0
        self.journal.write(partial(self._leave, None, reach, answer))

    def _contribution(self, update: PendingUpdate, lent: ActiveLease, late: int) -> Contribution:
        spans = update.spans or first_samples(lent.spans, update.samples)
        weight = update.samples * staleness_weight(late)
        return Contribution(
            node=update.node,
            lease=update.lease,
            samples=update.samples,
            spans=spans,
            behind=late,
            weight=weight,
            scale=1.0,
            sha256=update.id,
        )

    def _leave(self, refused: RefuseRequest | None, reach: Reach, answer: OnReply) -> None:
        self.places.leave()
        self._tell(refused, reach, answer)

    def _tell(self, refused: RefuseRequest | None, reach: Reach, answer: OnReply) -> None:
        if refused is not None:
            self.tally.refuse(refused.kind)
        self.clock.later(4 * reach.delay_s, partial(answer, refused))  # declared, and sent

    def head(self, after: int, wait_s: float, answer: Callable[[int | None], None]) -> None:
        """Answer with the version if there is a newer one, or with None if there is none in time."""
        if self.version != after or not wait_s:
            self.cpu.loop(self.costs.head_s, partial(self._answer_head, after, answer))
            return
        number = next(self._names)
        self._waiters[number] = answer
        self.clock.later(wait_s, partial(self._late_head, number))

    def _late_head(self, number: int) -> None:
        answer = self._waiters.pop(number, None)
        if answer is not None:
            self.cpu.loop(self.costs.head_s, partial(answer, None))

    def _answer_head(self, after: int, answer: Callable[[int | None], None]) -> None:
        answer(self.version if self.version != after else None)

    def fetch(self, deltas: int, reach: Reach, then: Then) -> None:
        """Fetch the blobs of this many versions."""
        size = deltas * self.sizes.delta
        served = partial(self.out.carry, size, reach.down_mbps, then)
        sent = partial(self.cpu.loop, self.costs.pull_mb_s * size / 1e6, served)
        self.cpu.thread(self.costs.read_mb_s * size / 1e6, sent)

    # what it does by itself

    def step(self, event: Event, arrival: Contribution | None = None) -> RoundDecision:
        if isinstance(event, UpdateAccepted) and arrival is not None:
            self.arrivals[event.update.id] = arrival
        decision = decide(self.state, event, self.clock.now)
        self.state = decision.state
        for effect in decision.effects:
            if isinstance(effect, MergeRound):
                self._merge(effect.updates)
            elif isinstance(effect, DropUpdate):
                del self.arrivals[effect.update]
                self.tally.counted -= 1
                self.tally.refuse("discarded")
        moment = max(next_deadline(self.state, self.clock.now), self.clock.now + _SPARE_S)
        if moment < self._tick_at:
            self._tick_at = moment
            self.clock.later(moment - self.clock.now, partial(self._tick, moment))
        return decision

    def _tick(self, moment: float) -> None:
        if moment == self._tick_at:
            self._tick_at = float("inf")
            self.step(ClockTick())

    def _merge(self, updates: tuple[PendingUpdate, ...]) -> None:
        parts = [self.arrivals.pop(update.id) for update in updates]
        seconds = self.costs.merge_mb_s * self.sizes.update / 1e6 * len(parts)
        self.cpu.spread(seconds, partial(self.finish, parts))

    def finish(self, parts: list[Contribution]) -> None:
        """Finish a round whose updates are merged, and commit the next version."""
        self.journal.write(partial(self.commit, parts, self.version + 1))

    def commit(self, parts: list[Contribution], version: int) -> None:
        self.parts += parts
        if parts:
            closed = Closed(self.clock.now, len(parts), sum(part.samples for part in parts))
            self.tally.rounds.append(closed)
            self.tally.samples += closed.samples
        self.step(RoundCommitted(version))
        self.announce()

    def announce(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for answer in waiters.values():
            self.cpu.loop(self.costs.head_s, partial(answer, self.version))


def begun_with(hub: SimulatedHub, usual: dict[str, int]) -> None:
    """Start as if the run had been going: each member has delivered its usual number of samples before."""
    standing = tuple(sorted(usual.values()))
    hub.state = msgspec.structs.replace(hub.state, usual=PersistentMap(usual), standing=standing)
