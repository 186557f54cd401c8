"""The run service of an agent: connects registry, controller, files and this machine's executors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from barnraise.agent import protocol
from barnraise.agent.artifact_service import ArtifactService
from barnraise.agent.checkpoints.replicator import CheckpointReplicator
from barnraise.agent.checkpoints.service import CheckpointService
from barnraise.agent.cluster.kv_proxy import KvProxy
from barnraise.agent.containers.engine import remove_leftovers as remove_container_leftovers
from barnraise.agent.context import AgentContext
from barnraise.agent.history.service import HistoryService
from barnraise.agent.limits.policy import choose_pause_action
from barnraise.agent.runs import messages
from barnraise.agent.runs.consent import end_agreement
from barnraise.agent.runs.controller import RunController
from barnraise.agent.runs.executor import RunExecutor
from barnraise.agent.runs.local_interface import remove_interfaces
from barnraise.agent.runs.messages import (
    HeldLogsRequest,
    HeldLogsResponse,
    LogPartRequest,
    LogPartResponse,
    LogRequest,
    LogResponse,
    RecordUpdate,
    ReportUpdate,
    RunMessage,
    ValuesRequest,
    ValuesResponse,
)
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent.runs.supervisor_client import kill_orphans
from barnraise.agent.runs.variables import VariableKeeper
from barnraise.agent.runs.worker_group import log_path, remove_run, run_changed_at, run_directory
from barnraise.agent.supervisor.log_file import read_log
from barnraise.agent_client.provisional import settle_steps
from barnraise.artifacts import ArtifactStore, collect, store_directory
from barnraise.core.errors import ProtocolError, RunError, TransportError
from barnraise.identity import NodeId
from barnraise.runs.record import MOST_DROPPED, DroppedSteps
from barnraise.transport.listener.preface import ROUTE_AGENT_SHIP

_LOG_S = 5.0
_DIAL_S = 0.05
_KEPT_FOLDERS = 20  # of runs that have ended
_WATCH_S = 0.5
_COLLECT_S = 600.0

_log = logging.getLogger(__name__)


class _ArtifactCarrier:
    """Connections of the agent, as the transfer service uses them."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context

    @property
    def me(self) -> NodeId:
        return self._context.me

    def send_ship(self, node: NodeId, body: bytes) -> None:
        self._context.connections.send_on(ROUTE_AGENT_SHIP, node, protocol.SHIP + body)

    def linked(self, node: NodeId) -> bool:
        return self._context.connections.get(node) is not None

    def name(self, node: NodeId) -> str:
        return self._context.name_of(node)

    async def drained(self, node: NodeId) -> None:
        link = self._context.connections.get(node, ROUTE_AGENT_SHIP)
        if link is not None:
            await link.drain()
        elif self.linked(node):
            await asyncio.sleep(_DIAL_S)  # it is being dialled
        else:
            raise TransportError(f"{self._context.name_of(node)} is not connected")


