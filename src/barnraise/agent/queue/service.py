"""The queue service of an agent: schedules jobs while this machine coordinates, and keeps their files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.model_files import RunModels
from barnraise.agent.queue import messages
from barnraise.agent.queue.held_files import HeldFiles
from barnraise.agent.queue.registry import JobRegistry
from barnraise.agent.runs.registry import RunEntry
from barnraise.agent.runs.service import RunService
from barnraise.agent_client.run_options import DataSet
from barnraise.artifacts import FolderLimits, data_limits, folder_limits
from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.events import Wakeup
from barnraise.identity import NodeId
from barnraise.runs.control.failures import final_failure, summarize
from barnraise.runs.control.worker_status import training_progress
from barnraise.runs.queue.job import JobRecord, KnownJob
from barnraise.runs.queue.scheduler import (
    FreeDevice,
    QueueDecision,
    QueueFacts,
    QueueMachine,
    QueueRun,
    RunToStart,
    decide,
)
from barnraise.runs.record import NodeReport, RunRecord, attempt_spec, sign_attempt
from barnraise.topology import Machine

_TICK_S = 1.0
_SETTLE_S = 2.0  # after a link is up, a new coordinator first receives what others know
_KEEP_S = 5.0  # between looks for files that are missing here
_RETRY_S = 60.0  # after files could not be fetched

_log = logging.getLogger(__name__)


class QueueService:
    """Everything about jobs on one agent."""

    def __init__(self, context: AgentContext, runs: RunService) -> None:
        self._context = context
        self._runs = runs
        self._loop = asyncio.get_running_loop()
        self.registry = JobRegistry(context)
        self.registry.on_job = self._on_job
        self.registry.on_saved = self.wake
        self.registry.on_files = self._on_files
        self._held = HeldFiles()
        self._changed = Wakeup()
        self._linked_at = self._loop.time()  # of the newest link
        self._settles_at: float | None = None  # None: this machine does not coordinate
        self._away_since: dict[bytes, float] = {}
        self._complete: set[bytes] = set()  # manifests whose files are all here
        self._looked: set[bytes] = set()  # manifests that were looked for here, also those not to be fetched
        self._retry_at: dict[bytes, float] = {}
        runs.kept_for_jobs, runs.continued_by_jobs = self.needed_files, self.needed_runs
        runs.readers_for_jobs, runs.awaited_by_jobs = self._readers, self.awaited_runs
        runs.registry.on_change = self.wake

    def jobs(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Return the background tasks that the agent has to run."""
        return self._schedule, self._keep_files, self._seek_files, self.registry.delete_forgotten

    def load(self) -> None:
        """Load the jobs of before this start."""
        self.registry.load()
        for job in list(self.registry.jobs.values()):
            self._on_job(job)

    def view_changed(self) -> None:
        """Follow changes of keys and roles; a new owner may fetch the files of all jobs."""
        self.registry.view_changed()
        jobs = self.registry.jobs.values()
        self._runs.allow_files({manifest for job in jobs for manifest in _manifests(job)})
        self._held.keep_only({node.raw for node in self._context.log.owners})
        if self._held.own is not None:
            self.registry.send_files(self._held.own)
        self.wake()

    def link_up(self, node: NodeId) -> None:
        """Exchange records with a newly connected machine."""
        self._linked_at = self._loop.time()
        self._retry_at.clear()  # it may have them
        self.registry.link_up(node)
        if self._held.own is not None:
            self.registry.send_files(self._held.own, node)

    def reset(self) -> None:
        """Forget all jobs of the old cluster, and which machines had their files."""
        self.registry.reset()
        self._held.clear()

    def received(self, node: NodeId, body: memoryview) -> None:
        """Handle a message of another agent about jobs."""
        self.registry.receive(node, messages.decode(body))

    def wake(self) -> None:
        """Run the scheduler at once, because something has changed."""
        self._changed.wake()

    # scheduling

    async def _schedule(self) -> None:
        """Run the scheduler after each change while this machine coordinates, until cancelled."""
        while True:
            now = self._loop.time()
            self.registry.apply_waiting()
            self._update_away(now)
            is_settled = self._is_settled(now)
            if self._settles_at is not None:
                self.registry.ask_unsaved()
            if is_settled and self.registry.jobs:
                try:
                    await self._perform(decide(self.observe()))
                except Exception:  # noqa: BLE001  # one job must not stop the agent
                    _log.exception("the queue could not be scheduled")
                    await asyncio.sleep(_TICK_S)
            settles_s = _TICK_S if is_settled or self._settles_at is None else self._settles_at - now
            await self._changed.sleep(min(_TICK_S, settles_s))

    def _is_settled(self, now: float) -> bool:
        """Tell whether this machine coordinates, and has had the time to receive what others knew."""
        member = self._context.member
        coordinates = member.coordinator(now)[0] == self._context.me.raw
        if not (coordinates and member.quorum_status(now).decides and member.is_current(now)):
            self._settles_at = None
            return False
        if self._settles_at is None:
            self._settles_at = self._linked_at + _SETTLE_S
            self.registry.compare_all()
        return now >= self._settles_at

    def _update_away(self, now: float) -> None:
        """Update since when the machines of attempts have been absent."""
        present = set(self._context.member.view.nodes)
        attempts = (job.record.attempt for job in self.registry.jobs.values())
        nodes = {node for attempt in attempts if attempt is not None for node in attempt.nodes}
        self._away_since = {node: self._away_since.get(node, now) for node in nodes - present}

    def observe(self) -> QueueFacts:
        """Return everything that the scheduler needs to know."""
        now, jobs = self._loop.time(), self.registry.jobs
        current = self.awaited_runs()
        runs = self._runs.registry.runs.items()
        return QueueFacts(
            jobs=dict(jobs),
            machines=self._machines(),
            runs={
                run: self._run_facts(entry, now)
                for run, entry in runs
                if run in current or not entry.has_ended
            },
            # A machine counts as absent from the first moment on.
            away_s={node: max(now - since, 1e-9) for node, since in self._away_since.items()},
            name=lambda raw: self._context.name_of(NodeId(raw)),
            # Only the coordinator asks which records are saved.
            unsaved=frozenset(self.registry.unsaved if self._settles_at is not None else ()),
            at=time.time(),
            absent_files=self._held.absent(
                jobs.values(), self._context.me.raw, set(self._context.member.view.nodes)
            ),
        )

    def _machines(self) -> list[QueueMachine]:
        machines = []
        for member in self._context.member.view.members:
            node = NodeId(member.node)
            machine = self._context.machine_of(node)
            if not member.works or machine is None or self._context.log.role(node) != "owner":
                continue
            is_here = node == self._context.me
            paused = self._context.limits.shown_reason if is_here else self._context.peer_store[node].paused
            machines.append(QueueMachine(node.raw, free_devices(machine), paused))
        return machines

    def _run_facts(self, entry: RunEntry, now: float) -> QueueRun:
        record, outcome = entry.record, entry.record.outcome
        left_out = {machine.node for machine in record.left_out if not machine.may_join}
        is_over = entry.has_ended and outcome is not None and not record.provisional
        holder = record.results_at or (record.slots[0].node if record.slots else b"")
        report = entry.reports.get(holder)
        text = f"{outcome.sentence}\n{outcome.tail}" if outcome is not None else ""
        return QueueRun(
            nodes=tuple(node for node in entry.spec.nodes if node not in left_out),
            device=entry.spec.device,
            code=outcome.code if is_over and outcome is not None else None,
            sentence=self._sentence(record),
            progress=training_progress(record, entry.reports),
            is_collected=not holder or (report is not None and report.collected),
            results=_results_of(report),
            results_at=holder,
            results_note=report.words if report is not None else "",
            lacks_memory="out of memory" in text or "out-of-memory" in text,
            lacks_files=outcome is not None and outcome.lacks_files,
            is_stopped=outcome is not None and outcome.is_stop,
            ended_s=now - entry.seen_at,
        )

    def _sentence(self, record: RunRecord) -> str:
        """Return how a run ended: with the error of its script and the machine's name, if it failed."""
        failed = final_failure(record)
        if failed is not None and not failed.failure.signal:
            return f"{summarize(failed.failure)}, on {self._context.name_of(NodeId(failed.node))}"
        return record.outcome.sentence if record.outcome is not None else record.why

    async def _perform(self, decision: QueueDecision) -> None:
        for number, record in decision.changed.items():
            if number not in self.registry.unsaved:  # a person may have changed it meanwhile
                await self._write(number, record)
        for begun in decision.started:
            await self._start(begun)
        for run in decision.stopped:
            entry = self._runs.registry.runs.get(run)
            if entry is not None:
                try:
                    await self._runs.controller.stop(entry, hard=False)
                except BarnraiseError as error:
                    _log.info("cannot stop run %s: %s", run, error.message)

    async def _write(self, number: int, record: JobRecord) -> None:
        try:
            await self.registry.write(record)
        except BarnraiseError as error:
            _log.info("cannot change job %d: %s", number, error.message)
            return
        self._context.report_event(f"job {number}: {record.state}, {record.why}")

    async def _start(self, begun: RunToStart) -> None:
        """Start the run of an attempt. If another coordinator has started it, its record is taken."""
        job, attempt = begun
        if self.registry.jobs.get(job.number) != job or job.number in self.registry.unsaved:
            return  # it was changed meanwhile
        signed = job.record.signed
        # Another coordinator may start it again, so the spec must have the same bytes.
        order = attempt_spec(signed, attempt.number, attempt.nodes, attempt.device, at=attempt.at)
        record = replace(sign_attempt(order, signed), why=f"attempt {attempt.number} of job {job.number}")
        try:
            await self._runs.controller.write(None, record)
        except BarnraiseError as error:
            _log.info("cannot start run %s: %s", order.run, error.message)

    # files

    def _on_job(self, job: KnownJob) -> None:
        self._runs.allow_files(_manifests(job))
        self.wake()

    def needed_files(self) -> set[bytes]:
        """Return the manifests that must stay here: of jobs that have not ended, and results of own jobs."""
        needed: set[bytes] = set()
        for job in self.registry.jobs.values():
            if not job.record.has_ended:
                needed.update(job.spec.program.manifests)
            elif self._keeps_results(job):
                needed.add(job.record.results)
        return needed

    def awaited_runs(self) -> set[str]:
        """Return the newest runs of jobs that have not ended, or whose results are awaited."""
        jobs = self.registry.jobs.values()
        return {job.run for job in jobs if not job.record.has_ended or job.record.awaits_results}

    def needed_runs(self) -> set[str]:
        """Return the runs whose checkpoints the next attempt of a job needs."""
        return {run for job in self.registry.jobs.values() if not job.record.has_ended for run in job.runs}

    def _keeps_results(self, job: KnownJob) -> bool:
        me, record = self._context.me.raw, job.record
        return bool(record.results) and not record.is_cleared and me in (job.spec.by, record.results_at)

    def _readers(self, manifest: bytes) -> set[NodeId]:
        """Return the machines that may fetch this manifest from here: all owners, while a job has it."""
        for job in self.registry.jobs.values():
            record = job.record
            is_file = not record.has_ended and manifest in job.spec.program.manifests
            if is_file or (manifest == record.results and not record.is_cleared):
                return set(self._context.log.owners)
        return set()

    async def _keep_files(self) -> None:
        """Fetch files of waiting jobs, and results of own jobs, from connected machines that have them."""
        while True:
            await self._find_complete()
            self._tell_files()
            await self._fetch_all(from_holders=True)
            await asyncio.sleep(_KEEP_S)

    async def _seek_files(self) -> None:
        """Fetch what no connected machine has whole. Several may have a part of it.

        That may wait for minutes, so other files must not come after it.
        """
        while True:
            await asyncio.sleep(_KEEP_S)
            await self._fetch_all(from_holders=False)

    async def _fetch_all(self, *, from_holders: bool) -> None:
        for manifest, sources, limits in self._missing_files():
            if manifest in self._complete or self._has_holder(manifest, sources) != from_holders:
                continue
            try:
                await self._fetch_missing(manifest, sources, limits)
            except (BarnraiseError, OSError) as error:
                self._retry_at[manifest] = self._loop.time() + _RETRY_S
                _log.info("files of a job are not here yet: %s", error)
            self._tell_files()

    def _has_holder(self, manifest: bytes, sources: Collection[NodeId]) -> bool:
        """Tell whether a connected machine has all files of a manifest."""
        return any(
            node in sources or self._held.has(node.raw, manifest) for node in self._context.linked_nodes()
        )

    async def _find_complete(self) -> None:
        """Note which files of new jobs are here already; before fetches, which may take long."""
        needed = self.needed_files()
        self._complete &= needed  # others may be removed, and needed again by a later job
        self._looked &= needed
        for manifest in needed - self._complete - self._looked:
            self._looked.add(manifest)
            try:
                if await self.holds(manifest):
                    self._complete.add(manifest)
            except (BarnraiseError, OSError) as error:
                _log.info("files of a job cannot be read: %s", error)

    def _tell_files(self) -> None:
        """Tell the other owners which files of jobs are all here, if that has changed."""
        jobs = (job for job in self.registry.jobs.values() if not job.record.has_ended)
        own = frozenset(name for job in jobs for name in job.spec.program.manifests if name in self._complete)
        if own != self._held.own:
            self._held.own = own
            self.registry.send_files(own)
            self.wake()

    def _on_files(self, node: NodeId, manifests: Collection[bytes]) -> None:
        self._held.note(node.raw, manifests)
        self.wake()

    async def fetch(self, manifest: bytes, sources: Iterable[NodeId], limits: FolderLimits) -> None:
        """Fetch files of a job from the machines that have them; raise BarnraiseError if that fails."""
        if not await self.holds(manifest):
            await self._fetch_missing(manifest, sources, limits)
        self._complete.add(manifest)

    async def _fetch_missing(self, manifest: bytes, sources: Iterable[NodeId], limits: FolderLimits) -> None:
        receivers = [node for node in self._context.log.owners if node not in sources]
        model = self._model(manifest)
        looks = None
        if model is not None:  # the run of the job may join this fetch, so its cache is looked at here
            settings, home = self._context.settings, self._context.directory
            models = RunModels(settings, self._runs.store, home, lambda words: None)
            looks = models.on_manifest(model, asks=False)
        await self._runs.artifacts.fetch(manifest, sources, receivers, limits, on_manifest=looks)
        self._complete.add(manifest)

    def _model(self, manifest: bytes) -> DataSet | None:
        """Return the model of a job that has this manifest; None if it is no model's."""
        jobs = (job for job in self.registry.jobs.values() if not job.record.has_ended)
        sets = (data for job in jobs for data in job.spec.program.data)
        return next((data for data in sets if data.is_model and data.manifest == manifest), None)

    async def holds(self, manifest: bytes) -> bool:
        """Tell whether all files of a manifest are here."""
        return await asyncio.to_thread(self._runs.checkpoints.local.has_all, manifest)

    def _missing_files(self) -> list[tuple[bytes, list[NodeId], FolderLimits]]:
        me, now = self._context.me, self._loop.time()
        works = {member.node for member in self._context.member.view.members if member.works}
        missing: dict[bytes, tuple[bytes, list[NodeId], FolderLimits]] = {}
        for job in self.registry.jobs.values():
            by, record = NodeId(job.spec.by), job.record
            if self._keeps_results(job):
                sources = [NodeId(record.results_at)]
                missing[record.results] = record.results, sources, folder_limits(self._context.settings)
            is_paused = bool(self._context.limits.reason_against(by.raw))
            may_run = me.raw in works and (not job.nodes or me.raw in job.nodes) and not is_paused
            if not record.has_ended and may_run:
                for manifest, limits in self._limits_of(job).items():
                    missing[manifest] = manifest, [by], limits
        return [
            row
            for manifest, row in missing.items()
            if manifest not in self._complete and now >= self._retry_at.get(manifest, 0.0)
        ]

    def _limits_of(self, job: KnownJob) -> Mapping[bytes, FolderLimits]:
        """Return the limits of each manifest; they are those with which a run fetches it."""
        settings, program = self._context.settings, job.spec.program
        allowed = data_limits(settings)
        limits = {
            data.manifest: FolderLimits(
                min(allowed.most_bytes, data.bytes), min(allowed.most_files, data.files)
            )
            for data in program.data
            if data.manifest
        }
        return {**limits, program.folder: folder_limits(settings)}


def free_devices(machine: Machine) -> tuple[FreeDevice, ...]:
    """Return the devices of a machine that torch can use."""
    named = {
        device.kind if device.kind in ("cpu", "mps") else f"{device.kind}:{device.index}": device
        for device in machine.devices
    }
    rows = []
    for name in machine.torch_devices:
        device = named.get(name)
        memory = device.memory_bytes if device is not None else machine.memory_bytes
        speed = device.tflops_fp32 if device is not None else None
        rows.append(FreeDevice(name, memory, speed or 0.0))
    return tuple(rows)


def _manifests(job: KnownJob) -> tuple[bytes, ...]:
    return (*job.spec.program.manifests, *([job.record.results] if job.record.results else []))


def _results_of(report: NodeReport | None) -> bytes:
    return report.results if report is not None else b""
