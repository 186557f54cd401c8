"""This machine's part in one run: gets the files, makes ready, starts the workers, tells how they fare."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from barnraise.agent.artifact_service import ArtifactService, TransferProgress
from barnraise.agent.containers import containers
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent.runs.worker_group import WorkerGroup, WorkerGroupConfig, guests_of, run_directory
from barnraise.agent_client.run_requests import GroupRequest
from barnraise.artifacts import (
    ArtifactStore,
    FolderLimits,
    FolderManifest,
    data_limits,
    folder_limits,
    pack_changes,
    read_files,
)
from barnraise.core.config import Settings
from barnraise.core.errors import BarnraiseError, RunError
from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.environments import builder
from barnraise.environments.installed_packages import InstalledPackages, own_packages, packages_of
from barnraise.identity import NodeId
from barnraise.identity.trust import TrustLog
from barnraise.runs.record import NodeReport, RunRecord, Stage, WorkerSlot, WorkerState
from barnraise.topology import Machine

_REPORT_S = 0.5
_SOFT_WORDS = 4000
_MOST_CRASHES = 3
_LEAVE_S = 8.0
_LOOK_S = 0.05
_RESTART_BACKOFF = SteppedBackoff((0.0, 0.0, 1.0, 2.0, 5.0, 10.0))  # of workers that join a session

_log = logging.getLogger(__name__)


class ExecutorHost(Protocol):
    """What a part needs of the agent."""

    me: NodeId
    incarnation: bytes
    settings: Settings
    directory: Path

    @property
    def log(self) -> TrustLog: ...

    def machine_of(self, node: NodeId) -> Machine | None: ...

    def name_of(self, node: NodeId) -> str: ...

    def say(self, text: str) -> None: ...


class RunExecutor:
    """Lives in one task from the moment the run is known until it has ended."""

    def __init__(
        self,
        around: ExecutorHost,
        book: RunRegistry,
        shipper: ArtifactService,
        store: ArtifactStore,
        known: RunEntry,
    ) -> None:
        self._around = around
        self._book = book
        self._shipper = shipper
        self._store = store
        self.known = known
        self.consent: asyncio.Future[bool] | None = None
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._serial = 0
        self._stage: Stage = "fetching"
        self._words = ""
        self._done = self._all = 0
        self._report: NodeReport | None = None
        self._reported_at = 0.0
        self._finished: dict[tuple[int, int], WorkerState] = {}
        self._crews: list[WorkerGroup] = []
        self._elastic = self._leaving = False
        self._deaths = self._crashes = self._counted = 0
        self._started_at = -1e9
        self._last_start = 0
        self._generation = 0
        self._python = Path(sys.executable)
        self._contained: containers.RunContainers | None = None
        self.manifest: FolderManifest | None = None
        self._data: dict[str, str] = {}
        self._packages: InstalledPackages | None = None
        self.results = b""
        self._collected = False

    # places

    @property
    def home(self) -> Path:
        return run_directory(self._around.directory, self.known.run)

    @property
    def folder(self) -> Path:
        return self.home / "folder"

    @property
    def _devices(self) -> tuple[str, ...]:
        machine = self._around.machine_of(self._around.me)
        return ("cpu",) if machine is None else machine.torch_devices

    def wake(self) -> None:
        self._wake.set()

    async def live(self, asks: bool) -> None:
        """``asks``: this machine's user must agree first."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._recall()
        prepare = self._loop.create_task(self._prepare(asks))
        prepare.add_done_callback(lambda _: self.wake())
        try:
            while not self.known.has_ended:
                self._wake.clear()
                try:
                    again = await self._step(prepare)
                except (BarnraiseError, OSError) as error:
                    self._failed(error)
                    again = False
                if not again:
                    await self._wake.wait()
        finally:
            prepare.cancel()
            await asyncio.gather(prepare, return_exceptions=True)  # what went wrong was told already
            await self._end_workers(at_once=True)
        await self._collect()

    async def _step(self, prepare: asyncio.Task[None]) -> bool:
        """Bring what is here closer to the record; whether to look again at once."""
        record = self.known.record
        error = prepare.exception() if prepare.done() and not prepare.cancelled() else None
        if error is not None and self._stage not in ("failed", "refused"):
            self._failed(error)
        if record.phase in ("stopping", "restarting"):
            if record.phase == "stopping":
                prepare.cancel()
            if any(crew.alive for crew in self._crews):
                await self._end_workers()
                self._elastic = False
                self._tell("ended")
                return True  # the record may have changed meanwhile
            if self._report is None or not self._report.is_idle:
                self._tell("ended")
            return False
        if record.phase != "running" or error is not None or not prepare.done():
            return False
        mine = record.ranks_of(self._around.me.raw)
        if any(record.slots[rank].start > self._last_start for rank in mine):
            await self._end_workers()
            self._generation, self._crews = record.generation, []
            await self._start(mine, record.generation)
            return True
        return await self._follow_session(record) if record.elastic else False

    async def _follow_session(self, record: RunRecord) -> bool:
        """Whoever was put out ends; for whoever is missing here a newcomer starts, to be let in."""
        if self._leaving:
            return False  # they end when the others have let them go
        me = self._around.me.raw
        members = {slot.key for slot in record.slots}

        def is_member(state: WorkerState) -> bool:
            return (me, state.local_rank, state.start) in members

        ended = [await crew.end_who_is_out(is_member, self._wake) for crew in self._crews]
        if any(ended):
            return True
        self._generation = record.generation
        self._crews = [crew for crew in self._crews if crew.alive or not crew.is_idle]
        wanted = range(self.known.order.per_node or len(self._devices))
        states = [state for crew in self._crews for state in crew.states.values()]
        busy = {state.local_rank for state in states if state.state != "ended"}
        absent = [place for place in wanted if place not in busy]
        well = (state.state == "ended" and not state.failed for state in self._finished.values())
        is_over = record.finished or any(well)
        if not absent or is_over or me not in self.known.order.nodes or self._cannot_join(members):
            return False
        pause = _RESTART_BACKOFF.wait(self._deaths)
        if self._loop.time() < self._started_at + pause:
            self._loop.call_later(self._started_at + pause - self._loop.time() + 0.01, self.wake)
            return False
        self._deaths += 1
        self._started_at = self._loop.time()
        first = len(record.slots)
        start = max(record.generation, self._last_start) + 1
        await self._start(range(first, first + len(absent)), start, absent)
        return True

    def _cannot_join(self, members: set[tuple[bytes, int, int]]) -> bool:
        """Newcomers that end with an error before they are let in, again and again, are given up."""
        last = [state for state in self._finished.values() if state.start == self._last_start]
        if any((self._around.me.raw, state.local_rank, state.start) in members for state in last):
            self._crashes = 0
        elif any(state.code and not state.signal for state in last) and self._counted != self._last_start:
            self._crashes, self._counted = self._crashes + 1, self._last_start
        if self._crashes < _MOST_CRASHES:
            return False
        if self._crashes == _MOST_CRASHES:
            self._crashes += 1
            words = next((state.tail.strip().rpartition("\n")[2] for state in last if state.tail), "")
            self._tell("ended", f"its worker cannot join: {_MOST_CRASHES} ended, the last with: {words}")
            self._around.say(f"run {self.known.run}: {self._words}")
        return True

    # before it starts

    async def _prepare(self, asks: bool) -> None:
        order = self.known.order
        self._tell("fetching")
        self.manifest = manifest = await self._fetch(order.folder, folder_limits(self._around.settings))
        if asks and not (self.home / "accepted").exists():
            self._tell("asks", "its user has not agreed yet")
            self.consent = self._loop.create_future()
            if not await self.consent:
                self._tell("refused", "its user does not want to take part")
                raise RunError("its user does not want to take part")
            (self.home / "accepted").touch()
        if not self.folder.exists():
            await asyncio.to_thread(self._store.unpack, manifest, self.folder)
        for data in order.data:
            self._data[data.name] = await self._data_set(data.manifest, data.path, data.name)
        await self._make_environment(manifest)
        needs = order.needs
        names = (*needs.required, *needs.optional)
        if self._contained is not None:
            self._packages = await self._contained.packages(names)
        elif self._python == Path(sys.executable):
            self._packages = await asyncio.to_thread(own_packages, names)
        else:
            self._packages = await packages_of(self._python, names)
        if not self._crews:
            self._tell("ended" if self._finished else "ready")

    async def _fetch(self, manifest: bytes, limits: FolderLimits) -> FolderManifest:
        order = self.known.order
        nodes = [NodeId(raw) for raw in order.nodes]
        by = NodeId(order.by)
        # Owners do not wait for guests: those only receive.
        receivers = [node for node in nodes if node != by and self._around.log.role(node) == "owner"]
        if self._around.me not in receivers and self._around.me != by:
            receivers.append(self._around.me)
        return await self._shipper.fetch(manifest, [by], receivers, limits, self._progress)

    async def _data_set(self, manifest: bytes, path: str, name: str) -> str:
        if manifest:
            fetched = await self._fetch(manifest, data_limits(self._around.settings))
            return str(await asyncio.to_thread(self._store.link_data, fetched))
        found = Path(path).expanduser()
        if not found.exists():
            raise RunError(
                f"the data set {name} is not at {found}",
                hint=f"Put it there, or ship it: --data {name}=PATH without the @.",
            )
        return str(found)

    async def _make_environment(self, manifest: FolderManifest) -> None:
        if self.known.order.container:
            self._contained = await self._make_container(self.known.order.container)
            self._python = Path(containers.PYTHON)
            return
        top = await asyncio.to_thread(read_files, self._store, manifest, lambda path: "/" not in path)
        plan = builder.plan_environment(top, self.known.order.environment)
        if plan.kind == "agent":
            return
        self._tell("building", f"building the environment of {plan.source}")

        def progress(words: str) -> None:
            self._tell("building", words)

        root = self._around.directory / "environments"
        self._python = await builder.build(plan, self.folder, root, progress)

    async def _make_container(self, image: str) -> containers.RunContainers:
        self._tell("building", f"looking for the image {image}")
        return await containers.make_ready(
            image,
            self.known.run,
            state=self._around.directory,
            home=self.home,
            data=self._data,
            variables=dict(self.known.order.variables),
            gpus=any(device.startswith("cuda") for device in self._devices),
            on_progress=lambda words: self._tell("building", words),
        )

    def _progress(self, progress: TransferProgress) -> None:
        self._done, self._all = progress.done_bytes, progress.all_bytes
        if self._loop.time() - self._reported_at > _REPORT_S:
            names = ", ".join(self._around.name_of(node) for node in progress.waits_for)
            self._tell("fetching", f"waits for pieces from {names}" if names else "")

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, BarnraiseError):
            words = f"{error.message}. {error.hint}"
        else:
            _log.error("run %s failed here", self.known.run, exc_info=error)
            words = f"{type(error).__name__}: {error}"
        self._tell("failed", words)

    # workers

    async def _start(self, ranks: Sequence[int], start: int, places: Sequence[int] = ()) -> None:
        """Processes for these ranks of the record; newcomers to a session have only ``places`` here."""
        self._last_start = start
        (self.home / "generation").write_text(str(start))
        machine = self._around.machine_of(self._around.me)
        outfit = WorkerGroupConfig(
            order=self.known.order,
            home=self.home,
            folder=self.folder,
            state=self._around.directory,
            settings=self._around.settings,
            python=self._python,
            contained=self._contained,
            data=self._data,
            cores=machine.cores if machine is not None else 0,
            guests=guests_of(self.known.order, self._around.log, self._around.name_of),
        )
        crew = WorkerGroup(outfit, self._record_for(places), ranks, start, self.tell_again, self._around.say)
        self._crews.append(crew)
        self._tell("running")
        await crew.begin()

    def _record_for(self, places: Sequence[int]) -> RunRecord:
        """A newcomer to a session has no place in the record yet: it is given one behind the others."""
        record, devices = self.known.record, self._devices
        more = [WorkerSlot(self._around.me.raw, place, devices[place % len(devices)]) for place in places]
        return replace(record, slots=(*record.slots, *more))

    def tell_again(self) -> None:
        alive = any(not crew.is_idle for crew in self._crews)
        self._tell("running" if alive else "ended")
        self.wake()

    async def _end_workers(self, *, at_once: bool = False) -> None:
        def in_a_hurry() -> bool:
            return at_once or self.known.record.hard

        await asyncio.gather(*(crew.end(in_a_hurry, self._wake) for crew in self._crews))

    def in_session(self, asked: GroupRequest) -> int | None:
        """A worker of ours asks for its group; its rank, if it has a place in the record."""
        key = (self._around.me.raw, asked.local_rank, asked.start)
        rank = next((rank for rank, slot in enumerate(self.known.record.slots) if slot.key == key), None)
        crew = next((one for one in self._crews if one.start == asked.start), None)
        word = "running" if rank is not None and not asked.stuck else "near" if asked.near else "waiting"
        word = "leaving" if self._leaving else word
        if crew is not None and (crew.mark(word, asked) or not self._elastic):
            self._elastic = True
            self._tell("running")
        return rank

    def hear(self, asked: GroupRequest) -> None:
        """What a worker of ours says with its question, before that waits for news."""
        crew = next((one for one in self._crews if one.start == asked.start), None)
        if crew is not None and crew.note(asked):
            self._tell("running")

    async def leave(self) -> None:
        """This machine wants to go: the others take its workers out of the group at their next commit."""
        if not self._elastic or self.known.record.phase != "running":
            return
        self._leaving = True
        for crew in self._crews:
            crew.say_leaving()
        self._tell("running")
        deadline = self._loop.time() + _LEAVE_S
        while self._loop.time() < deadline and not all(crew.has_left(self._is_out) for crew in self._crews):
            await asyncio.sleep(_LOOK_S)

    def _is_out(self, state: WorkerState) -> bool:
        """The others go on without it, and it has heard so."""
        key = (self._around.me.raw, state.local_rank, state.start)
        return state.broke > 0 and key not in {slot.key for slot in self.known.record.slots}

    def notice_stopped(self) -> None:
        now = self._loop.time()
        noticed = [crew for crew in self._crews if crew.notice_stopped(now)]
        if noticed and self._elastic:
            self._tell("running")

    def _recall(self) -> None:
        """An earlier start of this agent may have had workers; they ended with it."""
        try:
            self._last_start = int((self.home / "generation").read_text())
        except (OSError, ValueError):
            return
        record = self.known.record
        self._generation = min(self._last_start, record.generation)
        words = "the agent of this machine ended, and this worker with it"
        for rank in record.ranks_of(self._around.me.raw) if record.phase == "running" else ():
            slot = record.slots[rank]
            if slot.start <= self._last_start:
                lost = WorkerState(rank, "ended", 0, 9, words, 0, slot.local_rank, slot.start)
                self._finished[slot.local_rank, slot.start] = lost
        if self._finished:
            self._tell("ended")

    # the end

    async def _collect(self) -> None:
        """What rank 0 wrote is the result; the others' files stay where they are."""
        record = self.known.record
        first = record.results_at or (record.slots[0].node if record.slots else b"")
        if self.manifest is not None and first == self._around.me.raw:
            try:
                limits = folder_limits(self._around.settings)
                self.results = await asyncio.to_thread(
                    pack_changes, self.manifest, self.folder, self._store, limits
                )
            except (BarnraiseError, OSError) as error:
                words = error.message if isinstance(error, BarnraiseError) else str(error)
                self._words = f"the results stay in {self.folder}: {words}"
        self._collected = True
        self._tell("ended", self._words)

    def _tell(self, stage: Stage, words: str = "") -> None:
        self._serial += 1
        self._stage, self._words = stage, words
        for state in (one for crew in self._crews for one in crew.states.values()):
            self._finished.pop((state.local_rank, state.start), None)
            if state.state == "ended":
                self._finished[state.local_rank, state.start] = state
        alive = [one for crew in self._crews for one in crew.states.values() if one.state != "ended"]
        members = {slot.start for slot in self.known.record.slots if slot.node == self._around.me.raw}
        for key in [key for key in self._finished if key[1] not in members and key[1] != self._last_start]:
            del self._finished[key]
        self._reported_at = self._loop.time()
        self._report = NodeReport(
            run=self.known.run,
            incarnation=self._around.incarnation,
            serial=self._serial,
            stage=stage,
            generation=self._generation,
            words=words[:_SOFT_WORDS],
            done_bytes=self._done,
            all_bytes=self._all,
            devices=self._devices,
            packages=self._packages,
            workers=(*self._finished.values(), *alive),
            elastic=self._elastic,
            results=self.results,
            collected=self._collected,
        )
        self._book.tell_report(self._report)
