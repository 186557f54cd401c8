"""Fetches checkpoints, and the files that a run was started with, from other machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from barnraise.agent.artifact_service import ArtifactService, TransferProgress
from barnraise.agent.checkpoints.grants import ReadGrants
from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.agent.context import AgentContext
from barnraise.agent.runs.messages import FilesResponse
from barnraise.agent.runs.registry import RunEntry
from barnraise.artifacts import data_limits, folder_limits
from barnraise.core.errors import BarnraiseError, CheckpointError, RunError
from barnraise.identity import NodeId

_log = logging.getLogger(__name__)


class CheckpointDirectory(Protocol):
    """The checkpoint service, as far as a fetch needs it."""

    def signers_of(self, run: str) -> frozenset[bytes]:
        """Return the nodes whose signature on a checkpoint of this run is accepted."""

    async def holders_of(self, run: str, step: int) -> list[NodeId]:
        """Return the connected machines that have this checkpoint."""

    async def request_files(self, node: NodeId, run: str, step: int) -> FilesResponse:
        """Ask a machine for read access to a checkpoint; step 0: to the files of the run."""


@dataclass
class CheckpointTransfer:
    """The fetch of one checkpoint, and its progress."""

    task: asyncio.Task[None]
    done_bytes: int = 0
    all_bytes: int = 0

    def update(self, progress: TransferProgress) -> None:
        """Record the progress of the transfer."""
        self.done_bytes, self.all_bytes = progress.done_bytes, progress.all_bytes


class CheckpointFetcher:
    """All fetches of this machine; one checkpoint is fetched once at a time."""

    def __init__(
        self,
        context: AgentContext,
        directory: CheckpointDirectory,
        artifacts: ArtifactService,
        local: LocalCheckpoints,
        grants: ReadGrants,
    ) -> None:
        self._context = context
        self._directory = directory
        self._artifacts = artifacts
        self._local = local
        self._grants = grants
        self._transfers: dict[tuple[str, int], CheckpointTransfer] = {}

    def start(self, run: str, step: int, holders: Sequence[NodeId] = ()) -> CheckpointTransfer:
        """Start a fetch, or return the running one; without ``holders`` all connected machines are asked."""
        for key in [key for key, transfer in self._transfers.items() if transfer.task.done()]:
            del self._transfers[key]
        transfer = self._transfers.get((run, step))
        if transfer is None:
            task = asyncio.get_running_loop().create_task(self.fetch(run, step, holders))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            transfer = self._transfers[run, step] = CheckpointTransfer(task)
        return transfer

    async def wait(self, run: str, step: int, wait_s: float) -> CheckpointTransfer:
        """Start a fetch or join the running one, and wait; raise its error if the fetch failed."""
        transfer = self._transfers.get((run, step)) or self.start(run, step)
        await asyncio.wait({transfer.task}, timeout=wait_s)
        if transfer.task.done():
            self._transfers.pop((run, step), None)
            transfer.task.result()
        return transfer

    async def stop(self) -> None:
        """Cancel all running fetches."""
        tasks = [transfer.task for transfer in self._transfers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def fetch(self, run: str, step: int, holders: Sequence[NodeId] = ()) -> None:
        """Fetch a checkpoint unless it is here and whole; raise CheckpointError if no machine can send it."""
        signers = self._directory.signers_of(run)
        if await asyncio.to_thread(self._local.is_whole, run, step, signers):
            return
        if not holders:
            holders = await self._directory.holders_of(run, step)
        why = "no connected machine has it"
        for node in [node for node in holders if node != self._context.me]:
            try:
                await self._fetch_from(node, run, step, signers)
            except (BarnraiseError, OSError) as error:
                why = error.message if isinstance(error, BarnraiseError) else str(error)
                _log.warning("cannot fetch a checkpoint from %s: %s", self._context.name_of(node), why)
            else:
                return
        raise CheckpointError(
            f"cannot fetch the checkpoint of step {step} of run {run}: {why}",
            hint="Switch on the machines that saved it: barnraise status",
        )

    async def fetch_files(self, node: NodeId, entry: RunEntry, manifests: Sequence[bytes]) -> None:
        """Fetch files that a run was started with from one machine."""
        await self._request_access(node, entry.run, 0)
        settings = self._context.settings
        for manifest in manifests:
            limits = (
                folder_limits(settings) if manifest == entry.spec.program.folder else data_limits(settings)
            )
            await self._artifacts.fetch(manifest, [node], [self._context.me], limits)

    async def _fetch_from(self, node: NodeId, run: str, step: int, signers: Collection[bytes]) -> None:
        manifest = await self._request_access(node, run, step)
        transfer = self._transfers.get((run, step))
        progress = transfer.update if transfer is not None else lambda _: None
        limits = data_limits(self._context.settings)
        # The sender may name a manifest that this machine has for another reason.
        was_here = await asyncio.to_thread(self._local.has_all, manifest)
        files = await self._artifacts.fetch(manifest, [node], [self._context.me], limits, progress)
        try:
            await asyncio.to_thread(self._local.keep, files, run, step, signers)
        finally:
            if manifest not in self._grants and not was_here:  # the checkpoint folder has its own copy
                await asyncio.to_thread(self._local.withdraw, manifest)

    async def _request_access(self, node: NodeId, run: str, step: int) -> bytes:
        response = await self._directory.request_files(node, run, step)
        if not response.manifest:
            raise RunError(
                f"{self._context.name_of(node)} does not send it: {response.words}", hint="Try others."
            )
        return response.manifest
