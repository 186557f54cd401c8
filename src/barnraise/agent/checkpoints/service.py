"""Checkpoints across machines: signed here, found on other machines, fetched, and copied.

A worker saves to the disk of its own machine. The agent signs the checkpoint, tells other agents what is
there, and grants them read access. `CheckpointFetcher` and `CheckpointReplicator` move the bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from barnraise.agent.artifact_service import ArtifactService
from barnraise.agent.checkpoints.fetch import CheckpointFetcher
from barnraise.agent.checkpoints.grants import ReadGrants
from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.agent.context import AgentContext
from barnraise.agent.pending_calls import PendingCalls
from barnraise.agent.runs.consent import has_agreed
from barnraise.agent.runs.messages import (
    CheckpointAnswer,
    CheckpointRequest,
    CopyOffer,
    CopyResult,
    FilesRequest,
    FilesResponse,
    HeldCheckpointsRequest,
    HeldCheckpointsResponse,
    encode,
)
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent.runs.worker_group import run_directory, run_folder
from barnraise.agent_client.run_requests import (
    CheckpointQuestion,
    CheckpointTold,
    FetchCheckpointRequest,
    FetchCheckpointResponse,
    NewestCheckpointRequest,
    NewestCheckpointResponse,
    SignersRequest,
    SignersResponse,
    SignRequest,
    SignResponse,
)
from barnraise.artifacts import ArtifactStore
from barnraise.core.errors import BarnraiseError, RunError
from barnraise.identity import NodeId
from barnraise.runs.checkpoint_manifest import (
    KEPT,
    FoundCheckpoint,
    HeldCheckpoint,
    allowed_signers,
    find_checkpoints,
    newest_checkpoint,
    sign,
)

_SURVEY_S = 5.0
_GRANT_S = 600.0  # the holder hashes the checkpoint first
_COPY_S = 4 * 3600.0
_MAX_REPLYING = 8  # requests of one machine

_log = logging.getLogger(__name__)


class LocatedCheckpoint(NamedTuple):
    """A checkpoint, and the connected machines that have it; this machine comes first.

    Of a checkpoint in parts, each machine has some, and ``held`` names all.
    """

    held: HeldCheckpoint
    holders: Sequence[NodeId]


class ShardedCheckpoint(NamedTuple):
    """The newest sharded checkpoint of a run that has no other, and the machines that have shards."""

    step: int
    holders: Sequence[NodeId]


class CheckpointService:
    """Answers questions about checkpoints: of workers on this machine and of other agents.

    ``on_files`` is called when other machines gain or lose read access to the files of a run.
    """

    def __init__(
        self,
        context: AgentContext,
        registry: RunRegistry,
        artifacts: ArtifactService,
        store: ArtifactStore,
        on_files: Callable[[str], None],
    ) -> None:
        self._context = context
        self._registry = registry
        self.local = LocalCheckpoints(context.directory / "runs", store, context.key)
        self.grants = ReadGrants(self.local, artifacts, on_files)
        self.fetcher = CheckpointFetcher(context, self, artifacts, self.local, self.grants)
        self._calls = PendingCalls(context)
        self._replying: Counter[NodeId] = Counter()
        self._copying = asyncio.Lock()  # copies are fetched one at a time
        # Called with run, step and bytes of each checkpoint that this machine has from now on.
        self.on_saved: Callable[[str, int, int], None] = lambda run, step, size: None

    # requests of processes on this machine

    async def answer(self, request: CheckpointQuestion) -> CheckpointTold:
        """Answer a request of a process on this machine."""
        match request:
            case SignRequest():
                return self._sign(request)
            case SignersRequest():
                return SignersResponse(tuple(self.signers_of(request.run)))
            case NewestCheckpointRequest():
                entry = self._registry.find(request.run)
                runs = (entry.run, *(entry.spec.resumes if request.earlier else ()))
                responses = await self.survey(runs)
                absent = self._absent(request.awaiting, responses)
                located = _newest_of(responses, runs, request.passing_over)
                if located is None:
                    return NewestCheckpointResponse(absent=absent)
                names = tuple(self._context.name_of(node) for node in located.holders)
                if isinstance(located, ShardedCheckpoint):
                    return NewestCheckpointResponse(sharded=located.step, machines=names, absent=absent)
                held = located.held
                return NewestCheckpointResponse(
                    held.run,
                    held.step,
                    held.agreed,
                    names,
                    absent=absent,
                    generation=held.generation,
                    parts=held.parts,
                )
            case FetchCheckpointRequest():
                return await self._fetch(request)

    def _sign(self, request: SignRequest) -> SignResponse:
        """Sign for a member of the current group; an evicted worker has nothing to save."""
        entry = self._registry.runs.get(request.run)
        key = (self._context.me.raw, request.local_rank, request.start)
        if entry is None or key not in {slot.key for slot in entry.record.slots}:
            raise RunError(
                f"only workers of run {request.run} can have its checkpoints signed",
                hint="Save from a worker of the run.",
            )
        seal = sign(self._context.key, entry.run, request.step, request.fingerprint)
        self.on_saved(entry.run, request.step, self.local.size(entry.run, request.step))
        return SignResponse(seal.node, seal.signature)

    def settle(self, run: str, *, counts: bool) -> None:
        """Keep or drop the checkpoints that were saved without a quorum, now that there is one."""
        self.local.settle(run, self.signers_of(run), counts=counts)

    async def newest(
        self, runs: Sequence[str], passing_over: Collection[tuple[str, int]] = ()
    ) -> LocatedCheckpoint | ShardedCheckpoint | None:
        """Return the newest checkpoint of these runs on any connected machine, or None."""
        return _newest_of(await self.survey(runs), runs, passing_over)

    def _absent(self, awaited: Collection[bytes], answered: Collection[NodeId]) -> tuple[str, ...]:
        """Return the names of awaited machines that are still in the cluster and did not answer."""
        nodes = [node for node in map(NodeId, awaited) if node not in answered]
        return tuple(
            self._context.name_of(node) for node in nodes if self._context.log.role(node) is not None
        )

    async def ensure_files(self, entry: RunEntry) -> None:
        """Fetch the files that a run was started with; raise RunError if no connected machine has all."""
        wanted = entry.spec.program.manifests
        if await asyncio.to_thread(self.local.has_files, wanted):
            return
        responses = await self.survey([entry.run], files=True)
        holders = [node for node, response in responses.items() if response.files]
        for node in [node for node in holders if node != self._context.me]:
            try:
                await self.fetcher.fetch_files(node, entry, wanted)
            except BarnraiseError as error:
                _log.warning(
                    "cannot fetch the files of run %s from %s: %s", entry.run, node.short, error.message
                )
            else:
                return
        starter = self._context.name_of(NodeId(entry.spec.by))
        raise RunError(
            f"no connected machine has the files of run {entry.run}",
            hint=f"Switch on {starter}, where it was started, or a machine that took part.",
        )

    async def _fetch(self, request: FetchCheckpointRequest) -> FetchCheckpointResponse:
        entries = self._registry.runs.values()
        runs = {run for entry in entries for run in (entry.run, *entry.spec.resumes)}
        if request.run not in runs:
            raise RunError(f"no run is called {request.run!r}", hint="See all with: barnraise ps")
        transfer = await self.fetcher.wait(request.run, request.step, request.wait_s, request.parts)
        return FetchCheckpointResponse(transfer.task.done(), transfer.done_bytes, transfer.all_bytes)

    async def offer(self, node: NodeId, run: str, step: int, parts: Collection[int] = ()) -> str:
        """Offer a copy to a machine and wait until it has it; return why it refused, or an empty string.

        ``parts``: those to copy of a checkpoint in parts.
        """
        make = partial(CopyOffer, run=run, step=step, parts=tuple(parts))
        response = await self._calls.ask(node, make, CopyResult, _COPY_S)
        self.grants.revoke(node, run)
        return response.words

    # messages of other agents

    def received(self, node: NodeId, message: CheckpointRequest | CheckpointAnswer) -> None:
        """Handle a message of another agent; a machine with too many open requests is ignored."""
        if isinstance(message, CheckpointAnswer):
            self._calls.resolve(node, message)
        elif self._replying[node] < _MAX_REPLYING:
            self._replying[node] += 1
            self._context.spawn(self._reply(node, message))

    def link_down(self, node: NodeId) -> None:
        """Fail the requests to a machine whose connection is lost."""
        self._calls.link_down(node)

    async def stop(self) -> None:
        """Cancel all running fetches."""
        await self.fetcher.stop()

    async def _reply(self, node: NodeId, request: CheckpointRequest) -> None:
        response: CheckpointAnswer
        try:
            match request:
                case HeldCheckpointsRequest():
                    response = await self._reply_held(node, request)
                case FilesRequest():
                    response = FilesResponse(request.serial, await self._grant(node, request))
                case CopyOffer():
                    await self._take_copy(node, request)
                    response = CopyResult(request.serial)
        except (BarnraiseError, OSError) as error:
            words = (error.message if isinstance(error, BarnraiseError) else str(error))[:1000] or "it failed"
            if isinstance(request, HeldCheckpointsRequest):
                response = HeldCheckpointsResponse(request.serial, ())
            elif isinstance(request, FilesRequest):
                response = FilesResponse(request.serial, b"", words)
            else:
                response = CopyResult(request.serial, words)
        finally:
            self._replying[node] -= 1
        self._context.send_bulk(node, encode(response))

    async def _reply_held(self, node: NodeId, request: HeldCheckpointsRequest) -> HeldCheckpointsResponse:
        runs = [run for run in request.runs if self._may_read(node, run)]
        held = await self._held(runs)
        entry = self._registry.runs.get(request.runs[0])
        files = request.files and entry is not None and self._context.log.role(node) == "owner"
        if files and entry is not None:
            files = await asyncio.to_thread(self.local.has_files, entry.spec.program.manifests)
        return HeldCheckpointsResponse(request.serial, held, files, await self._sharded(runs))

    async def _grant(self, node: NodeId, request: FilesRequest) -> bytes:
        if request.step:
            if not self._may_read(node, request.run):
                raise RunError("a guest cannot read checkpoints of a run that it has no part in")
            signers = self.signers_of(request.run)
            return await self.grants.grant(node, request.run, request.step, signers, request.parts)
        entry = self._registry.runs.get(request.run)
        if entry is None or self._context.log.role(node) != "owner":
            raise RunError("the files of a run are for owners and its participants only")
        self.grants.grant_files(node, entry.run, entry.spec.program.manifests)
        return entry.spec.program.folder

    async def _take_copy(self, node: NodeId, offer: CopyOffer) -> None:
        """Fetch a checkpoint that another owner's machine offers, and the folder of its run."""
        entry = self._registry.runs.get(offer.run)
        if entry is None or self._context.log.role(node) != "owner":
            raise RunError(f"this machine keeps no copy of run {offer.run}", hint="Ask another machine.")
        home = run_directory(self._context.directory, entry.run)
        took_part = has_agreed(home) or (entry.has_ended and run_folder(home).exists())
        if self._context.log.role(self._context.me) != "owner" and not took_part:
            raise RunError(
                f"this machine's user has not agreed to run {offer.run}", hint="Ask another machine."
            )
        async with self._copying:
            # The folder first, so that this machine could resume the run alone once it has the checkpoint.
            if not await asyncio.to_thread(self.local.has_files, [entry.spec.program.folder]):
                try:
                    await self.fetcher.fetch_files(node, entry, [entry.spec.program.folder])
                except BarnraiseError as error:
                    _log.warning("cannot fetch the folder of run %s: %s", entry.run, error.message)
            await asyncio.shield(self.fetcher.start(offer.run, offer.step, offer.parts, [node]).task)
        self.on_saved(entry.run, offer.step, self.local.size(entry.run, offer.step))

    # requests to other agents

    async def survey(
        self, runs: Sequence[str], *, files: bool = False
    ) -> dict[NodeId, HeldCheckpointsResponse]:
        """Return what this machine and every connected machine holds of these runs."""

        async def ask(node: NodeId) -> tuple[NodeId, HeldCheckpointsResponse] | None:
            make = partial(HeldCheckpointsRequest, runs=tuple(runs), files=files)
            try:
                return node, await self._calls.ask(node, make, HeldCheckpointsResponse, _SURVEY_S)
            except BarnraiseError as error:
                _log.info("cannot ask %s which checkpoints it holds: %s", node.short, error.message)
                return None

        nodes = [node for node in self._context.linked_nodes() if self._may_read(node, runs[0])]
        own = HeldCheckpointsResponse(0, await self._held(runs), False, await self._sharded(runs))
        answered = [answer for answer in await asyncio.gather(*map(ask, nodes)) if answer is not None]
        return {self._context.me: own} | dict(answered)

    async def find(
        self, run: str, step: int, only: Sequence[NodeId] = ()
    ) -> FoundCheckpoint[NodeId] | None:
        """Return the newest checkpoint of this step that connected machines have together, or None.

        ``only``: what these machines have of it, also if that is not all.
        """
        responses = await self.survey([run])
        held = {
            node: [each for each in response.held if each.step == step]
            for node, response in responses.items()
            if not only or node in only
        }
        candidates = find_checkpoints(held, incomplete=bool(only))
        return max(candidates, key=lambda each: (each.held.agreed, each.held.age), default=None)

    async def request_files(
        self, node: NodeId, run: str, step: int, parts: Collection[int] = ()
    ) -> FilesResponse:
        """Ask a machine for read access to a checkpoint; step 0: to the files of the run."""
        make = partial(FilesRequest, run=run, step=step, parts=tuple(parts))
        return await self._calls.ask(node, make, FilesResponse, _GRANT_S)

    # checkpoints on this machine, and permissions

    async def _held(self, runs: Sequence[str]) -> tuple[HeldCheckpoint, ...]:
        signers_by_run = {run: self.signers_of(run) for run in runs}

        def read() -> tuple[HeldCheckpoint, ...]:
            lists = [
                sorted(self.local.held(run, accepted), key=_by_age)
                for run, accepted in signers_by_run.items()
            ]
            return tuple(held for checkpoints in lists for held in checkpoints[-2 * KEPT :])

        return await asyncio.to_thread(read)

    async def _sharded(self, runs: Sequence[str]) -> int:
        return await asyncio.to_thread(lambda: max(map(self.local.sharded, runs), default=0))

    def signers_of(self, run: str) -> frozenset[bytes]:
        """Return the nodes whose signature on a checkpoint of this run is accepted."""
        entry = self._registry.runs.get(run)
        if entry is None:  # a guest does not know the earlier runs that its own run resumes
            return frozenset(node.raw for node in self._context.log.owners)
        return allowed_signers(self._context.log, entry.spec)

    def _may_read(self, node: NodeId, run: str) -> bool:
        """Return True for an owner; for a guest only if its own runs saved or resume this run."""
        if self._context.log.role(node) == "owner":
            return True
        return any(
            entry.run == run or (run in entry.spec.resumes and not entry.has_ended)
            for entry in self._registry.runs.values()
            if node.raw in entry.spec.nodes
        )


def _newest_of(
    responses: Mapping[NodeId, HeldCheckpointsResponse],
    runs: Sequence[str],
    passing_over: Collection[tuple[str, int]],
) -> LocatedCheckpoint | ShardedCheckpoint | None:
    known = {
        each.held: each.holders
        for each in find_checkpoints({node: response.held for node, response in responses.items()})
    }
    best = newest_checkpoint((held for held in known if (held.run, held.step) not in passing_over), runs)
    if best is None:
        shards = {node: response.sharded for node, response in responses.items() if response.sharded}
        return ShardedCheckpoint(max(shards.values()), list(shards)) if shards else None
    parts = {part for own in known[best].values() for part in own}
    return LocatedCheckpoint(replace(best, parts=tuple(sorted(parts))), list(known[best]))


def _by_age(held: HeldCheckpoint) -> tuple[int, int]:
    return held.age
