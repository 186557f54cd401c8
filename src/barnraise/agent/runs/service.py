"""The runs of an agent: connects their book, their keeper, their files and this machine's parts in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Protocol

from barnraise.agent import protocol
from barnraise.agent.artifact_service import ArtifactService
from barnraise.agent.checkpoints.replicator import CheckpointReplicator
from barnraise.agent.checkpoints.service import CheckpointService
from barnraise.agent.cluster.connections import AgentConnections
from barnraise.agent.cluster.kv_proxy import KvProxy
from barnraise.agent.cluster.kv_service import KvService
from barnraise.agent.containers import containers
from barnraise.agent.runs import messages
from barnraise.agent.runs.controller import RunController
from barnraise.agent.runs.executor import RunExecutor
from barnraise.agent.runs.messages import LogRequest, LogResponse, RecordUpdate, ReportUpdate, RunMessage
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent.runs.supervisor_client import leftovers
from barnraise.agent.runs.worker_group import log_path, remove_run, run_directory
from barnraise.agent.supervisor.log_file import read_log
from barnraise.agent_client.provisional import settle_steps
from barnraise.artifacts import ArtifactStore, collect, store_directory
from barnraise.core.config import Settings
from barnraise.core.errors import ProtocolError, RunError, TransportError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.membership.node import MembershipNode
from barnraise.membership.storage import MembershipStorage
from barnraise.runs.record import MOST_DROPPED, DroppedSteps
from barnraise.topology import Machine
from barnraise.transport.listener.preface import ROUTE_AGENT_SHIP

_LOG_S = 5.0
_DIAL_S = 0.05
_KEPT_FOLDERS = 20  # of runs that have ended
_WATCH_S = 0.5
_TIDY_S = 600.0

_log = logging.getLogger(__name__)


class RunServiceHost(Protocol):
    """What the runs need of the agent."""

    me: NodeId
    key: NodeKey
    incarnation: bytes
    settings: Settings
    directory: Path
    storage: MembershipStorage
    member: MembershipNode
    board: KvService
    links: AgentConnections

    @property
    def log(self) -> TrustLog: ...

    def name_of(self, node: NodeId) -> str: ...

    def linked_nodes(self) -> list[NodeId]: ...

    def machine_of(self, node: NodeId) -> Machine | None: ...

    def send_bulk(self, node: NodeId, message: bytes) -> None: ...

    def say(self, text: str) -> None: ...

    def spawn(self, work: Coroutine[object, object, None]) -> None: ...


class _ArtifactCarrier:
    """The links, as the shipper sees them."""

    def __init__(self, around: RunServiceHost) -> None:
        self._around = around

    @property
    def me(self) -> NodeId:
        return self._around.me

    def send_ship(self, node: NodeId, body: bytes) -> None:
        self._around.links.send_on(ROUTE_AGENT_SHIP, node, protocol.SHIP + body)

    def linked(self, node: NodeId) -> bool:
        return self._around.links.get(node) is not None

    async def drained(self, node: NodeId) -> None:
        link = self._around.links.get(node, ROUTE_AGENT_SHIP)
        if link is not None:
            await link.drain()
        elif self.linked(node):
            await asyncio.sleep(_DIAL_S)  # it is being dialled
        else:
            raise TransportError(f"{self._around.name_of(node)} is not connected")


class RunService:
    """One for each agent."""

    def __init__(self, around: RunServiceHost) -> None:
        self._around = around
        self._loop = asyncio.get_running_loop()
        self.store = ArtifactStore(store_directory(around.directory))
        self.book = RunRegistry(around)
        self.keeper = RunController(around, self.book)
        self.proxy = KvProxy(around, self.book)
        self.shipper = ArtifactService(self.store, _ArtifactCarrier(around))
        self.checkpoints = CheckpointService(around, self.book, self.shipper, self.store, self._files_lent)
        self.copies = CheckpointReplicator(around, self.book, self.checkpoints)
        self.parts: dict[str, RunExecutor] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[tuple[NodeId, int], asyncio.Future[LogResponse]] = {}
        self._serial = 0
        self.book.on_record = self._changed
        self.book.on_settled = self._settled

    def jobs(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return self.keeper.run, self._tidy, self._watch_workers, self.copies.run

    def load(self) -> None:
        """What earlier starts of this agent left: processes end, runs that go on are taken up again."""
        leftovers(self._around.directory / "wardens")
        containers.remove_leftovers(self._around.directory)
        self.book.load()
        for known in list(self.book.runs.values()):
            self._changed(known)

    def _settled(self, known: RunEntry, counts: bool) -> None:
        settle_steps(run_directory(self._around.directory, known.run), counts=counts)
        try:
            self.checkpoints.settle(known.run, counts=counts)
        except OSError as error:
            _log.error("the checkpoints of run %s could not be settled: %s", known.run, error)

    def dropped(self, known: RunEntry, dropped: DroppedSteps) -> None:
        """A worker of this machine says so: for whoever watches, anywhere."""
        known.dropped = (*known.dropped, dropped)[-MOST_DROPPED:]
        self._around.say(f"run {known.run}: {dropped.sentence(self._around.name_of(self._around.me))}")
        part = self.parts.get(known.run)
        if part is not None:
            part.tell_again()

    async def leave(self) -> None:
        """Trainings go on without this machine from their next commit on."""
        await asyncio.gather(*(part.leave() for part in list(self.parts.values())))

    async def stop(self) -> None:
        """The agent ends, and its workers with it."""
        for life in list(self._lives.values()):
            life.cancel()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        await self.checkpoints.stop()
        await self.shipper.close()

    def begin_anew(self) -> None:
        """Another cluster: its runs are others."""
        for life in self._lives.values():
            life.cancel()
        self.book.runs.clear()

    # what the links tell

    def link_up(self, node: NodeId) -> None:
        self.book.link_up(node)
        self.shipper.link_up(node)

    def link_down(self, node: NodeId) -> None:
        self.shipper.link_down(node)
        self.checkpoints.link_down(node)

    def files_down(self, node: NodeId) -> None:
        """Only the route of files broke: it is dialled again at the next piece."""
        self.shipper.link_down(node)
        if self._around.links.get(node) is not None:
            self.shipper.link_up(node)

    def received(self, node: NodeId, kind: bytes, body: memoryview) -> None:
        if kind == protocol.SHIP:
            self.shipper.received(node, body)
        elif kind == protocol.GUEST_BOARD:
            self.proxy.received(node, body)
        else:
            self._told(node, messages.decode(body))

    def _told(self, node: NodeId, message: RunMessage) -> None:
        match message:
            case RecordUpdate():
                self.book.take(message.record, node)
            case ReportUpdate():
                self.book.take_report(node, message.report)
            case LogRequest():
                if self._around.log.role(node) != "owner":
                    raise ProtocolError(f"{node.short} is a guest and reads no output of others")
                told = self._read_log(message)
                self._around.send_bulk(node, messages.encode(told))
            case LogResponse():
                future = self._logs.get((node, message.serial))
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                self.checkpoints.told(node, message)

    # output of workers

    async def output(
        self, known: RunEntry, generation: int, rank: int, offset: int, most: int
    ) -> LogResponse:
        """What a worker said, wherever it is; RunError if its machine does not answer."""
        slots = known.slots.get(generation, ())
        if rank >= len(slots):
            raise RunError(f"run {known.run} has no rank {rank}", hint=f"It has {len(slots)} workers.")
        slot = slots[rank]
        node = NodeId(slot.node)
        self._serial += 1
        wanted = LogRequest(self._serial, known.run, slot.start, slot.local_rank, offset, most)
        if node == self._around.me:
            return self._read_log(wanted)
        future: asyncio.Future[LogResponse] = self._loop.create_future()
        self._logs[node, wanted.serial] = future
        try:
            self._around.send_bulk(node, messages.encode(wanted))
            return await asyncio.wait_for(future, _LOG_S)
        except TimeoutError as error:
            name = self._around.name_of(node)
            raise TransportError(f"{name} did not tell what rank {rank} said within {_LOG_S:g} s") from error
        finally:
            del self._logs[node, wanted.serial]

    def _read_log(self, wanted: LogRequest) -> LogResponse:
        home = run_directory(self._around.directory, wanted.run)
        part = read_log(log_path(home, wanted.start, wanted.local_rank), wanted.offset, wanted.most)
        return LogResponse(wanted.serial, part.start, part.data, part.end)

    # this machine's parts

    def _changed(self, known: RunEntry) -> None:
        """A newer version of a record is known."""
        me = self._around.me.raw
        self._allow(known)
        if known.has_ended:  # consent was for this run, and not for another that will be called so
            (run_directory(self._around.directory, known.run) / "accepted").unlink(missing_ok=True)
        part = self.parts.get(known.run)
        if part is not None:
            part.wake()
        elif me in known.order.nodes and not known.has_ended:
            self._begin(known)

    def _allow(self, known: RunEntry) -> None:
        """Who takes part in any run of these files may have them, also from us."""
        active = [other.order for other in self.book.runs.values() if not other.has_ended]
        for manifest in known.order.manifests:
            nodes = {NodeId(node) for order in active if manifest in order.manifests for node in order.nodes}
            nodes.update(self.checkpoints.loans.borrowers(manifest))
            if nodes:
                self.shipper.allow(manifest, nodes)
            else:
                self.shipper.withdraw(manifest)

    def _files_lent(self, run: str) -> None:
        known = self.book.runs.get(run)
        if known is not None:
            self._allow(known)

    def _begin(self, known: RunEntry) -> None:
        part = RunExecutor(self._around, self.book, self.shipper, self.store, known)
        self.parts[known.run] = part
        asks = self._around.log.role(self._around.me) != "owner"
        if asks:
            self._around.say(f"run {known.run} asks to work here: barnraise accept {known.run}")
        life = self._loop.create_task(part.live(asks))
        self._lives[known.run] = life
        life.add_done_callback(lambda _: self._over(known.run, life))

    def _over(self, run: str, life: asyncio.Task[None]) -> None:
        self._lives.pop(run, None)
        part = self.parts.pop(run, None)
        if not life.cancelled() and life.exception() is not None:
            _log.error("this machine's part in run %s failed", run, exc_info=life.exception())
        if part is not None and part.results:
            owners = [node for node, listed in self._around.log.members.items() if listed.role == "owner"]
            self.shipper.allow(part.results, owners)

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for part in list(self.parts.values()):
                part.notice_stopped()

    async def _tidy(self) -> None:
        """Folders of runs that ended long ago go, and files that nobody used for long."""
        while True:
            active = [known.order for known in self.book.runs.values() if not known.has_ended]
            kept = {run for order in active for run in (order.run, *order.resumes)}
            for run in await asyncio.to_thread(_out_of_date, self._around.directory / "runs", kept):
                await asyncio.to_thread(remove_run, self._around.directory, run)
            keep = {manifest for order in active for manifest in order.manifests}
            await asyncio.to_thread(collect, self.store, self._around.settings.runs.store_bytes, keep)
            await asyncio.sleep(_TIDY_S)


def _out_of_date(homes: Path, kept: Collection[str]) -> list[str]:
    """Runs whose folders go: of all but those kept, the ones in which nothing has changed for longest. Not by
    when they began: the checkpoints of a long run that failed a minute ago are wanted."""
    if not homes.is_dir():
        return []
    others = [home for home in homes.iterdir() if home.name not in kept]
    return [home.name for home in sorted(others, key=_changed_at)[:-_KEPT_FOLDERS]]


def _changed_at(home: Path) -> float:
    times = []
    for place in (home, home / "checkpoints", home / "logs"):
        with contextlib.suppress(OSError):
            times.append(place.stat().st_mtime)
    return max(times, default=0.0)
