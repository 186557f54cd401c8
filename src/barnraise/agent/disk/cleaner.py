"""Removes from this machine's disk what no run needs, while the agent runs."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from barnraise.agent.context import AgentContext
from barnraise.agent.disk.clean_plan import (
    CleanChoice,
    StoredRun,
    choose_environments,
    choose_runs,
    lost_sentence,
)
from barnraise.agent.disk.usage import used_bytes
from barnraise.agent.runs.service import RunService
from barnraise.agent.runs.worker_group import run_changed_at, run_directory
from barnraise.agent_client.cluster_requests import CleanRequest, CleanResponse, CleanRow, DiskUse
from barnraise.artifacts import Garbage, find_garbage, remove_garbage, stored_manifests
from barnraise.core.errors import RunError
from barnraise.core.files import remove_tree
from barnraise.core.units import counted
from barnraise.environments.builder import built_environments, remove_environment
from barnraise.history.outcome import end_state

_PAUSE_S = 10.0
_MEASURES = 60  # pauses between two measurements, unless a run ends
_REMOVED = ".removed-"  # prefix of run directories that are being removed


class _Found(NamedTuple):
    """Rows to remove, runs that stay, and the files behind the row of files."""

    rows: list[CleanRow]
    kept: list[CleanRow]
    garbage: Garbage


class Cleaner:
    """Finds and removes old runs, unused files and unused environments of one agent."""

    def __init__(self, context: AgentContext, runs: RunService) -> None:
        self._context = context
        self._runs = runs
        self._homes = context.directory / "runs"
        self._environments = context.directory / "environments"
        self._cleaning = asyncio.Lock()
        self.disk: DiskUse | None = None  # as last measured

    async def watch_disk(self) -> None:
        """Measure the disk use at intervals and after each end of a run, until cancelled."""
        while True:
            ended = self._count_ended()
            self.disk = await asyncio.to_thread(self._measure)
            for _ in range(_MEASURES):
                await asyncio.sleep(_PAUSE_S)
                if self._count_ended() != ended:
                    break

    def _count_ended(self) -> int:
        """Return how many runs have ended and left all their files here."""
        return sum(not self._is_active(run) for run in self._runs.registry.runs)

    async def clean(self, request: CleanRequest) -> CleanResponse:
        """Return what can be removed; remove the rows that the user has agreed to, if they still can be."""
        only = self._runs.registry.find(request.run, exact=True).run if request.run else ""
        if only and self._is_active(only):
            raise RunError(f"run {only} has not ended", hint=f"Stop it first: barnraise stop {only}")
        async with self._cleaning:
            listed_at = time.time()
            candidates = await self._find(only, everything=request.everything)
            if request.agreed is None:
                return CleanResponse(rows=tuple(candidates.rows), kept=tuple(candidates.kept))
            before = await asyncio.to_thread(self._measure)
            agreed = [row for row in candidates.rows if row.key in request.agreed]
            removed = [row for row in agreed if await self._remove(row, candidates.garbage, listed_at)]
            self.disk = after = await asyncio.to_thread(self._measure)
        return CleanResponse(rows=tuple(removed), freed=max(0, before.total - after.total))

    async def _find(self, only: str, *, everything: bool) -> _Found:
        stored = await self._stored_runs()
        runs = choose_runs(list(stored.values()), only=only, everything=everything)
        rows = [await self._run_row(choice, stored[choice.name]) for choice in runs if choice.is_removed]
        kept = [await self._run_row(choice, stored[choice.name]) for choice in runs if not choice.is_removed]
        needed = self._needed_files(runs, only=only)
        garbage = await asyncio.to_thread(find_garbage, self._runs.store, 0, needed)
        if garbage.objects or garbage.manifests or garbage.trees:
            count = counted(len(garbage.objects), "file")
            row = CleanRow(kind="files", name="of no kept run", bytes=garbage.bytes, why=f"{count} in all")
            rows.append(row)
        if not only:
            active = self._active_environments()
            used_at = await asyncio.to_thread(built_environments, self._environments)
            choices = choose_environments(used_at, active, time.time(), everything=everything)
            rows += [await self._environment_row(choice) for choice in choices if choice.is_removed]
        return _Found(rows, kept, garbage)

    async def _run_row(self, choice: CleanChoice, item: StoredRun) -> CleanRow:
        size = await asyncio.to_thread(used_bytes, run_directory(self._context.directory, item.run))
        lost = lost_sentence(item) if choice.is_removed else ""
        return CleanRow(kind="run", name=item.run, bytes=size, why=choice.reason, lost=lost)

    async def _environment_row(self, choice: CleanChoice) -> CleanRow:
        folders = [path for path in self._environments.glob(f"{choice.name}.*") if path.is_dir()]
        size = sum([await asyncio.to_thread(used_bytes, folder) for folder in folders])
        return CleanRow(kind="environment", name=choice.name, bytes=size, why=choice.reason)

    async def _stored_runs(self) -> dict[str, StoredRun]:
        names = await asyncio.to_thread(_listed, self._homes)
        return {name: await self._stored_run(name) for name in names if not name.startswith(_REMOVED)}

    async def _stored_run(self, run: str) -> StoredRun:
        home = run_directory(self._context.directory, run)
        changed_at = await asyncio.to_thread(run_changed_at, home)
        entry = self._runs.registry.runs.get(run)
        if entry is None:  # it is in no list any more, so it cannot be resumed
            return StoredRun(run, run in self._runs.executors, True, 0, changed_at)
        local, signers = self._runs.checkpoints.local, self._runs.checkpoints.signers_of(run)
        held = await asyncio.to_thread(local.held, run, signers)
        step = max((checkpoint.step for checkpoint in held), default=0)
        outcome = entry.record.outcome
        return StoredRun(
            run,
            self._is_active(run),
            outcome is not None and end_state(outcome.code, was_stopped=outcome.is_stop) == "ended",
            step or await asyncio.to_thread(local.sharded, run),
            changed_at,
            entry.spec.resumes,
        )

    def _is_active(self, run: str) -> bool:
        """Tell whether a run needs its files: it has not ended, or its results are being packed."""
        entry = self._runs.registry.runs.get(run)
        return run in self._runs.executors or (entry is not None and not entry.has_ended)

    def _is_continued(self, run: str) -> bool:
        entries = self._runs.registry.runs.values()
        return any(run in entry.spec.resumes and not entry.has_ended for entry in entries)

    def _needed_files(self, chosen: Collection[CleanChoice], *, only: str) -> set[bytes]:
        """Return the manifests that must stay. If one run was named, that is all but its own."""
        removed = {choice.name for choice in chosen if choice.is_removed}
        on_disk = {choice.name for choice in chosen}
        needed: set[bytes] = set(self._runs.kept_for_jobs())
        own: set[bytes] = set()
        for run, entry in self._runs.registry.runs.items():
            report = entry.reports.get(self._context.me.raw)
            files = {*entry.spec.program.manifests, *([report.results] if report is not None else [])}
            if run in removed:
                own |= files
            elif run in on_disk or self._is_active(run):
                needed |= files
        store, grants = self._runs.store, self._runs.checkpoints.grants
        everything = stored_manifests(store)
        granted = {name for name in everything if name in grants}
        return everything - (own - needed - granted) if only else needed | granted

    def _active_environments(self) -> set[str]:
        pythons = [executor.python for executor in self._runs.executors.values()]
        return {
            python.relative_to(self._environments).parts[0].partition(".")[0]
            for python in pythons
            if python.is_relative_to(self._environments)
        }

    async def _remove(self, row: CleanRow, garbage: Garbage, listed_at: float) -> bool:
        """Remove one row; return False if it is needed again since it was listed."""
        if row.kind == "files":
            await asyncio.to_thread(remove_garbage, self._runs.store, garbage)
            return True
        if row.kind == "environment":
            if row.name in self._active_environments():
                return False
            return await asyncio.to_thread(remove_environment, self._environments, row.name, listed_at)
        if self._is_active(row.name) or self._is_continued(row.name):
            return False
        # Renamed in the same moment as checked, so that a run that resumes it finds all of it or nothing.
        target = self._homes / f"{_REMOVED}{secrets.token_hex(8)}"
        os.rename(run_directory(self._context.directory, row.name), target)
        await asyncio.to_thread(remove_tree, target)
        return True

    def _measure(self) -> DiskUse:
        counted_files: set[tuple[int, int]] = set()
        files = used_bytes(self._runs.store.directory, counted_files)
        runs = used_bytes(self._homes, counted_files)
        return DiskUse(runs, files, used_bytes(self._environments, counted_files))


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