class RunService:
    """Everything about runs on one agent."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.store = ArtifactStore(store_directory(context.directory))
        self.registry = RunRegistry(context)
        self.variables = VariableKeeper(context, self.registry)
        self.controller = RunController(context, self.registry)
        self.proxy = KvProxy(context, self.registry)
        self.history = HistoryService(context, self.registry)
        self.artifacts = ArtifactService(self.store, _ArtifactCarrier(context))
        self.checkpoints = CheckpointService(
            context, self.registry, self.artifacts, self.store, self._files_granted
        )
        self.checkpoints.on_saved = self.history.on_checkpoint
        self.replicator = CheckpointReplicator(context, self.registry, self.checkpoints)
        self.executors: dict[str, RunExecutor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[tuple[NodeId, int], asyncio.Future[LogResponse]] = {}
        self._serial = 0
        self._former_keys: set[bytes] = set()  # of this machine
        # Files of jobs: which must stay here, and which machines may fetch them.
        self.kept_for_jobs: Callable[[], Collection[bytes]] = set
        self.continued_by_jobs: Callable[[], Collection[str]] = set
        self.readers_for_jobs: Callable[[bytes], Collection[NodeId]] = lambda manifest: ()
        self.awaited_by_jobs: Callable[[], Collection[str]] = set  # runs whose end or results a job needs
        self.on_record: Callable[[RunEntry], None] = lambda entry: None  # after each newer version of a run
        self.registry.on_record = self._on_record
        self.registry.on_settled = self._on_settled
        self.registry.needed_runs = lambda: {*self.executors, *self.awaited_by_jobs()}

    def jobs(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Return the background tasks that the agent has to run."""
        own = self._collect_garbage, self._watch_workers, self.replicator.run
        return self.controller.run, self.controller.delete_forgotten, *own, *self.history.jobs()

    def load(self) -> None:
        """Kill leftovers of earlier agent processes and continue the runs that are active."""
        kill_orphans(self._context.directory / "supervisors")
        remove_container_leftovers(self._context.directory)
        remove_interfaces(self._context.directory)
        self.registry.load()
        for entry in list(self.registry.runs.values()):
            self._context.audit_trail.run_known(entry.run, entry.record.phase)
            self._on_record(entry)

    def view_changed(self) -> None:
        """Follow machines that have changed their keys; sign own checkpoints with the new key."""
        for entry in self.registry.view_changed():
            self._on_record(entry)
        log, me = self._context.log, self._context.me
        former = {node.raw for node in log.revoked if node != me and log.current(node) == me}
        for node in former - self._former_keys:
            self.checkpoints.local.sign_again(node)
        self._former_keys = former

    def _on_settled(self, entry: RunEntry, counts: bool) -> None:
        settle_steps(run_directory(self._context.directory, entry.run), counts=counts)
        try:
            self.checkpoints.settle(entry.run, counts=counts)
        except OSError as error:
            _log.error(
                "cannot keep or drop the checkpoints that run %s made without a majority: %s",
                entry.run,
                error,
            )

    def report_dropped(self, entry: RunEntry, dropped: DroppedSteps) -> None:
        """Report steps that a worker of this machine had to drop."""
        entry.dropped = (*entry.dropped, dropped)[-MOST_DROPPED:]
        self._context.report_event(
            f"run {entry.run}: {dropped.sentence(self._context.name_of(self._context.me))}"
        )
        executor = self.executors.get(entry.run)
        if executor is not None:
            executor.report_again()

    async def leave(self) -> None:
        """Let all runs continue without this machine from their next commit on."""
        await asyncio.gather(*(executor.leave() for executor in list(self.executors.values())))

    def rejoin(self) -> None:
        """Let this machine take part in its runs again, after `leave`."""
        for executor in self.executors.values():
            executor.rejoin()

    def pause_effects(self) -> tuple[tuple[str, str], ...]:
        """Return the runs that may not use this machine now, and what becomes of each."""
        me, limits = self._context.me.raw, self._context.limits
        entries = [executor.entry for executor in self.executors.values()]
        return tuple(
            (entry.run, choose_pause_action(entry.record, me).sentence)
            for entry in entries
            if limits.reason_against(entry.spec.by) and entry.record.ranks_of(me)
        )

    def limits_changed(self) -> None:
        """Let every run follow the new limits of this machine."""
        for executor in self.executors.values():
            executor.wake()

    async def stop(self) -> None:
        """Stop all workers and transfers, because the agent stops."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.checkpoints.stop()
        await self.artifacts.close()
        await self.history.stop()

    def reset(self) -> None:
        """Forget all runs of the old cluster."""
        for task in self._tasks.values():
            task.cancel()
        self.registry.reset()
        self.controller.reset()
        self.history.removals.reset()
        self.variables.clear()

    def link_up(self, node: NodeId) -> None:
        """Exchange records and files with a newly connected machine."""
        self.registry.link_up(node)
        self.artifacts.link_up(node)
        self.history.copier.link_up(node)

    def link_down(self, node: NodeId) -> None:
        """Fail the transfers from a machine whose connection is lost."""
        self.artifacts.link_down(node)
        self.checkpoints.link_down(node)
        self.history.copier.link_down(node)

    def artifact_route_down(self, node: NodeId) -> None:
        """Restart transfers after only the file route to a machine broke."""
        self.artifacts.link_down(node)
        if self._context.connections.get(node) is not None:
            self.artifacts.link_up(node)

    def received(self, node: NodeId, kind: bytes, body: memoryview) -> None:
        """Dispatch a message of another agent about runs or files."""
        if kind == protocol.SHIP:
            self.artifacts.received(node, body)
        elif kind == protocol.GUEST_BOARD:
            self.proxy.received(node, body)
        else:
            self._handle(node, messages.decode(body))

    def _handle(self, node: NodeId, message: RunMessage) -> None:
        match message:
            case RecordUpdate():
                self.registry.apply(message.record, node)
            case ReportUpdate():
                self.registry.apply_report(node, message.report)
            case LogRequest():
                if self._context.log.role(node) != "owner":
                    raise ProtocolError(f"{node.short} is a guest and cannot read output of others")
                response = self._read_log(message)
                self._context.send_bulk(node, messages.encode(response))
            case LogResponse():
                future = self._logs.get((node, message.serial))
                if future is not None and not future.done():
                    future.set_result(message)
            case HeldLogsRequest() | HeldLogsResponse() | LogPartRequest() | LogPartResponse():
                self.history.copier.received(node, message)
            case ValuesRequest() | ValuesResponse():
                self.variables.received(node, message)
            case _:
                self.checkpoints.received(node, message)

    async def read_output(self, entry: RunEntry, worker: int, offset: int, max_bytes: int) -> LogResponse:
        """Return output of a worker on any machine; raise an error if its machine does not answer.

        ``worker``: its number among all workers of the run.
        """
        workers = entry.record.workers
        if worker >= len(workers):
            raise RunError(f"run {entry.run} has no worker {worker}", hint=f"It had {len(workers)} workers.")
        slot = workers[worker]
        node = NodeId(slot.node)
        self._serial += 1
        request = LogRequest(self._serial, entry.run, slot.start, slot.local_rank, offset, max_bytes)
        if node == self._context.me:
            return self._read_log(request)
        future: asyncio.Future[LogResponse] = self._loop.create_future()
        self._logs[node, request.serial] = future
        try:
            self._context.send_bulk(node, messages.encode(request))
            return await asyncio.wait_for(future, _LOG_S)
        except TimeoutError as error:
            name = self._context.name_of(node)
            raise TransportError(
                f"{name} did not send the output of its worker within {_LOG_S:g} s"
            ) from error
        finally:
            del self._logs[node, request.serial]

    def _read_log(self, request: LogRequest) -> LogResponse:
        home = run_directory(self._context.directory, request.run)
        part = read_log(log_path(home, request.start, request.local_rank), request.offset, request.max_bytes)
        return LogResponse(request.serial, part.start, part.data, part.end)

    # this machine's parts

    def _on_record(self, entry: RunEntry) -> None:
        """Start or wake this machine's executor for a newer record."""
        me = self._context.me.raw
        self._context.audit_trail.run_changed(entry.spec, entry.record)
        self.history.on_record(entry)
        self.on_record(entry)
        self.allow_files(entry.spec.program.manifests)
        if entry.has_ended:
            end_agreement(run_directory(self._context.directory, entry.run))
            self.variables.drop(entry.run)
        executor = self.executors.get(entry.run)
        if executor is not None:
            executor.wake()
        elif me in entry.spec.nodes and not entry.has_ended:
            self._start_executor(entry)

    def allow_files(self, manifests: Iterable[bytes]) -> None:
        """Let all participants of runs and jobs with these files fetch them from this machine."""
        active = [other.spec for other in self.registry.runs.values() if not other.has_ended]
        for manifest in manifests:
            nodes = {
                NodeId(node)
                for order in active
                if manifest in order.program.manifests
                for node in order.nodes
            }
            nodes.update(self.checkpoints.grants.readers(manifest))
            nodes.update(self.readers_for_jobs(manifest))
            if nodes:
                self.artifacts.allow(manifest, nodes)
            else:
                self.artifacts.withdraw(manifest)

    def _files_granted(self, run: str) -> None:
        entry = self.registry.runs.get(run)
        if entry is not None:
            self.allow_files(entry.spec.program.manifests)

    def _start_executor(self, entry: RunEntry) -> None:
        executor = RunExecutor(
            self._context, self.registry, self.artifacts, self.store, self.variables, entry
        )
        self.executors[entry.run] = executor
        asks = self._context.log.role(self._context.me) != "owner"
        if asks:
            self._context.report_event(
                f"run {entry.run} asks to use this machine: barnraise accept {entry.run}"
            )
        task = self._loop.create_task(executor.run(asks))
        self._tasks[entry.run] = task
        task.add_done_callback(lambda _: self._executor_done(entry.run, task))

    def _executor_done(self, run: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(run, None)
        executor = self.executors.pop(run, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("the executor of run %s failed", run, exc_info=task.exception())
        if executor is not None and executor.results:
            owners = [node for node, listed in self._context.log.members.items() if listed.role == "owner"]
            self.artifacts.allow(executor.results, owners)

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for executor in list(self.executors.values()):
                executor.detect_suspended()

    async def _collect_garbage(self) -> None:
        """Remove folders of runs that ended long ago, and unused files of the store."""
        while True:
            active = [entry.spec for entry in self.registry.runs.values() if not entry.has_ended]
            kept = {run for order in active for run in (order.run, *order.resumes)}
            kept.update(self.continued_by_jobs())
            kept.update(self.executors)  # also of runs that have ended, while their results are packed
            for run in await asyncio.to_thread(_out_of_date, self._context.directory / "runs", kept):
                await asyncio.to_thread(remove_run, self._context.directory, run)
            keep = {manifest for order in active for manifest in order.program.manifests}
            keep.update(self.kept_for_jobs())
            await asyncio.to_thread(collect, self.store, self._context.settings.runs.store_bytes, keep)
            await asyncio.sleep(_COLLECT_S)


def _out_of_date(homes: Path, kept: Collection[str]) -> list[str]:
    """Return the runs whose folders can be removed: those without a change for the longest time.

    The start time does not matter: the checkpoints of a long run that has just failed are needed.
    """
    if not homes.is_dir():
        return []
    others = [home for home in homes.iterdir() if home.name not in kept]
    return [home.name for home in sorted(others, key=run_changed_at)[:-_KEPT_FOLDERS]]
