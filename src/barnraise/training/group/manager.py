"""The members who train together now: learns of each new group from this machine's agent, and meets there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_told, encode
from barnraise.agent_client.kv_client import KvClient, agent_at
from barnraise.agent_client.kv_messages import Namespace
from barnraise.agent_client.run_requests import (
    MOST_WORDS,
    GraphRequest,
    GraphResponse,
    GroupRequest,
    GroupResponse,
)
from barnraise.collectives.cluster_store import ClusterStore
from barnraise.collectives.process_group import create_group
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import BarnraiseError, CollectiveError, PeerLost, ProtocolError, RunError
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.planning.cost.rank_layout import RankLayout
from barnraise.planning.inputs.levels import OPEN, Levels
from barnraise.topology.graph import TopologyGraph, decode_graph
from barnraise.training.gradients.compressed_reducer import CompressingGroup, Encoding
from barnraise.training.gradients.reducer import PendingWork, ReduceGroup
from barnraise.training.group.process_group import TrainingGroup
from barnraise.training.group.single import CompletedWork
from barnraise.training.group.sites import SiteMap
from barnraise.training.recovery.live_recovery import RecoveryGroup
from barnraise.training.recovery.state_transfer import TensorChannel

log = logging.getLogger("barnraise.training")

_ASK_S = 5.0
_MEET_S = 30.0
_SAY_S = 10.0
_SAY_SELDOM_S = 600.0
_CLOSE_S = 5.0
_OPERATION_S = 3600.0  # a slow member is waited for; a dead one is noticed by its links


class WorkerId(NamedTuple):
    """Who this worker is to its agent."""

    run: str
    local_rank: int
    start: int
    state: Path
    node: str

    @classmethod
    def from_environment(cls) -> WorkerId | None:
        """None in a process that no agent launched: it trains alone."""
        if not os.environ.get("BARNRAISE_LAUNCHED"):
            return None
        return cls(
            os.environ["BARNRAISE_RUN"],
            int(os.environ["LOCAL_RANK"]),
            int(os.environ["BARNRAISE_START"]),
            state_directory(load_settings()),
            os.environ["BARNRAISE_NODE"],
        )


class GroupManager(TensorChannel, ReduceGroup, CompressingGroup, Protocol):
    """What the session needs of the group. Every method may raise CollectiveError: then `meet` again."""

    rank: int
    world: int
    generation: int
    beginning: bool  # somebody in this group was started with the run, or with its restart
    finished: bool  # a member has ended well
    on_told: Callable[[int], None]  # while it meets: the newest nursery of the group that comes, or 0

    @property
    def provisional(self) -> bool: ...

    def meet(self, broken: CollectiveError | None) -> None:
        """Be in a group that is newer than the last one, with everybody in it; ``broken``: how that ended."""

    def newest(self) -> int:
        """The newest generation that is known of, without waiting."""

    def machines(self) -> tuple[str, ...]:
        """Of every rank."""

    def survey(self) -> TopologyGraph:
        """What was measured of the cluster, from any thread."""

    def gather(self, word: bytes) -> list[bytes]: ...

    def abort(self) -> None:
        """From any thread: what waits for the others ends now."""

    def nursery(self) -> int:
        """The number of the newest attempt to heal newcomers of this group; 0: there are none."""

    def nursery_opener(self, number: int) -> Callable[[], RecoveryGroup] | None:
        """Opens the room with them, from any thread; None if that attempt is out of date."""

    def await_nursery(self) -> RecoveryGroup | None:
        """For a newcomer: the next attempt to heal it; None once it is a member."""

    def nursery_broke(self) -> None:
        """That attempt failed: so that another is made."""

    def say_near(self) -> None:
        """This newcomer could be let in."""

    def say_trained(self) -> None:
        """This member has committed a step; said once."""

    def say_waits(self, words: str) -> None:
        """For whom or what, to whoever asks how the run fares; empty: for nobody."""

    def say_rests(self, nodes: Sequence[str], why: str) -> None:
        """This group would be faster without these machines; from any thread."""

    def close(self) -> None:
        """The script is over: nobody is healed any more."""


class _MeetingStore(ClusterStore):
    """Waits for members who are still in the middle of a step, but not for a group that is out of date."""

    def __init__(self, board: KvClient, is_stale: Callable[[], bool]) -> None:
        super().__init__(board, timedelta(seconds=_MEET_S))
        self._is_stale = is_stale

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        reporter = WaitReporter(_SAY_S, _SAY_S)
        while True:
            try:
                super().wait(keys, timedelta(seconds=1.0))
                return
            except RuntimeError:
                if self._is_stale() or reporter.waited_s > _OPERATION_S:
                    raise
                if reporter.is_due():
                    missing = ", ".join(key for key in keys if not self.check([key]))
                    log.warning("waiting for %.0f s for members to meet: %s", reporter.waited_s, missing)


class AgentGroupManager:
    """Groups as the cluster decides them."""

    def __init__(self, place: WorkerId, levels: Levels = OPEN) -> None:
        self._place, self._levels = place, levels
        self.rank, self.world, self.generation = 0, 1, 0
        self.beginning, self.finished, self._provisional = True, False, False
        self.on_told: Callable[[int], None] = lambda nursery: None
        self._room: TrainingGroup | None = None
        self._stuck = False
        self._blames: tuple[int, ...] = ()
        self._near = self._trained = False
        self._words = ""  # for what it waits
        self._rests: tuple[int, tuple[bytes, ...], str] = (0, (), "")  # in which group, who, and why
        self._last_nursery = self._broken_nursery = 0
        self._nurseries: dict[int, TrainingGroup | None] = {}  # those that are open; None: about to be
        self._closing = False
        self._whereabouts = SiteMap(self.survey)
        self._sites_open = False  # whether this group has yet to agree on them
        self._told: GroupResponse | None = None
        self._changed = threading.Condition()
        self._failure = ""
        threading.Thread(target=self._listen, name="barnraise-circle", daemon=True).start()

    def newest(self) -> int:
        told = self._told
        return told.generation if told is not None and told.is_member else self.generation

    @property
    def provisional(self) -> bool:
        """As it is by now: it may be settled while the group stays."""
        told = self._told
        if told is not None and told.generation == self.generation:
            self._provisional = told.provisional
        return self._provisional

    def machines(self) -> tuple[str, ...]:
        others = [] if self._room is None else [node.hex() for node in self._room.nodes]
        return (*others[: self.rank], self._place.node, *others[self.rank :])

    def survey(self) -> TopologyGraph:
        with ListenerClient.connect(self._place.state) as client:
            told = decode_told(client.ask(encode(GraphRequest()), _ASK_S))
        if not isinstance(told, GraphResponse):
            raise RunError("the agent does not speak of what it has measured")
        return decode_graph(told.graph)

    def meet(self, broken: CollectiveError | None) -> None:
        """Groups that break while they are made are passed over for the next one."""
        self._complain(broken)
        while True:
            told = self._await(lambda told: told.is_member and told.generation > self.generation)
            self.on_told(told.nursery)
            self._stuck, self._blames, self._near = False, (), False
            if self._room is not None:
                self._room.close()
                self._room = None
            self.generation, self.rank, self.world = told.generation, told.rank, told.world
            self._provisional, self.beginning = told.provisional, told.beginning
            self.finished = told.finished
            if told.world == 1:
                return
            try:
                self._room = _make_room(self._store(told, self._is_passed), told, told.rank, told.world)
                self._room.tell_levels(self._levels)
                self._sites_open = told.world > 2
                return
            except (CollectiveError, ProtocolError, RuntimeError) as error:
                log.info("generation %d did not come about: %s", told.generation, error)
                self._complain(error)

    def gather(self, word: bytes) -> list[bytes]:
        return [word] if self._room is None else self._room.gather(word)

    def abort(self) -> None:
        if self._room is not None:
            self._room.abort()

    def begin_sum(self, tensor: torch.Tensor) -> PendingWork:
        if self._room is None:
            return CompletedWork()
        self._agree_on_sites(self._room)
        return self._room.begin_sum(tensor)

    def sum_coded(self, mine: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:
        assert self._room is not None
        self._agree_on_sites(self._room)
        return self._room.sum_coded(mine)

    def _agree_on_sites(self, room: TrainingGroup) -> None:
        """With the first sum and not before: who only meet to see that all is done must not wait."""
        if self._sites_open:
            self._sites_open = False
            room.agree_on_sites(self._whereabouts.ranks(self.machines()) if self.rank == 0 else RankLayout())

    def begin_send(self, tensor: torch.Tensor, to: int) -> PendingWork:
        assert self._room is not None
        return self._room.begin_send(tensor, to)

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> PendingWork:
        assert self._room is not None
        return self._room.begin_receive(tensor, sender)

    # newcomers

    def nursery(self) -> int:
        told = self._told
        is_now = told is not None and told.is_member and told.generation == self.generation
        return told.nursery if told is not None and is_now else 0

    def nursery_opener(self, number: int) -> Callable[[], RecoveryGroup] | None:
        told = self._told
        if told is None or (told.nursery, told.generation) != (number, self.generation):
            return None
        return partial(self._open_nursery, told, self.rank)

    def await_nursery(self) -> RecoveryGroup | None:
        while True:
            told = self._await(lambda told: told.is_member or told.nursery > self._last_nursery)
            if told.is_member:
                return None
            self._last_nursery = told.nursery
            try:
                return self._open_nursery(told, told.world + told.rank)
            except (CollectiveError, ProtocolError, RuntimeError) as error:
                log.info("nobody could heal this worker yet: %s", error)
                self.nursery_broke()

    def nursery_broke(self) -> None:
        self._broken_nursery, self._near = self._last_nursery, False
        self._tell_now()

    def say_near(self) -> None:
        if not self._near:
            self._near = True
            self._tell_now()

    def say_trained(self) -> None:
        if not self._trained:
            self._trained = True
            self._tell_now()

    def say_waits(self, words: str) -> None:
        if self._words != words[:MOST_WORDS]:
            self._words = words[:MOST_WORDS]
            self._tell_now()

    def say_rests(self, nodes: Sequence[str], why: str) -> None:
        self._rests = self.generation, tuple(map(bytes.fromhex, nodes)), why[:MOST_WORDS]
        self._tell_now()

    def close(self) -> None:
        """A thread with torch's C++ on its stack would abort the interpreter as it ends: wait for them."""
        self._closing = True
        for room in filter(None, list(self._nurseries.values())):
            room.abort()
        until = time.monotonic() + _CLOSE_S
        while self._nurseries and time.monotonic() < until:
            time.sleep(0.01)

    def _open_nursery(self, told: GroupResponse, rank: int) -> RecoveryGroup:
        def is_stale() -> bool:
            return self._closing or (self._told is not None and self._told.nursery != told.nursery)

        def closed() -> None:
            self._nurseries.pop(told.nursery, None)

        self._nurseries[told.nursery] = None
        try:
            size, prefix = told.world + told.nursed, f"nursery-{told.nursery}"
            room = _make_room(self._store(told, is_stale), told, rank, size, prefix)
        except BaseException:
            closed()
            raise
        room.on_close = closed
        self._nurseries[told.nursery] = room
        if self._closing:
            room.abort()
        return room

    # the agent

    def _complain(self, error: Exception | None) -> None:
        """So that the agent may tell the others whom this worker has lost."""
        self._blames = (error.peer,) if isinstance(error, PeerLost) else ()
        self._stuck = True
        if self.generation:
            self._tell_now()

    def _is_passed(self) -> bool:
        return self.newest() > self.generation

    def _store(self, told: GroupResponse, is_stale: Callable[[], bool]) -> ClusterStore:
        scope = Namespace(self._place.run, told.generation)
        return _MeetingStore(KvClient(agent_at(self._place.state), scope, _MEET_S), is_stale)

    def _await(self, is_good: Callable[[GroupResponse], bool]) -> GroupResponse:
        """However long it takes: this worker may be the last that holds the state."""
        reporter = WaitReporter(_SAY_S, 2 * _SAY_S, max_interval_s=_SAY_SELDOM_S)
        with self._changed:
            while True:
                told = self._told
                if told is not None and is_good(told):
                    return told
                why = self._failure or (told.sentence if told is not None else "the agent is silent")
                if reporter.is_due():
                    log.warning("waiting for %.0f s for a group to train in: %s", reporter.waited_s, why)
                self._changed.wait(0.5)

    def _question(self, version: int, wait_s: float) -> GroupRequest:
        run, local_rank, start, *_ = self._place
        generation = self.generation or self._broken_nursery
        stuck = generation > 0 and (self._stuck or self.generation == 0)
        blames = self._blames if stuck else ()
        rests_in, rests, why = self._rests
        is_said = rests_in == self.generation
        return GroupRequest(
            run,
            local_rank,
            start,
            version,
            wait_s,
            generation,
            stuck,
            blames,
            self._near,
            self._trained,
            self._words,
            rests if is_said else (),
            why if is_said else "",
        )

    def _tell_now(self) -> None:
        """Beside the question that waits for news."""
        try:
            with ListenerClient.connect(self._place.state) as client:
                client.ask(encode(self._question(0, 0.0)), _ASK_S)
        except BarnraiseError as error:
            log.info("the agent could not be told: %s", error.message)

    def _listen(self) -> None:
        """Ask the agent again and again; it answers when there is news."""
        version = 0
        while True:
            try:
                with ListenerClient.connect(self._place.state) as client:
                    while True:
                        question = self._question(version, _ASK_S)
                        told = decode_told(client.ask(encode(question), _ASK_S * 3))
                        if not isinstance(told, GroupResponse):
                            raise RunError("the agent does not speak of groups")
                        version = told.version
                        room = self._room
                        if told.broken and question.generation == self.generation and room is not None:
                            room.abort()  # one of it is gone: the others need not wait for silence
                        with self._changed:
                            self._told, self._failure = told, ""
                            self._changed.notify_all()
            except BarnraiseError as error:
                self._failure = error.message
                time.sleep(0.2)


def _make_room(
    store: ClusterStore, told: GroupResponse, rank: int, world: int, prefix: str = "group"
) -> TrainingGroup:
    try:
        group = create_group(PrefixStore(prefix, store), rank, world, _MEET_S, told.generation)
    finally:
        store.close()  # it serves to meet only
    group.setTimeout(timedelta(seconds=_OPERATION_S))
    return TrainingGroup(group, rank, world, told.world)
