"""This machine's part in one run: prepare, start the workers, report their status.

Like a kubelet, it brings this machine closer to the run record, and reports what it finds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from barnraise.agent.artifact_service import ArtifactService
from barnraise.agent.context import AgentContext
from barnraise.agent.limits.policy import Action, choose_pause_action
from barnraise.agent.runs.preparation import RunPreparation
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent.runs.variables import VariableKeeper
from barnraise.agent.runs.worker_group import WorkerGroup, WorkerGroupConfig, run_directory, run_folder
from barnraise.agent_client.run_requests import FailingRequest, GroupRequest, ProgressRequest
from barnraise.artifacts import RESULTS_STAY, ArtifactStore, drop_unchanged, folder_limits, pack_changes
from barnraise.core import metrics
from barnraise.core.errors import BarnraiseError, ShippingError
from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.core.metrics import catalogue
from barnraise.runs.control.failures import refusal
from barnraise.runs.record import (
    MAX_REPORTED_FAILURES,
    NodeReport,
    RunRecord,
    Stage,
    WorkerFailure,
    WorkerSlot,
    WorkerState,
)

_MAX_DETAIL = 4000
_MAX_CRASHES = 3
_LEAVE_S = 8.0
_POLL_S = 0.05
_PAUSE_S = 60.0  # how long a paused machine waits for the next commit
_PAUSED_LOOK_S = 0.5
_RESTART_BACKOFF = SteppedBackoff((0.0, 0.0, 1.0, 2.0, 5.0, 10.0))  # restarts of joining workers

_log = logging.getLogger(__name__)


class RunExecutor:
    """Executor of one run on this machine, in one task from the first record to the last."""

    def __init__(
        self,
        context: AgentContext,
        registry: RunRegistry,
        artifacts: ArtifactService,
        store: ArtifactStore,
        variables: VariableKeeper,
        entry: RunEntry,
    ) -> None:
        self._context = context
        self._registry = registry
        self._store = store
        self.entry = entry
        self.preparation = RunPreparation(
            context, registry, artifacts, store, variables, entry, report=self._report
        )
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._serial = 0
        self._stage: Stage = "fetching"
        self._detail = ""
        self._last_report: NodeReport | None = None
        self._exited: dict[tuple[int, int], WorkerState] = {}
        self._failures: dict[tuple[int, int], WorkerFailure] = {}
        self._groups: list[WorkerGroup] = []
        self._has_launched = False
        self._elastic = self._leaving = False
        self._pause_began: float | None = None  # when this machine began to leave, because it is paused
        self._asked_to_exit: set[int] = set()  # starts of workers: how they exit says nothing about the run
        self._limits_version = 0
        self._restarts = self._crashes = self._crash_counted_for = 0
        self._started_at = -1e9
        self._gave_up_after = -1  # the start of the last worker
        self._last_start = 0
        self._generation = 0
        self.results = b""
        self._collected = self._lacks_files = False

    @property
    def home(self) -> Path:
        """Return the directory of the run on this machine."""
        return run_directory(self._context.directory, self.entry.run)

    @property
    def folder(self) -> Path:
        """Return the working folder of the workers."""
        return run_folder(self.home)

    @property
    def python(self) -> Path:
        """Return the Python of the workers."""
        return self.preparation.python

    def wake(self) -> None:
        """Reconcile again as soon as possible."""
        self._wake.set()

    async def run(self, asks: bool) -> None:
        """Follow the run record until the run has ended.

        ``asks``: this machine's user must agree first.
        """
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._restore_start()
        prepare = self._loop.create_task(self._prepare(asks))
        prepare.add_done_callback(lambda _: self.wake())
        try:
            while not self.entry.has_ended:
                self._wake.clear()
                try:
                    again = await self._reconcile(prepare)
                except (BarnraiseError, OSError) as error:
                    self._failed(error)
                    again = False
                if not again:
                    await self._wake.wait()
        finally:
            prepare.cancel()
            await asyncio.gather(prepare, return_exceptions=True)  # its error was reported already
            await self._stop_workers(at_once=True)
            self.preparation.close()
        await self._pack_results()
        await self._drop_unchanged()

    async def _reconcile(self, prepare: asyncio.Task[None]) -> bool:
        """Move this machine closer to the record; return True to reconcile again at once."""
        record = self.entry.record
        error = prepare.exception() if prepare.done() and not prepare.cancelled() else None
        if error is not None and self._stage not in ("failed", "refused"):
            self._failed(error)
        self._report_pause()
        if record.phase in ("stopping", "restarting"):
            if record.phase == "stopping":
                prepare.cancel()
            if any(group.alive for group in self._groups):
                await self._stop_workers()
                self._elastic = False
                self._report("ended")
                return True  # the record may have changed
            if self._last_report is None or not self._last_report.is_idle:
                self._report("ended")
            return False
        if record.phase != "running" or error is not None or not prepare.done():
            return False
        own_ranks = record.ranks_of(self._context.me.raw)
        if any(record.slots[rank].start > self._last_start for rank in own_ranks):
            await self._stop_workers()
            self._collect_failures()
            self._generation, self._groups = record.generation, []
            await self._start(own_ranks, record.generation)
            return True
        if self._pause_reason(record):
            return await self._pause(record)
        self._continue()
        return await self._follow_elastic_group(record) if record.elastic else False

    def _pause_reason(self, record: RunRecord) -> str:
        """Return why the workers must not work now; empty if they may."""
        limits = self._context.limits
        has_old_limits = self._limits_version != limits.version and any(group.alive for group in self._groups)
        reason = limits.reason_against(self.entry.spec.by)
        if not reason and has_old_limits and self._pause_action(record) == "leave":
            return "its limits have changed"
        return reason

    def _pause_action(self, record: RunRecord) -> Action:
        return choose_pause_action(record, self._context.me.raw).action

    async def _pause(self, record: RunRecord) -> bool:
        """Let the group continue without this machine, or freeze workers that train alone."""
        alive = [group for group in self._groups if group.alive]
        match self._pause_action(record) if alive else "keep":
            case "freeze":
                for group in alive:
                    group.freeze()
            case "leave":
                if self._pause_began is None:
                    self._pause_began = self._loop.time()
                    self._mark_leaving()
                is_late = self._loop.time() > self._pause_began + _PAUSE_S
                if is_late or all(self._has_left(group) for group in alive):
                    self._asked_to_exit |= {group.start for group in alive}
                    await self._stop_workers()
                    self._pause_began = None
                    self._report("ended")
                    return True
                self._loop.call_later(_POLL_S, self.wake)
        return False

    def _report_pause(self) -> None:
        """Report that a pause has begun or ended, in every phase of the run."""
        reason = self._context.limits.reason_against(self.entry.spec.by)
        if self._last_report is not None and self._last_report.paused != reason:
            self._report(self._stage, self._detail)

    def _has_left(self, group: WorkerGroup) -> bool:
        """Return True if the others do not need these workers: they have left, or have not joined yet."""
        record = self.entry.record
        own_ranks = record.ranks_of(self._context.me.raw)
        has_slot = any(record.slots[rank].start == group.start for rank in own_ranks)
        return group.has_left(self._is_out) or not (has_slot or group.was_member)

    def _continue(self) -> None:
        """Let the workers work again after a pause."""
        was_frozen = True in [group.thaw() for group in self._groups]  # of all, not up to the first
        if was_frozen or self._pause_began is not None:
            self._pause_began = None
            self._report(self._stage, self._detail)

    async def _follow_elastic_group(self, record: RunRecord) -> bool:
        """Stop evicted workers and start joining workers in their place."""
        if self._leaving:
            return False  # they exit when the group continues without them
        me = self._context.me.raw
        members = {slot.key for slot in record.slots}

        def is_member(state: WorkerState) -> bool:
            return (me, state.local_rank, state.start) in members

        ended = [await group.stop_evicted(is_member, self._wake) for group in self._groups]
        if any(ended):
            return True
        self._generation = record.generation
        self._collect_failures()
        self._groups = [group for group in self._groups if group.alive or not group.is_idle]
        wanted = range(self.entry.spec.options.per_node or len(self.preparation.devices))
        states = [state for group in self._groups for state in group.states.values()]
        busy = {state.local_rank for state in states if state.state != "ended"}
        absent = [place for place in wanted if place not in busy]
        exited = [state for state in self._exited.values() if state.start not in self._asked_to_exit]
        is_over = record.finished or any(state.state == "ended" and not state.failed for state in exited)
        may_join = me in self.entry.spec.nodes and record.may_join(me)
        if not absent or is_over or not may_join or self._cannot_join(members):
            return False
        pause = _RESTART_BACKOFF.wait(self._restarts)
        if self._loop.time() < self._started_at + pause:
            self._loop.call_later(self._started_at + pause - self._loop.time() + 0.01, self.wake)
            return False
        self._restarts += 1
        self._started_at = self._loop.time()
        first = len(record.slots)
        start = max(record.generation, self._last_start) + 1
        await self._start(range(first, first + len(absent)), start, absent)
        return True

    def _cannot_join(self, members: set[tuple[bytes, int, int]]) -> bool:
        """Return True after the others refused its worker, or several in a row failed before they joined."""
        start = self._last_start
        own = {} if start in self._asked_to_exit else self._exited
        last = [state for state in own.values() if state.start == start]
        if why := next(filter(None, (refusal(state.tail) for state in last)), ""):
            self._give_up(why)
            return True
        if any((self._context.me.raw, state.local_rank, state.start) in members for state in last):
            self._crashes = 0
        elif (
            any(state.code and not state.signal for state in last)
            and self._crash_counted_for != self._last_start
        ):
            self._crashes, self._crash_counted_for = self._crashes + 1, self._last_start
        if self._crashes < _MAX_CRASHES:
            return False
        last_line = next((state.tail.strip().rpartition("\n")[2] for state in last if state.tail), "")
        self._give_up(f"{_MAX_CRASHES} tries failed, the last with: {last_line}")
        return True

    def _give_up(self, why: str) -> None:
        """Report, once for each worker, why none of this machine is started again."""
        if self._gave_up_after != self._last_start:
            self._gave_up_after = self._last_start
            alive = any(not group.is_idle for group in self._groups)
            self._report("running" if alive else "ended", f"its worker cannot join: {why}")
            self._context.report_event(f"run {self.entry.run}: {self._detail}")

    async def _prepare(self, asks: bool) -> None:
        while self._context.limits.reason_against(self.entry.spec.by):  # not even a file is fetched
            if self._last_report is None:
                self._report("fetching")
            await asyncio.sleep(_PAUSED_LOOK_S)
        await self.preparation.run(asks)
        if not self._groups:
            self._report("ended" if self._exited else "ready")

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, BarnraiseError):
            detail = f"{error.message}. {error.hint}"
        else:
            _log.error("run %s failed on this machine", self.entry.run, exc_info=error)
            detail = f"{type(error).__name__}: {error}"
        self._lacks_files = isinstance(error, ShippingError) and error.is_silence
        self._report("failed", detail)

    async def _start(self, ranks: Sequence[int], start: int, places: Sequence[int] = ()) -> None:
        """Start the workers of these ranks; joining workers have only local ``places``."""
        self._last_start = start
        self._limits_version = self._context.limits.version
        (self.home / "generation").write_text(str(start))
        prepared, machine = self.preparation, self._context.machine_of(self._context.me)
        config = WorkerGroupConfig(
            spec=self.entry.spec,
            state=self._context.directory,
            interface=prepared.interface_directory,
            sandbox=prepared.sandbox,
            settings=self._context.settings,
            python=prepared.python,
            containers=prepared.containers,
            data=prepared.data,
            model_cache=prepared.model_cache,
            values=prepared.values,
            cores=machine.cores if machine is not None else 0,
            limits=self._context.limits.limits,
        )
        group = WorkerGroup(
            config, self._record_for(places), ranks, start, self.report_again, self._context.report_event
        )
        self._groups.append(group)
        self._report("running")
        await group.launch()
        metrics.counter(catalogue.WORKER_STARTS, "again" if self._has_launched else "new").inc(len(ranks))
        self._has_launched = True

    def _record_for(self, places: Sequence[int]) -> RunRecord:
        """Return the record with slots for joining workers behind the others."""
        record, devices = self.entry.record, self.preparation.devices
        more = [WorkerSlot(self._context.me.raw, place, devices[place % len(devices)]) for place in places]
        return replace(record, slots=(*record.slots, *more))

    def report_again(self) -> None:
        """Report the state of the workers, and reconcile."""
        alive = any(not group.is_idle for group in self._groups)
        self._report("running" if alive else "ended")
        self.wake()

    async def _stop_workers(self, *, at_once: bool = False) -> None:
        def is_urgent() -> bool:
            return at_once or self.entry.record.hard

        await asyncio.gather(*(group.stop(is_urgent, self._wake) for group in self._groups))

    def rank_of(self, request: GroupRequest) -> int | None:
        """Handle a worker's request for its group; return its rank, or None if it has none."""
        key = (self._context.me.raw, request.local_rank, request.start)
        rank = next((rank for rank, slot in enumerate(self.entry.record.slots) if slot.key == key), None)
        group = self._group_of(request.start)
        state = "running" if rank is not None and not request.stuck else "near" if request.near else "waiting"
        state = "leaving" if self._leaving or self._pause_began is not None else state
        if group is not None:
            is_new_main = rank == 0 and group.mark_main(request)
            if group.set_state(state, request) or is_new_main or not self._elastic:
                self._elastic = True
                self._report("running")
        return rank

    def note_request(self, request: GroupRequest | ProgressRequest | FailingRequest) -> None:
        """Record what a worker says in its request, before the request waits for a change."""
        group = self._group_of(request.start)
        if group is not None and group.update_from(request):
            self._report("running")

    def _group_of(self, start: int) -> WorkerGroup | None:
        return next((group for group in self._groups if group.start == start), None)

    async def leave(self) -> None:
        """Ask the group to continue without this machine, and wait for its next commit."""
        if not self._elastic or self.entry.record.phase != "running":
            return
        self._leaving = True
        self._mark_leaving()
        deadline = self._loop.time() + _LEAVE_S
        while self._loop.time() < deadline and not all(
            group.has_left(self._is_out) for group in self._groups
        ):
            await asyncio.sleep(_POLL_S)

    def rejoin(self) -> None:
        """Take part again after `leave`, because this machine slept and is awake."""
        self._leaving = False
        self.wake()

    def _mark_leaving(self) -> None:
        for group in self._groups:
            group.mark_leaving()
        self._report("running")

    def _is_out(self, state: WorkerState) -> bool:
        """Return True if the group continues without this worker and the worker knows it."""
        key = (self._context.me.raw, state.local_rank, state.start)
        return state.broken_generation > 0 and key not in {slot.key for slot in self.entry.record.slots}

    @property
    def running_workers(self) -> int:
        """Return the number of workers that run on this machine now."""
        return sum(state.state != "ended" for group in self._groups for state in group.states.values())

    def detect_suspended(self) -> None:
        """Report workers that are suspended by a signal."""
        now = self._loop.time()
        noticed = [group for group in self._groups if group.detect_suspended(now)]
        if noticed and self._elastic:
            self._report("running")

    def _restore_start(self) -> None:
        """Report workers of an earlier agent process as exited, because they died with it."""
        try:
            self._last_start = int((self.home / "generation").read_text())
        except (OSError, ValueError):
            return
        record = self.entry.record
        self._generation = min(self._last_start, record.generation)
        words = "the agent of this machine stopped, and this worker with it"
        for rank in record.ranks_of(self._context.me.raw) if record.phase == "running" else ():
            slot = record.slots[rank]
            if slot.start <= self._last_start:
                lost = WorkerState(rank, "ended", 0, 9, words, 0, slot.local_rank, slot.start)
                self._exited[slot.local_rank, slot.start] = lost
        if self._exited:
            self._report("ended")

    async def _pack_results(self) -> None:
        """Pack the files that rank 0 wrote; those of other ranks stay where they are."""
        record = self.entry.record
        first = record.results_at or (record.slots[0].node if record.slots else b"")
        manifest = self.preparation.manifest
        if manifest is not None and first == self._context.me.raw:
            where = f"in {self.folder} on {self._context.name_of(self._context.me)}"
            try:
                limits = folder_limits(self._context.settings)
                packed = await asyncio.to_thread(pack_changes, manifest, self.folder, self._store, limits)
                self.results = packed.id
                self._detail = f"{packed.note}. What they lack stays {where}" if packed.note else ""
            except (BarnraiseError, OSError) as error:
                words = f"{error.message}. {error.hint}" if isinstance(error, BarnraiseError) else str(error)
                self._detail = f"{RESULTS_STAY} {where}: {words}"
        self._collected = True
        self._report("ended", self._detail)

    async def _drop_unchanged(self) -> None:
        """Remove the files of the folder that the store has as well; those that the script wrote stay.

        A provisional end may be overruled, and the run then needs its folder again.
        """
        manifest, store = self.preparation.manifest, self._store
        if manifest is not None and not self.entry.record.provisional:
            await asyncio.to_thread(
                drop_unchanged,
                manifest,
                self.folder,
                lambda entry: store.has(entry.object, entry.size),
            )

    def _collect_failures(self) -> None:
        """Keep the failures of worker groups, which are forgotten when their workers have exited."""
        for failure in (failure for group in self._groups for failure in group.failures):
            self._failures.setdefault((failure.local_rank, failure.start), failure)

    def _report(self, stage: Stage, detail: str = "") -> None:
        self._serial += 1
        self._stage, self._detail = stage, detail
        for state in (state for group in self._groups for state in group.states.values()):
            self._exited.pop((state.local_rank, state.start), None)
            if state.state == "ended":
                self._exited[state.local_rank, state.start] = state
        self._collect_failures()
        alive = [state for group in self._groups for state in group.states.values() if state.state != "ended"]
        members = {slot.start for slot in self.entry.record.slots if slot.node == self._context.me.raw}
        for key in [key for key in self._exited if key[1] not in members and key[1] != self._last_start]:
            del self._exited[key]
        self._last_report = NodeReport(
            run=self.entry.run,
            incarnation=self._context.incarnation,
            serial=self._serial,
            stage=stage,
            generation=self._generation,
            words=detail[:_MAX_DETAIL],
            done_bytes=self.preparation.done_bytes,
            all_bytes=self.preparation.all_bytes,
            devices=self.preparation.devices,
            packages=self.preparation.packages,
            workers=(*self._exited.values(), *alive),
            failures=tuple(self._failures.values())[:MAX_REPORTED_FAILURES],
            elastic=self._elastic,
            results=self.results,
            collected=self._collected,
            paused=self._context.limits.reason_against(self.entry.spec.by),
            lacks_files=self._lacks_files and stage == "failed",
        )
        self._registry.send_report(self._last_report)
