"""Group manager: connects a process group for each generation that the run's controller decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import PrefixStore

from barnraise.agent_client.kv_client import KvClient, agent_at
from barnraise.agent_client.kv_messages import Namespace
from barnraise.agent_client.run_requests import GroupResponse
from barnraise.collectives.c10d.create import create_group, prepare_groups
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.collectives.cluster_store import ClusterStore
from barnraise.core.errors import CollectiveError, ProtocolError
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.planning.inputs.levels import OPEN, Levels
from barnraise.topology.graph import TopologyGraph
from barnraise.training.group.agent_client import AgentGroupClient, WorkerId
from barnraise.training.group.interface import RecoveryGroup, TrainingCollectives
from barnraise.training.group.process_group import TrainingGroup
from barnraise.training.group.single import SingleWorkerGroup
from barnraise.training.group.sites import SiteMap

log = logging.getLogger("barnraise.training")

_RENDEZVOUS_S = 30.0
_REPORT_S = 10.0
_CLOSE_S = 5.0
_OPERATION_S = 3600.0  # a slow worker is waited for; a dead one is noticed by its links


class _RendezvousStore(ClusterStore):
    """Key-value store that waits for workers in the middle of a step, but not for an outdated group."""

    def __init__(self, client: KvClient, is_stale: Callable[[], bool]) -> None:
        super().__init__(client, timedelta(seconds=_RENDEZVOUS_S))
        self._is_stale = is_stale

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        reporter = WaitReporter(_REPORT_S, _REPORT_S)
        while True:
            try:
                super().wait(keys, timedelta(seconds=1.0))
                return
            except RuntimeError:
                if self._is_stale() or reporter.waited_s > _OPERATION_S:
                    raise
                if reporter.is_due():
                    missing = ", ".join(key for key in keys if not self.check([key]))
                    log.warning("waiting for %.0f s for workers to connect: %s", reporter.waited_s, missing)


class AgentGroupManager:
    """Group manager of a worker that an agent launched."""

    def __init__(self, worker: WorkerId, levels: Levels = OPEN) -> None:
        self._levels = levels
        self.rank, self.world = 0, 1
        self.is_first_start, self._provisional = True, False
        self.on_next_group: Callable[[int], None] = lambda attempt: None
        self.group: TrainingCollectives = SingleWorkerGroup()
        self._site_map = SiteMap(self.survey)
        self._last_recovery = 0
        self._names: tuple[str, ...] = ()
        # Recovery groups by attempt; None while one is being connected.
        self._recovery_groups: dict[int, TrainingGroup | None] = {}
        self._is_closing = False
        # A rank of the group is gone: fail the pending operations, rather than wait for a timeout.
        self._agent = AgentGroupClient(worker, lambda: self.group.abort())
        self.report_caught_up = self._agent.report_caught_up
        self.report_trained = self._agent.report_trained
        self.report_waiting = self._agent.report_waiting
        self.request_pause = self._agent.request_pause

    @property
    def generation(self) -> int:
        return self._agent.generation

    def newest_generation(self) -> int:
        """Return the newest generation that this worker belongs to."""
        response = self._agent.response
        return response.generation if response is not None and response.is_member else self.generation

    def is_member(self, generation: int) -> bool | None:
        """Tell whether this worker is in the newest group; None if that is older than ``generation``."""
        response = self._agent.response
        return response.is_member if response is not None and response.generation >= generation else None

    @property
    def finished(self) -> bool:
        """Return True if a worker of the run is known to have finished the script."""
        response = self._agent.response
        return response is not None and response.finished

    @property
    def provisional(self) -> bool:
        """Return the newest status, which may change while the group stays the same."""
        response = self._agent.response
        if response is not None and response.generation == self.generation:
            self._provisional = response.provisional
        return self._provisional

    def machines(self) -> tuple[str, ...]:
        """Return the node id of every rank."""
        others = [node.hex() for node in self.group.nodes]
        return (*others[: self.rank], self._agent.worker.node, *others[self.rank :])

    def name_of(self, rank: int) -> str:
        """Return the name of the machine of a rank; with the rank if the machine has several workers."""
        if rank >= len(self._names):
            return f"rank {rank}"
        name = self._names[rank]
        return name if self._names.count(name) == 1 else f"rank {rank} on {name}"

    def survey(self) -> TopologyGraph:
        """Return the topology that the agents have measured."""
        return self._agent.survey()

    def join_next_group(self, error: CollectiveError | None) -> None:
        """Block until a newer group is connected. Skip groups that fail while they connect."""
        self._agent.report_failure(error)
        while True:
            response = self._agent.wait_for(lambda new: new.is_member and new.generation > self.generation)
            self.on_next_group(response.recovery_attempt)
            self._agent.clear_failure()
            old, self.group = self.group, SingleWorkerGroup()
            old.close()
            self._agent.generation, self.rank, self.world = response.generation, response.rank, response.world
            self._provisional, self.is_first_start = response.provisional, response.beginning
            self._names = response.names
            if response.world == 1:
                return
            try:
                self.group = self._connect(response)
                return
            except (CollectiveError, ProtocolError, RuntimeError) as failure:
                log.info("generation %d could not be connected: %s", response.generation, failure)
                self._agent.report_failure(failure)

    def _connect(self, response: GroupResponse) -> TrainingGroup:
        store = self._store(response, lambda: self.newest_generation() > self.generation)
        rank, world = response.rank, response.world
        process_group = _create(store, response, rank, world, "group")
        process_group.set_levels(self._levels)
        return TrainingGroup(process_group, rank, world, world, lambda: self._site_map.ranks(self.machines()))

    # recovery of joining workers

    def recovery_attempt(self) -> int:
        """Return the newest recovery attempt for the current generation; 0 if there is none."""
        response = self._agent.response
        if response is None or not response.is_member or response.generation != self.generation:
            return 0
        return response.recovery_attempt

    def recovery_opener(self, number: int) -> Callable[[], RecoveryGroup] | None:
        """Return a function that connects the recovery group, or None if the attempt is outdated."""
        response = self._agent.response
        if response is None or (response.recovery_attempt, response.generation) != (number, self.generation):
            return None
        return partial(self._open_recovery_group, response, self.rank)

    def wait_for_recovery_group(self) -> RecoveryGroup | None:
        """Block until the next recovery attempt. Return None once this worker has joined the group."""
        while True:
            response = self._agent.wait_for(
                lambda new: new.is_member or new.recovery_attempt > self._last_recovery
            )
            if response.is_member:
                return None
            self._last_recovery = response.recovery_attempt
            try:
                return self._open_recovery_group(response, response.world + response.rank)
            except (CollectiveError, ProtocolError, RuntimeError) as error:
                log.info("the recovery group could not be connected: %s", error)
                self.report_recovery_failed()

    def wait_for_admission(self) -> None:
        """Block until this worker is a member, or may become one; in that case report that it is ready."""
        response = self._agent.wait_for(lambda new: new.is_member or new.recovery_attempt > 0)
        if not response.is_member:
            prepare_groups()  # before the others wait for this worker
            self._agent.report_caught_up()

    def report_recovery_failed(self) -> None:
        """Report that the current recovery attempt failed."""
        self._agent.report_recovery_failed(self._last_recovery)

    def close(self) -> None:
        """Abort recovery groups and wait for their threads.

        A thread with torch's C++ on its stack would abort the interpreter at exit.
        """
        self._is_closing = True
        for group in filter(None, list(self._recovery_groups.values())):
            group.abort()
        deadline = time.monotonic() + _CLOSE_S
        while self._recovery_groups and time.monotonic() < deadline:
            time.sleep(0.01)

    def _open_recovery_group(self, response: GroupResponse, rank: int) -> RecoveryGroup:
        attempt = response.recovery_attempt

        def is_stale() -> bool:
            newest = self._agent.response
            return self._is_closing or (newest is not None and newest.recovery_attempt != attempt)

        def on_close() -> None:
            self._recovery_groups.pop(attempt, None)

        self._recovery_groups[attempt] = None
        world = response.world + response.joining
        try:
            store = self._store(response, is_stale)
            # The prefix is part of the protocol between workers.
            process_group = _create(store, response, rank, world, f"recovery-{attempt}")
        except BaseException:
            on_close()
            raise
        group = TrainingGroup(process_group, rank, world, response.world, on_close=on_close)
        self._recovery_groups[attempt] = group
        if self._is_closing:
            group.abort()
        return group

    def _store(self, response: GroupResponse, is_stale: Callable[[], bool]) -> ClusterStore:
        worker = self._agent.worker
        scope = Namespace(worker.run, response.generation)
        return _RendezvousStore(KvClient(agent_at(worker.state), scope, _RENDEZVOUS_S), is_stale)


def _create(
    store: ClusterStore, response: GroupResponse, rank: int, world: int, prefix: str
) -> BarnraiseProcessGroup:
    try:
        group = create_group(PrefixStore(prefix, store), rank, world, _RENDEZVOUS_S, response.generation)
    finally:
        store.close()  # it serves the rendezvous only
    group.setTimeout(timedelta(seconds=_OPERATION_S))
    return group
