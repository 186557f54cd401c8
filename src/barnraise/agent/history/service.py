"""Keeper of the records of runs: writes this machine's logs, and serves all logs to local processes.

All disk work runs in one thread, in order. A log stays after the run has ended and its folder is cleaned.
The oldest runs are removed when all records together exceed the setting ``runs.history_bytes``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from barnraise.agent.context import AgentContext
from barnraise.agent.history.copier import HistoryCopier
from barnraise.agent.history.disk_thread import DiskThread
from barnraise.agent.history.kept_logs import kept_logs, remove_drafts, remove_oldest
from barnraise.agent.history.machine_sampler import MachineSampler
from barnraise.agent.history.removals import RemovedRecords
from barnraise.agent.history.run_events import (
    change_entries,
    end_entry,
    machine_entry,
    start_entries,
    with_resumes,
)
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent_client.history.requests import (
    MOST_LOGS,
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
    HistoryRemoveRequest,
    RecordRequest,
)
from barnraise.core.errors import ProtocolError, RunError
from barnraise.core.flow.rate_limit import RateLimit
from barnraise.history.entries import (
    ChangeKind,
    CheckpointSaved,
    Entry,
    GroupStart,
    LogHead,
    MachineSample,
    MembershipChange,
    NoteEntry,
    OwnValues,
    PlanAdopted,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.log_file import RunLogWriter, has_end, log_path, logs_of, read_head, read_part
from barnraise.history.log_format import decode_frames
from barnraise.history.logs.retention import removal
from barnraise.identity import NodeId
from barnraise.runs.record import RunRecord
from barnraise.topology import Machine

_SYNC_S = 10.0
_MOST_UNWRITTEN = 1000  # entries of one run, while the disk is full
_BYTES_PER_S, _BURST = 1 << 20, 8 << 20  # of the workers of one run
_FROM_WORKERS = (
    GroupStart,
    MachineSample,
    NoteEntry,
    OwnValues,
    PlanAdopted,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)

_log = logging.getLogger(__name__)


class HistoryService:
    """Logs of this machine's runs, one for each, and what they are asked for."""

    def __init__(self, context: AgentContext, registry: RunRegistry) -> None:
        self._context, self._registry = context, registry
        self._loop = asyncio.get_running_loop()
        self._disk = DiskThread()
        self.removals = RemovedRecords(context.storage)
        self.copier = HistoryCopier(context, self._disk, self.removals, self._unfinished_runs)
        self._writers: dict[str, RunLogWriter] = {}  # used by the thread only
        self._unwritten: dict[str, list[Entry]] = {}  # by the thread, too: what a full disk has not taken
        self._known: dict[str, RunRecord] = {}  # newest record of each active run
        self._changes: dict[str, dict[bytes, ChangeKind]] = {}  # newest of each machine of these runs
        self._limit = RateLimit(_BYTES_PER_S, _BURST, max_sources=1024)
        self.sampler = MachineSampler(context, self._active_runs, self._known, self.record, time.time)

    def jobs(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Return the background tasks that the agent has to run."""
        return self.sampler.run, self._sync, self.copier.run

    async def stop(self) -> None:
        """Close all logs, after all of them are on the disk."""
        await self._disk.run(self._close_all)
        self._disk.close()

    # what happens to runs

    def on_record(self, entry: RunEntry) -> None:
        """Write what a new version of a run's record says."""
        me, run, record = self._context.me.raw, entry.run, entry.record
        if me not in entry.spec.nodes:
            return
        old = self._known.get(run)
        has_ended = entry.has_ended and not record.provisional  # the majority may overrule a provisional end
        if old is None:
            if has_ended:
                self._disk.submit(lambda: self._add_end(entry))
                return
            entries = start_entries(entry.spec, self._name_of, self._machine_of)
        else:
            present = {member.node for member in self._context.member.view.members}
            entries = change_entries(old, record, entry.reports, present, time.time())
            changes = self._changes.setdefault(run, {})
            paused = [node for node, change in changes.items() if change == "paused"]
            entries = with_resumes(entries, paused)
            changes.update({item.node: item.change for item in entries if isinstance(item, MembershipChange)})
            known = set(old.nodes) | set(entry.spec.nodes)
            for node in [node for node in record.nodes if node not in known]:
                entries.append(machine_entry(node, self._name_of(node), self._machine_of(node)))
        self._known[run] = record
        self.record(run, entries)
        if has_ended:
            del self._known[run]
            self._changes.pop(run, None)
            self._disk.submit(lambda: self._close(run))

    def on_checkpoint(self, run: str, step: int, size: int) -> None:
        """Write that this machine has a checkpoint of one of its runs."""
        if run in self._known:
            self.record(run, [CheckpointSaved(time.time(), step, self._context.me.raw, size)])
            self._disk.submit(lambda: self._sync_log(run))

    def record(self, run: str, entries: Sequence[Entry]) -> None:
        """Append entries to this machine's log of an active run, in the background.

        A full disk gets them again later. What comes after the end of the run is not written.
        """
        if entries and run in self._known:
            self._disk.submit(lambda: self._append_or_keep(run, entries))

    # requests of local processes

    async def receive(self, request: RecordRequest) -> None:
        """Append what a worker of this machine reports; raise BarnraiseError if it may not."""
        entry = self._registry.find(request.run, exact=True)
        if entry.run not in self._known:
            raise RunError(f"run {entry.run} does not train on this machine")
        if self._limit.take(entry.run, self._loop.time(), len(request.frames)):
            raise RunError(f"run {entry.run} writes too much into its record", hint="Log fewer values.")
        me = self._context.me.raw

        def append() -> None:
            decoded = decode_frames(request.frames)
            if decoded.size < len(request.frames):
                raise ProtocolError("a worker sent an incomplete frame of its record")
            for item in decoded.entries:
                if not isinstance(item, _FROM_WORKERS) or (
                    isinstance(item, MachineSample) and item.node != me
                ):
                    raise ProtocolError(f"a worker may not write a {type(item).__name__} into a record")
            self._append(entry.run, decoded.entries)

        await self._disk.run(append)

    async def list(self, request: HistoryListRequest) -> HistoryListResponse:
        """Return the logs that this machine keeps."""
        logs = await self._disk.run(lambda: kept_logs(self._context.directory))
        wanted = [log for log in logs if log.run.startswith(request.run)]
        if request.after:
            names = [log.run for log in wanted]
            last = len(names) - names[::-1].index(request.after) if request.after in names else 0
            wanted = wanted[last:]
        if len(wanted) <= MOST_LOGS:
            return HistoryListResponse(tuple(wanted))
        cut = wanted[MOST_LOGS].run  # a run is never divided
        page = [log for log in wanted[:MOST_LOGS] if log.run != cut] or wanted[:MOST_LOGS]
        return HistoryListResponse(tuple(page), has_more=True)

    async def read(self, request: HistoryPartRequest) -> HistoryPartResponse:
        """Return a part of a log; raise RunError if it is not here."""
        path = logs_of(self._context.directory, request.run).get(request.node)
        if path is None:
            raise RunError(f"this machine keeps no record of run {request.run}", hint="Run: barnraise runs")
        part = await self._disk.run(lambda: read_part(path, request.identity, request.offset))
        return HistoryPartResponse(*part)

    async def remove(self, request: HistoryRemoveRequest) -> None:
        """Remove the records of runs on all machines of owners; raise RunError if one has not ended."""
        logs = await self._disk.run(lambda: kept_logs(self._context.directory))
        unfinished = self._unfinished_runs()
        for run in request.runs:
            entry = self._registry.runs.get(run)
            if run in unfinished or (entry is not None and not entry.has_ended):
                raise RunError(f"run {run} has not ended", hint=f"Stop it first: barnraise stop {run}")
            if run not in {log.run for log in logs}:
                raise RunError(f"this machine keeps no record of run {run}", hint="Run: barnraise runs")
        made_at = await self._disk.run(lambda: _made_at(self._context.directory, request.runs))
        self.removals.add(removal(run, time.time(), made_at[run]) for run in request.runs)
        await self.copier.remove_named()

    # the thread

    def _unfinished_runs(self) -> Collection[str]:
        return {*self._writers, *self._known}

    def _active_runs(self) -> Sequence[str]:
        return [run for run, record in self._known.items() if record.phase == "running"]

    def _append_or_keep(self, run: str, entries: Sequence[Entry]) -> None:
        """Append entries after those that a full disk has not taken; keep them if it takes none."""
        waiting = [*self._unwritten.pop(run, ()), *entries]
        try:
            self._append(run, waiting)
        except OSError:
            self._unwritten[run] = waiting[-_MOST_UNWRITTEN:]
            raise

    def _append(self, run: str, entries: Sequence[Entry]) -> None:
        writer = self._writers.get(run)
        if writer is None:
            me, cluster = self._context.me.raw, self._context.log.cluster
            head = LogHead(run, me, "agent", bytes(16), time.time(), cluster=cluster)
            writer = RunLogWriter(log_path(self._context.directory, run, me), head)
            self._writers[run] = writer
        writer.append(entries)

    def _add_end(self, entry: RunEntry) -> None:
        """Append the end of a run that the agent was killed before writing."""
        path = log_path(self._context.directory, entry.run, self._context.me.raw)
        if entry.record.outcome is not None and path.exists() and not has_end(path):
            self._append_or_keep(entry.run, [end_entry(entry.record.outcome, path.stat().st_mtime)])
            self._close(entry.run)

    def _sync_log(self, run: str) -> None:
        writer = self._writers.get(run)
        if writer is not None:
            writer.sync()

    def _close(self, run: str) -> None:
        """Close the log of a run, unless a part of it is still to be written."""
        if run not in self._unwritten and (writer := self._writers.pop(run, None)) is not None:
            writer.close()

    def _write_again(self) -> None:
        """Write what a full disk has not taken."""
        for run in list(self._unwritten):
            self._append_or_keep(run, ())
            if run not in self._known:
                self._close(run)

    def _close_all(self) -> None:
        with suppress(OSError):  # the disk is still full
            self._write_again()
        self._unwritten.clear()
        for run in list(self._writers):
            self._close(run)

    async def _sync(self) -> None:
        """Write the logs to the disk at intervals, and remove the oldest runs."""

        def sync() -> None:
            limit = self._context.settings.runs.history_bytes
            for run in remove_oldest(self._context.directory, limit, self._unfinished_runs()):
                self.copier.forget(run)
            self._write_again()
            for writer in self._writers.values():
                writer.sync()

        self._disk.submit(lambda: remove_drafts(self._context.directory))
        while True:
            await asyncio.sleep(_SYNC_S)
            try:
                await self._disk.run(sync)
                await self.copier.remove_named()  # runs that had not ended then
            except OSError as error:
                _log.error("the records of runs cannot be written to the disk: %s", error)

    def _name_of(self, node: bytes) -> str:
        return self._context.name_of(NodeId(node))

    def _machine_of(self, node: bytes) -> Machine | None:
        return self._context.machine_of(NodeId(node))


def _made_at(state: Path, runs: Iterable[str]) -> dict[str, list[float]]:
    """Return when the logs of each run were made."""
    return {
        run: [head.at for path in logs_of(state, run).values() if (head := read_head(path)) is not None]
        for run in runs
    }
