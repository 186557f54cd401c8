"""Fetches checkpoints, and the files that a run was started with, from other machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from barnraise.agent.artifact_service import ArtifactService, TransferProgress
from barnraise.agent.checkpoints.grants import ReadGrants
from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.agent.context import AgentContext
from barnraise.agent.runs.messages import FilesResponse
from barnraise.agent.runs.registry import RunEntry
from barnraise.artifacts import data_limits, folder_limits
from barnraise.core.errors import BarnraiseError, CheckpointError, RunError
from barnraise.identity import NodeId
from barnraise.runs.checkpoint_manifest import FoundCheckpoint, plan_fetch

_Wanted = tuple[str, int, frozenset[int]]  # run, step, and parts; no parts for all

_log = logging.getLogger(__name__)


class CheckpointDirectory(Protocol):
    """The checkpoint service, as far as a fetch needs it."""

    def signers_of(self, run: str) -> frozenset[bytes]:
        """Return the nodes whose signature on a checkpoint of this run is accepted."""

    async def find(
        self, run: str, step: int, only: Sequence[NodeId] = ()
    ) -> FoundCheckpoint[NodeId] | None:
        """Return the newest checkpoint of this step that connected machines have together, or None.

        ``only``: what these machines have of it, also if that is not all.
        """

    async def request_files(
        self, node: NodeId, run: str, step: int, parts: Collection[int] = ()
    ) -> FilesResponse:
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
    """All fetches of this machine; one checkpoint, or one choice of its parts, is fetched once at a time."""

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
        self._transfers: dict[_Wanted, CheckpointTransfer] = {}
        # By run and step, because parts of one checkpoint share files of the store.
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    def start(
        self, run: str, step: int, parts: Collection[int] = (), holders: Sequence[NodeId] = ()
    ) -> CheckpointTransfer:
        """Start a fetch, or return the running one; without ``holders`` all connected machines are asked.

        ``parts``: the ones that are wanted of a checkpoint in parts; empty for all.
        """
        for key in [key for key, transfer in self._transfers.items() if transfer.task.done()]:
            del self._transfers[key]
        wanted = run, step, frozenset(parts)
        transfer = self._transfers.get(wanted)
        if transfer is None:
            task = asyncio.get_running_loop().create_task(self.fetch(run, step, holders, parts))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            transfer = self._transfers[wanted] = CheckpointTransfer(task)
        return transfer

    async def wait(
        self, run: str, step: int, wait_s: float, parts: Collection[int] = ()
    ) -> CheckpointTransfer:
        """Start a fetch or join the running one, and wait; raise its error if the fetch failed."""
        wanted = run, step, frozenset(parts)
        transfer = self._transfers.get(wanted) or self.start(run, step, parts)
        await asyncio.wait({transfer.task}, timeout=wait_s)
        if transfer.task.done():
            self._transfers.pop(wanted, None)
            transfer.task.result()
        return transfer

    async def stop(self) -> None:
        """Cancel all running fetches."""
        tasks = [transfer.task for transfer in self._transfers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def fetch(
        self, run: str, step: int, holders: Sequence[NodeId] = (), parts: Collection[int] = ()
    ) -> None:
        """Fetch a checkpoint, or some of its parts, unless they are here and whole.

        ``holders``: only these machines are asked. Raise CheckpointError if no machine can send it.
        """
        signers = self._directory.signers_of(run)
        if not parts and await asyncio.to_thread(self._local.is_whole, run, step, signers):
            return
        # Without parts the one that holds it is known, and it has all.
        checkpoint = await self._directory.find(run, step, holders) if parts or not holders else None
        if checkpoint is not None and checkpoint.held.count:
            await self._fetch_parts(checkpoint, parts, signers)
            return
        nodes = holders or (list(checkpoint.holders) if checkpoint is not None else [])
        why = "no connected machine has it"
        for node in [node for node in nodes if node != self._context.me]:
            try:
                await self._fetch_from(node, run, step, signers, (run, step, frozenset(parts)))
            except (BarnraiseError, OSError) as error:
                why = error.message if isinstance(error, BarnraiseError) else str(error)
                _log.warning("cannot fetch a checkpoint from %s: %s", self._context.name_of(node), why)
            else:
                return
        raise _unreachable(run, step, why)

    async def _fetch_parts(
        self,
        checkpoint: FoundCheckpoint[NodeId],
        wanted: Collection[int],
        signers: Collection[bytes],
    ) -> None:
        """Fetch parts of a checkpoint, each from a machine that has it."""
        held, me = checkpoint.held, self._context.me
        every = frozenset(part for parts in checkpoint.holders.values() for part in parts)
        missing = frozenset(wanted) or every
        holders = {node: parts for node, parts in checkpoint.holders.items() if node != me}
        why = "no connected machine has all of its parts"
        key = held.run, held.step, frozenset(wanted)
        lock = self._locks.setdefault((held.run, held.step), asyncio.Lock())
        while True:
            async with lock:
                missing = await asyncio.to_thread(self._local.missing_parts, held, missing, signers)
                if not missing:
                    return
                plan = plan_fetch(missing, holders)
                if plan is None:
                    raise _unreachable(held.run, held.step, why)
                node, parts = plan
                del holders[node]  # it sends all that it can at once
                try:
                    await self._fetch_from(node, held.run, held.step, signers, key, parts, held.generation)
                except (BarnraiseError, OSError) as error:
                    why = error.message if isinstance(error, BarnraiseError) else str(error)
                    name = self._context.name_of(node)
                    _log.warning("cannot fetch parts of a checkpoint from %s: %s", name, why)

    async def fetch_files(self, node: NodeId, entry: RunEntry, manifests: Sequence[bytes]) -> None:
        """Fetch files that a run was started with from one machine."""
        await self._request_access(node, entry.run, 0)
        settings = self._context.settings
        for manifest in manifests:
            limits = (
                folder_limits(settings) if manifest == entry.spec.program.folder else data_limits(settings)
            )
            await self._artifacts.fetch(manifest, [node], [self._context.me], limits)

    async def _fetch_from(
        self,
        node: NodeId,
        run: str,
        step: int,
        signers: Collection[bytes],
        key: _Wanted,
        parts: Collection[int] = (),
        generation: int | None = None,
    ) -> None:
        manifest = await self._request_access(node, run, step, parts)
        transfer = self._transfers.get(key)
        progress = transfer.update if transfer is not None else lambda _: None
        limits = data_limits(self._context.settings)
        # The sender may name a manifest that this machine has for another reason.
        was_here = await asyncio.to_thread(self._local.has_all, manifest)
        files = await self._artifacts.fetch(manifest, [node], [self._context.me], limits, progress)
        try:
            await asyncio.to_thread(self._local.keep, files, run, step, signers, generation)
        finally:
            if manifest not in self._grants and not was_here:  # the checkpoint folder has its own copy
                await asyncio.to_thread(self._local.withdraw, manifest)

    async def _request_access(
        self, node: NodeId, run: str, step: int, parts: Collection[int] = ()
    ) -> bytes:
        response = await self._directory.request_files(node, run, step, parts)
        if not response.manifest:
            raise RunError(
                f"{self._context.name_of(node)} does not send it: {response.words}", hint="Try others."
            )
        return response.manifest


def _unreachable(run: str, step: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot fetch the checkpoint of step {step} of run {run}: {why}",
        hint="Switch on the machines that saved it: barnraise status",
    )
