"""Workers of a run that were started together on this machine, and their states."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from msgspec.structs import replace

from barnraise.agent.containers.image import STATE_INSIDE
from barnraise.agent.containers.run import RunContainers, translate_exit
from barnraise.agent.power.inhibit_sleep import keep_awake
from barnraise.agent.runs.confinement import RunSandbox
from barnraise.agent.runs.supervisor_client import SupervisorClient
from barnraise.agent.supervisor import messages
from barnraise.agent.supervisor.log_file import read_log
from barnraise.agent_client.bootstrap import child_environment
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.agent_client.run_requests import FailingRequest, GroupRequest, ProgressRequest
from barnraise.core import metrics
from barnraise.core.config import Settings
from barnraise.core.files import remove_tree
from barnraise.core.metrics import catalogue
from barnraise.core.sanitize import rewritten_text
from barnraise.runs.control.failures import has_failed_by_itself
from barnraise.runs.record import MAX_FAILURE_TAIL, RunRecord, RunSpec, WorkerFailure, WorkerState
from barnraise.runs.worker_environment import worker_environment

_TAIL_CHARACTERS = 8000
_SUSPENDED_S = 1.0


class WorkerGroupConfig(NamedTuple):
    """Settings that all workers of one run on this machine share."""

    spec: RunSpec
    state: Path
    interface: Path  # replaces the state directory for the workers
    settings: Settings
    python: Path
    containers: RunContainers | None
    sandbox: RunSandbox | None
    data: Mapping[str, str]  # paths by the variables of the script
    model_cache: str  # the run's own Hugging Face cache; empty if it has none
    values: Mapping[str, str]  # of the variables that the user set
    cores: int
    limits: MachineLimits

    @property
    def home(self) -> Path:
        return run_directory(self.state, self.spec.run)

    @property
    def mounted(self) -> tuple[str, ...]:
        """Return the paths that a confined worker may read."""
        return tuple(filter(None, (*self.data.values(), self.model_cache)))


class WorkerGroup:
    """The workers ``ranks`` of ``record``, started together under the number ``start``.

    ``on_change`` is called on the loop after each change of a state.
    """

    def __init__(
        self,
        config: WorkerGroupConfig,
        record: RunRecord,
        ranks: Sequence[int],
        start: int,
        on_change: Callable[[], None],
        report_event: Callable[[str], None],
    ) -> None:
        self.start = start
        self.states = {
            rank: WorkerState(rank, "running", local_rank=record.slots[rank].local_rank, start=start)
            for rank in ranks
        }
        self._config = config
        self._record = record
        self._on_change = on_change
        self._report_event = report_event
        self._supervisor: SupervisorClient | None = None
        self._processes: dict[int, psutil.Process] = {}
        self._suspended_since: dict[int, float] = {}  # loop time by rank
        self._is_frozen = False  # by this machine, because it is paused
        self._frozen: list[psutil.Process] = []
        self._admitted: set[int] = set()
        self._evicted: set[int] = set()
        self._is_terminating = False  # the workers were asked to exit
        self.failures: list[WorkerFailure] = []
        self._exit_count = 0
        self._sleep_inhibitor = contextlib.ExitStack()

    @property
    def alive(self) -> bool:
        """Tell whether the supervisor still runs."""
        return self._supervisor is not None

    @property
    def is_idle(self) -> bool:
        """Tell whether all workers have exited."""
        return all(state.state == "ended" for state in self.states.values())

    def set_state(self, state: str, request: GroupRequest) -> bool:
        """Set the state that a worker reports; return True if it changed."""
        broke, blames = (request.generation, request.blames) if request.stuck else (0, ())
        return self._change(
            request.local_rank,
            lambda current: replace(current, state=state, broken_generation=broke, blames=blames),
        )

    def mark_main(self, request: GroupRequest) -> bool:
        """Record how much output a worker has when it becomes rank 0; return True if it is new there."""

        def mark(current: WorkerState) -> WorkerState:
            if current.main_offset >= 0:
                return current
            file = log_path(self._config.home, self.start, current.local_rank)
            return replace(current, main_offset=read_log(file, 0, 0).end)

        return self._change(request.local_rank, mark)

    def update_from(self, request: GroupRequest | ProgressRequest | FailingRequest) -> bool:
        """Record the facts of a worker's request; return True if they changed.

        Unlike `set_state` it is called when the request arrives, because the response may come much later.
        """

        def update(current: WorkerState) -> WorkerState:
            match request:
                case ProgressRequest():
                    return replace(current, progress=request.progress)
                case FailingRequest():
                    return replace(current, is_failing=True)
            return replace(
                current,
                trained=current.trained or request.trained,
                wait_reason=request.words,
                pauses=request.pauses,
                pauses_in=request.generation if request.pauses else 0,
                pauses_why=request.pauses_why,
            )

        return self._change(request.local_rank, update)

    def _change(self, local_rank: int, change: Callable[[WorkerState], WorkerState]) -> bool:
        """Change the state of a worker that has not exited; return True if it is another one now."""
        for rank, current in self.states.items():
            if current.local_rank == local_rank and current.state != "ended":
                self.states[rank] = updated = change(current)
                return updated != current
        return False

    def mark_leaving(self) -> None:
        """Set the state of all running workers to leaving."""
        for rank, current in self.states.items():
            if current.state != "ended":
                self.states[rank] = replace(current, state="leaving", broken_generation=0, blames=())

    @property
    def was_member(self) -> bool:
        """Tell whether a worker was seen as a member of the run's group."""
        return bool(self._admitted)

    def has_left(self, is_out: Callable[[WorkerState], bool]) -> bool:
        """Tell whether every worker has exited or left its process group."""
        return all(state.state == "ended" or is_out(state) for state in self.states.values())

    def freeze(self) -> None:
        """Suspend all workers with their children; they keep their memory."""
        if not self._is_frozen:
            self._is_frozen = True
            self._suspend(self._processes.values())

    def thaw(self) -> bool:
        """Let frozen workers continue; return False if none was frozen."""
        was_frozen, self._is_frozen = self._is_frozen, False
        frozen, self._frozen = self._frozen, []
        for process in frozen:
            with contextlib.suppress(psutil.Error):
                process.resume()
        for rank, state in self.states.items():
            if was_frozen and state.state == "stopped":
                self.states[rank] = replace(state, state="running")
        return was_frozen

    def _suspend(self, workers: Iterable[psutil.Process]) -> None:
        for process in _process_trees(workers):
            self._frozen.append(process)
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def detect_suspended(self, now: float) -> bool:
        """Detect workers that are suspended by a signal; their connections stay open at first."""
        noticed = False
        for rank, process in self._processes.items():
            if self.states[rank].state in ("ended", "stopped") or not _is_suspended(process):
                self._suspended_since.pop(rank, None)
            elif now - self._suspended_since.setdefault(rank, now) >= _SUSPENDED_S:
                self.states[rank] = replace(self.states[rank], state="stopped")
                noticed = True
        return noticed

    async def launch(self) -> None:
        """Start the supervisor with all workers."""
        config, record = self._config, self._record
        (config.home / "logs").mkdir(exist_ok=True)
        spec = config.spec
        options = spec.options
        limits = messages.QUIET if options.quiet else messages.WorkerLimits(nice=options.nice)
        memory = [size for size in (options.memory_bytes, config.limits.memory_bytes) if size]
        limits = replace(limits, memory_bytes=min(memory, default=None), cpus=config.limits.cpus or None)
        workers = tuple(self._worker(rank) for rank in self.states)
        if config.containers is not None:
            workers = tuple(
                config.containers.wrap(worker, self.start, record.slots[worker.rank].device, limits)
                for worker in workers
            )
            limits = replace(limits, memory_bytes=None)  # the container has this limit
        request = messages.LaunchRequest(
            run=spec.run,
            generation=self.start,
            workers=workers,
            records=str(config.state / "supervisors"),
            limits=limits,
            grace_s=config.settings.runs.stop_grace_s,
            log_bytes=config.settings.runs.log_bytes,
        )
        self._supervisor = await SupervisorClient.start(request, self._on_event)
        self._sleep_inhibitor.enter_context(keep_awake(f"run {spec.run}"))

    async def stop(self, is_urgent: Callable[[], bool], changed: asyncio.Event) -> None:
        """Terminate the workers and wait; ``is_urgent`` may turn true meanwhile to kill them."""
        if self._supervisor is None:
            return
        self.thaw()  # a suspended process cannot exit by itself
        ended = asyncio.ensure_future(self._supervisor.wait())
        hard = is_urgent()
        self._is_terminating = not hard
        self._evicted |= set(self.states)  # a signal that ends them now is ours
        await self._supervisor.stop(hard=hard)
        while not ended.done():
            changed.clear()
            if is_urgent() and not hard:
                hard = True
                await self._supervisor.stop(hard=True)
            waker = asyncio.ensure_future(changed.wait())
            await asyncio.wait({ended, waker}, return_when=asyncio.FIRST_COMPLETED)
            waker.cancel()
        if self._config.containers is not None:
            await self._config.containers.remove_workers(self.start, self.states)
        self._supervisor = None
        self._sleep_inhibitor.close()

    async def stop_evicted(self, is_member: Callable[[WorkerState], bool], changed: asyncio.Event) -> bool:
        """Stop admitted workers that are no longer members; return True if all have been stopped."""
        running = {rank for rank, state in self.states.items() if state.state != "ended"}
        members = {rank for rank in running if is_member(self.states[rank])}
        self._admitted |= members
        evicted = (running - members) & self._admitted
        if self._supervisor is None or not evicted:
            return False
        if evicted == running:
            await self.stop(lambda: True, changed)
            return True
        if newly_evicted := tuple(sorted(evicted - self._evicted)):
            self._evicted |= evicted
            await self._supervisor.kill(newly_evicted)
            if self._config.containers is not None:
                await self._config.containers.remove_workers(self.start, newly_evicted)
        return False

    def _worker(self, rank: int) -> messages.WorkerLaunch:
        config, record = self._config, self._record
        in_container = config.containers is not None
        is_confined = in_container or config.sandbox is not None
        slot = record.slots[rank]
        environment = worker_environment(
            {} if is_confined else child_environment(),
            config.spec,
            record,
            rank,
            start=self.start,
            state_directory=STATE_INSIDE if in_container else str(config.interface),
            # Confined workers do not see the directory, and use the cluster's key-value store.
            local_store="" if is_confined else str(config.home / f"store-{record.generation}"),
            checkpoints="" if is_confined else str(config.home / "checkpoints"),
            data=config.data,
            model_cache=config.model_cache,
            cores=min(filter(None, (config.cores or os.cpu_count() or 1, config.limits.cpus))),
            values=config.values,
            limits=config.limits,
        )
        worker = messages.WorkerLaunch(
            rank=rank,
            local_rank=slot.local_rank,
            command=(str(config.python), *config.spec.program.command),
            directory=str(run_folder(config.home)),
            environment=environment,
            log=str(log_path(config.home, self.start, slot.local_rank)),
        )
        if config.sandbox is None:
            return worker
        return config.sandbox.wrap(worker, self.start, config.python, config.mounted)

    def _on_event(self, event: messages.Event) -> None:
        match event:
            case messages.WorkerStarted():
                with contextlib.suppress(psutil.Error):
                    self._processes[event.rank] = psutil.Process(event.pid)
                    if self._is_frozen:
                        self._suspend([self._processes[event.rank]])
            case messages.WorkerExited():
                is_confined = self._config.containers is not None or self._config.sandbox is not None
                self._on_exit(translate_exit(event) if is_confined else event)
            case messages.SupervisorNote():
                self._report_event(f"run {self._config.spec.run}: {event.text}")
            case messages.AllExited():
                self._on_change()

    def _on_exit(self, event: messages.WorkerExited) -> None:
        current = self.states.get(event.rank)
        if current is None or current.state == "ended":
            return
        self._exit_count += 1
        tail = rewritten_text(event.tail.decode("utf-8", "replace"))[-_TAIL_CHARACTERS:]
        if event.out_of_memory:
            tail += "\nbarnraise: the system killed this worker because memory was exhausted"
        never_ran = event.code is None and event.signal is None
        self.states[event.rank] = replace(
            current,
            state="ended",
            code=-1 if never_ran else (event.code or 0) & 0xFFFFFFFF,
            signal=event.signal or 0,
            tail=tail,
            place=self._exit_count,
        )
        outcome = "killed" if event.signal else "failed" if event.code else "finished"
        metrics.counter(catalogue.WORKER_EXITS, outcome).inc()
        self._note_failure(event.rank)
        self._on_change()

    def _note_failure(self, rank: int) -> None:
        """Keep a failed exit, unless this machine killed a worker that had not failed before."""
        state, is_stopping = self.states[rank], self._is_terminating
        code, signal = state.code, state.signal
        if signal and (is_stopping or rank in self._evicted):
            if not has_failed_by_itself(state.tail):
                return
            code, signal = 1, 0  # as it would have exited
        if state.failed:
            tail = state.tail[-MAX_FAILURE_TAIL:]
            self.failures.append(
                WorkerFailure(rank, state.local_rank, state.start, code, signal, tail, is_stopping)
            )


def _process_trees(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return these processes and their descendants, parents first."""
    trees = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            trees += [process, *process.children(recursive=True)]
    return trees


def _is_suspended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def log_path(home: Path, start: int, local_rank: int) -> Path:
    """Return the log file of a worker."""
    return home / "logs" / f"{start}-{local_rank}.log"


def run_directory(state: Path, run: str) -> Path:
    """Return the directory of a run."""
    return state / "runs" / run


def run_folder(home: Path) -> Path:
    """Return the working folder of the workers in the directory of their run."""
    return home / "folder"


def remove_run(state: Path, run: str) -> None:
    """Remove the directory of a run."""
    remove_tree(run_directory(state, run))


def run_changed_at(home: Path) -> float:
    """Return when the directory of a run, its checkpoints or its output changed last."""
    times = []
    for place in (home, home / "checkpoints", home / "logs"):
        with contextlib.suppress(OSError):
            times.append(place.stat().st_mtime)
    return max(times, default=0.0)
