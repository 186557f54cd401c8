"""Preparation of this machine for a run: consent, files, data sets, sandbox or containers, environment."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from barnraise.agent.artifact_service import ArtifactService, OnManifest, TransferProgress
from barnraise.agent.containers.image import PYTHON
from barnraise.agent.containers.run import RunContainers, prepare_containers
from barnraise.agent.context import AgentContext
from barnraise.agent.model_files import RunModels
from barnraise.agent.runs.confinement import RunSandbox, check_data_path, make_broker
from barnraise.agent.runs.consent import (
    MAX_WAITING,
    OfferedFolder,
    agreed_to_sandbox,
    has_agreed,
    note_agreement,
    summarize,
)
from barnraise.agent.runs.local_interface import RunInterface
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent.runs.variables import VariableKeeper
from barnraise.agent.runs.worker_group import run_directory, run_folder
from barnraise.agent_client.run_options import DataSet
from barnraise.artifacts import (
    ArtifactStore,
    FolderLimits,
    FolderManifest,
    data_limits,
    folder_limits,
    read_files,
)
from barnraise.core.errors import RunError, ShippingError
from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.environments import builder
from barnraise.environments.build_plan import allow_wheels_only
from barnraise.environments.build_size import build_size
from barnraise.environments.installed_packages import InstalledPackages, own_packages, packages_of
from barnraise.identity import NodeId
from barnraise.runs.record import Stage
from barnraise.sandbox.choice import find_sandbox, no_sandbox

_REPORT_S = 0.5
_FETCH_BACKOFF = SteppedBackoff((1.0, 2.0, 5.0, 10.0))
_AWAITS_VALUES = "waiting for the values of --set"

Report = Callable[[Stage, str], None]


class RunPreparation:
    """Preparation of one run. ``report`` tells the other machines how far it is."""

    def __init__(
        self,
        context: AgentContext,
        registry: RunRegistry,
        artifacts: ArtifactService,
        store: ArtifactStore,
        variables: VariableKeeper,
        entry: RunEntry,
        *,
        report: Report,
    ) -> None:
        self._context = context
        self._registry = registry
        self._artifacts = artifacts
        self._store = store
        self._variables = variables
        self._entry = entry
        self._report_stage = report
        self._loop = asyncio.get_running_loop()
        self._reported_at = 0.0
        self._home = run_directory(context.directory, entry.run)
        self._folder = run_folder(self._home)
        self.consent: asyncio.Future[bool] | None = None
        self.sandbox_wanted = True  # by this machine's user, together with the consent
        self.python = Path(sys.executable)  # of the workers
        self.containers: RunContainers | None = None
        self.sandbox: RunSandbox | None = None
        self.interface: RunInterface | None = None
        self.manifest: FolderManifest | None = None
        self.offered: OfferedFolder | None = None  # what this machine's user was asked about
        self.data: dict[str, str] = {}  # paths by the variables of the script
        self.model_cache = ""  # the run's own Hugging Face cache
        self._models = RunModels(context.settings, store, self._home, self._report_looking)
        self.values: dict[str, str] = {}  # of the variables that the user of the run set
        self.packages: InstalledPackages | None = None
        self.done_bytes = self.all_bytes = 0  # of the files that are fetched now
        self._silence = ""  # why they were asked for again; until a piece of them comes

    @property
    def interface_directory(self) -> Path:
        """Return the directory that replaces the agent's state directory for the workers."""
        assert self.interface is not None, "it is opened before anything is started"
        return self.interface.directory

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices of this machine that the run may use."""
        if self._entry.spec.device:
            return (self._entry.spec.device,)
        machine = self._context.machine_of(self._context.me)
        return ("cpu",) if machine is None else machine.torch_devices

    def close(self) -> None:
        """Close the local interface of the run, and remove its Hugging Face cache."""
        self._models.close()
        if self.interface is not None:
            self.interface.close()

    def _report(self, stage: Stage, detail: str = "") -> None:
        self._reported_at = self._loop.time()
        self._report_stage(stage, detail)

    async def run(self, asks: bool) -> None:
        """Prepare all; ``asks``: this machine's user must agree first."""
        program = self._entry.spec.program
        self._report("fetching", _AWAITS_VALUES if self._entry.spec.variables.names else "")
        self.values = await self._variables.values_of(self._entry)
        self._report("fetching")
        if asks and not has_agreed(self._home):
            await self._ask_user()
        self.manifest = manifest = await self._fetch(program.folder, folder_limits(self._context.settings))
        if not self._folder.exists():
            await asyncio.to_thread(self._store.unpack, manifest, self._folder)
        is_confined = await self._confine(asks=asks)
        for data in program.data:
            self.data[data.variable] = await self._data_set(data, is_confined=is_confined, asks=asks)
        self.model_cache = await self._models.make_cache()
        await self._make_environment(manifest, asks=asks)
        needs = program.needs
        names = (*needs.required, *needs.optional)
        if self.containers is not None:
            self.packages = await self.containers.packages(names)
        elif self.python == Path(sys.executable):
            self.packages = await asyncio.to_thread(own_packages, names)
        else:
            self.packages = await packages_of(self.python, names)

    async def _confine(self, *, asks: bool) -> bool:
        """Open the run's local interface; return True if its workers run in a sandbox or in containers."""
        context, spec = self._context, self._entry.spec
        options = spec.options
        sandbox = None
        if not options.container and (options.sandbox or (asks and agreed_to_sandbox(self._home))):
            sandbox = await asyncio.to_thread(find_sandbox)
            if not sandbox.is_possible:
                raise no_sandbox(sandbox)  # one was promised to this machine's user
        is_confined = sandbox is not None or bool(options.container)
        make = partial(make_broker, context, spec) if is_confined else None
        interface = RunInterface.open(context.listener, spec.run, context.directory, make)
        self.interface = interface
        if sandbox is not None:
            state = context.directory
            self.sandbox = RunSandbox(sandbox, self._home, state=state, interface=interface.directory)
        return is_confined

    async def _ask_user(self) -> None:
        """Wait until this machine's user agrees. Before, only the list of files is fetched, into memory."""
        me, runs = self._context.me.raw, self._registry.runs.values()
        reports = [entry.reports.get(me) for entry in runs if not entry.has_ended]
        if sum(report is not None and report.stage == "asks" for report in reports) >= MAX_WAITING:
            raise RunError(
                f"{MAX_WAITING} other runs wait for the answer of its user",
                hint="There, type `barnraise ps`, and accept or refuse some: barnraise accept RUN --refuse",
            )
        limits = folder_limits(self._context.settings)
        spec = self._entry.spec
        owners = [node for node in map(NodeId, spec.nodes) if self._context.log.role(node) == "owner"]
        sources = dict.fromkeys([NodeId(spec.by), *owners])
        listing = partial(self._artifacts.list_files, spec.program.folder, sources, limits)
        self.offered = summarize(await self._until_heard(listing), spec)
        self._report("asks", "its user has not agreed yet")
        self.consent = self._loop.create_future()
        if not await self.consent:
            self._report("refused", "its user refused to take part")
            raise RunError("its user refused to take part")
        is_possible = (await asyncio.to_thread(find_sandbox)).is_possible  # else the question said so
        note_agreement(self._home, is_sandboxed=self.sandbox_wanted and is_possible)

    async def _fetch(
        self, manifest: bytes, limits: FolderLimits, on_manifest: OnManifest | None = None
    ) -> FolderManifest:
        order = self._entry.spec
        nodes = [NodeId(raw) for raw in order.nodes]
        by = NodeId(order.by)
        # Owners do not wait for guests, which only receive.
        receivers = [node for node in nodes if node != by and self._context.log.role(node) == "owner"]
        if self._context.me not in receivers and self._context.me != by:
            receivers.append(self._context.me)
        if order.job:  # every owner may have the files of a job, and the one that added it may be off
            receivers = [node for node in self._context.log.owners if node != by]
        self.all_bytes = 0  # unknown; what was received before shows that this machine has begun
        fetch = partial(self._artifacts.fetch, manifest, [by], receivers, limits, self._progress, on_manifest)
        return await self._until_heard(fetch)

    async def _until_heard(self, fetch: Callable[[], Awaitable[FolderManifest]]) -> FolderManifest:
        """Repeat a fetch while no machine answers; the end of the run cancels that.

        An attempt of a job is not repeated here: the queue starts it again, also on another machine.
        """
        self._silence = ""
        attempt = 0
        while True:
            try:
                return await fetch()
            except ShippingError as error:
                if not error.is_silence or self._entry.spec.job:
                    raise
                self._silence, self.all_bytes = f"{error.message}; it tries again", 0
                self._report("fetching", self._silence)
            await asyncio.sleep(_FETCH_BACKOFF.wait(attempt))
            attempt += 1

    async def _data_set(self, data: DataSet, *, is_confined: bool, asks: bool) -> str:
        if data.manifest:
            limits = data_limits(self._context.settings)
            stated = FolderLimits(min(limits.most_bytes, data.bytes), min(limits.most_files, data.files))
            looks = self._models.on_manifest(data, asks=asks) if data.is_model else None
            fetched = await self._fetch(data.manifest, stated, looks)
            tree = await asyncio.to_thread(self._store.link_data, fetched)
            self._models.add(data, fetched, tree)
            return str(tree)
        location = Path(data.path).expanduser()
        if is_confined or asks:
            check_data_path(data.name, location, self._context.settings.runs.data_paths)
        if not location.exists():
            what, option = ("model", "model") if data.is_model else ("data set", "data")
            raise RunError(
                f"the {what} {data.name} is not at {location} on this machine",
                hint=f"Put it there, or send it: --{option} {data.name}=PATH without the @.",
            )
        return str(location)

    async def _make_environment(self, manifest: FolderManifest, *, asks: bool) -> None:
        if self._entry.spec.options.container:
            self.containers = await self._make_container(self._entry.spec.options.container)
            self.python = Path(PYTHON)
            return
        top = await asyncio.to_thread(read_files, self._store, manifest, lambda path: "/" not in path)
        plan = builder.plan_environment(top, self._entry.spec.options.environment)
        if plan.kind == "agent":
            return
        plan = allow_wheels_only(plan) if asks else plan
        stated, listed = self._entry.spec.program.packages, build_size(plan, top).packages
        if asks and listed > stated:
            raise RunError(
                f"{plan.source} lists {listed} packages, and its user agreed to {stated}",
                hint="Start the run again with the same version of Barnraise on both machines.",
            )
        self._report("building", f"building the environment of {plan.source}")

        words: list[str] = []
        reporter = self._loop.create_task(self._report_building(words))
        root = self._context.directory / "environments"
        try:
            self.python = await builder.build(plan, self._folder, root, words.append)
        finally:
            reporter.cancel()

    async def _report_building(self, words: list[str]) -> None:
        """Report the newest words of a build, at most twice a second."""
        while True:
            if words:
                self._report("building", words[-1])
                words.clear()
            await asyncio.sleep(_REPORT_S)

    async def _make_container(self, image: str) -> RunContainers:
        self._report("building", f"looking for the image {image}")
        return await prepare_containers(
            image,
            self._entry.run,
            state=self._context.directory,
            home=self._home,
            interface=self.interface_directory,
            data={**self.data, **({"HF_HUB_CACHE": self.model_cache} if self.model_cache else {})},
            variables=dict(self._entry.spec.program.settings) | self.values,
            gpus=any(device.startswith("cuda") for device in self.devices),
            on_progress=lambda words: self._report("building", words),
        )

    def _report_looking(self, words: str) -> None:
        """Report the comparison with this machine's own files, at most twice a second."""
        if self._loop.time() - self._reported_at > _REPORT_S:
            self._report("fetching", words)

    def _progress(self, progress: TransferProgress) -> None:
        if progress.done_bytes > self.done_bytes:
            self._silence = ""
        self.done_bytes = progress.done_bytes
        self.all_bytes = 0 if self._silence else progress.all_bytes  # then people see the words
        if self._loop.time() - self._reported_at > _REPORT_S:
            names = ", ".join(self._context.name_of(node) for node in progress.waits_for)
            self._report("fetching", self._silence or (f"waiting for pieces from {names}" if names else ""))
