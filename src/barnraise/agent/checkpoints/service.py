"""Checkpoints beyond the machines that saved them: signed here, found on others, brought, and copied.

A worker saves on its own machine's disk. Its agent signs, tells others what is there, lends it to them over
the way that all files go, and sees to it that as many machines hold the newest one as the session wished.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from barnraise.agent.artifact_service import ArtifactService, TransferProgress
from barnraise.agent.checkpoints.calls import PendingCalls
from barnraise.agent.checkpoints.grants import ReadGrants
from barnraise.agent.checkpoints.local_store import LocalCheckpoints
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
from barnraise.artifacts import ArtifactStore, data_limits, folder_limits
from barnraise.core.config import Settings
from barnraise.core.errors import BarnraiseError, RunError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.runs.checkpoint_manifest import KEPT, HeldCheckpoint, allowed_signers, newest_checkpoint, sign

_SURVEY_S = 5.0
_LEND_S = 600.0  # it is hashed first
_COPY_S = 4 * 3600.0
_MOST_ANSWERING = 8  # questions of one machine

_log = logging.getLogger(__name__)


class CheckpointHost(Protocol):
    """What the keeper needs of the agent."""

    me: NodeId
    key: NodeKey
    settings: Settings
    directory: Path

    @property
    def log(self) -> TrustLog: ...

    def name_of(self, node: NodeId) -> str: ...

    def linked_nodes(self) -> list[NodeId]: ...

    def send_bulk(self, node: NodeId, message: bytes) -> None: ...

    def spawn(self, work: Coroutine[object, object, None]) -> None: ...


class LocatedCheckpoint(NamedTuple):
    """A checkpoint, and the machines in reach that have it: this one first, if it has."""

    held: HeldCheckpoint
    holders: Sequence[NodeId]


class ShardedCheckpoint(NamedTuple):
    """Of a run that has no other: the newest step of which there is a part, and who in reach has parts."""

    step: int
    holders: Sequence[NodeId]


@dataclass
class _Transfer:
    """One on its way here."""

    task: asyncio.Task[None]
    done_bytes: int = 0
    all_bytes: int = 0

    def progress(self, progress: TransferProgress) -> None:
        self.done_bytes, self.all_bytes = progress.done_bytes, progress.all_bytes


class CheckpointService:
    """``on_files`` is called when others may have what a run was started with, or may not any more."""

    def __init__(
        self,
        around: CheckpointHost,
        book: RunRegistry,
        shipper: ArtifactService,
        store: ArtifactStore,
        on_files: Callable[[str], None],
    ) -> None:
        self._around = around
        self._book = book
        self._shipper = shipper
        self.shelf = LocalCheckpoints(around.directory / "runs", store, around.key)
        self.loans = ReadGrants(self.shelf, shipper, on_files)
        self._loop = asyncio.get_running_loop()
        self._calls = PendingCalls(around)
        self._answering: Counter[NodeId] = Counter()
        self._brings: dict[tuple[str, int], _Transfer] = {}
        self._taking = asyncio.Lock()  # copies come one at a time

    # what processes of this machine ask

    async def answer(self, question: CheckpointQuestion) -> CheckpointTold:
        match question:
            case SignRequest():
                return self._seal(question)
            case SignersRequest():
                return SignersResponse(tuple(self.signers_of(question.run)))
            case NewestCheckpointRequest():
                known = self._book.find(question.run)
                runs = (known.run, *(known.order.resumes if question.earlier else ()))
                told = await self.survey(runs)
                absent = self._absent(question.awaiting, told)
                found = _newest_of(told, runs, question.passing_over)
                if found is None:
                    return NewestCheckpointResponse(absent=absent)
                names = tuple(self._around.name_of(node) for node in found.holders)
                if isinstance(found, ShardedCheckpoint):
                    return NewestCheckpointResponse(sharded=found.step, machines=names, absent=absent)
                held = found.held
                return NewestCheckpointResponse(
                    held.run, held.step, held.agreed, names, absent=absent, generation=held.generation
                )
            case FetchCheckpointRequest():
                return await self._brought(question)

    def _seal(self, asked: SignRequest) -> SignResponse:
        """For a member of the group as it is now: one that was put out has nothing to save."""
        known = self._book.runs.get(asked.run)
        key = (self._around.me.raw, asked.local_rank, asked.start)
        if known is None or key not in {slot.key for slot in known.record.slots}:
            raise RunError(f"no member of run {asked.run} asks this", hint="Only members save checkpoints.")
        seal = sign(self._around.key, known.run, asked.step, asked.fingerprint)
        return SignResponse(seal.node, seal.signature)

    def settle(self, run: str, *, counts: bool) -> None:
        """A quorum is there again: what becomes of that which was saved here without one."""
        self.shelf.settle(run, self.signers_of(run), counts=counts)

    async def newest(
        self, runs: Sequence[str], passing_over: Collection[tuple[str, int]] = ()
    ) -> LocatedCheckpoint | ShardedCheckpoint | None:
        """Of these runs, on any machine in reach."""
        return _newest_of(await self.survey(runs), runs, passing_over)

    def _absent(self, awaited: Collection[bytes], told: Collection[NodeId]) -> tuple[str, ...]:
        """The names of those who belong to the cluster still, and did not answer."""
        nodes = [node for node in map(NodeId, awaited) if node not in told]
        return tuple(self._around.name_of(node) for node in nodes if self._around.log.role(node) is not None)

    async def bring_files(self, known: RunEntry) -> None:
        """Have in the store what a run was started with; RunError if nobody in reach has all of it."""
        wanted = known.order.manifests
        if await asyncio.to_thread(self.shelf.has_files, wanted):
            return
        told = await self.survey([known.run], files=True)
        for node in [node for node, answer in told.items() if answer.files and node != self._around.me]:
            try:
                await self._fetch_files(node, known, wanted)
            except BarnraiseError as error:
                _log.warning("%s does not give what run %s needs: %s", node.short, known.run, error.message)
            else:
                return
        first = self._around.name_of(NodeId(known.order.by))
        raise RunError(
            f"the files of run {known.run} are on no machine that is here",
            hint=f"Switch on {first}, where it was started, or one that took part.",
        )

    async def _brought(self, asked: FetchCheckpointRequest) -> FetchCheckpointResponse:
        key = (asked.run, asked.step)
        runs = {run for known in self._book.runs.values() for run in (known.run, *known.order.resumes)}
        if asked.run not in runs:
            raise RunError(f"no run is called {asked.run!r}", hint="See all with: barnraise ps")
        bring = self._brings.get(key) or self._bring(*key, ())
        await asyncio.wait({bring.task}, timeout=asked.wait_s)
        if not bring.task.done():
            return FetchCheckpointResponse(False, bring.done_bytes, bring.all_bytes)
        self._brings.pop(key, None)
        bring.task.result()
        return FetchCheckpointResponse(True, bring.done_bytes, bring.all_bytes)

    async def offer(self, node: NodeId, run: str, step: int) -> str:
        """Until that machine has a copy; why not, if it does not want one."""
        answer = await self._calls.ask(node, partial(CopyOffer, run=run, step=step), CopyResult, _COPY_S)
        self.loans.returned(node, run)
        return answer.words

    # what the links tell

    def told(self, node: NodeId, message: CheckpointRequest | CheckpointAnswer) -> None:
        if isinstance(message, CheckpointAnswer):
            self._calls.answered(node, message)
        elif self._answering[node] < _MOST_ANSWERING:
            self._answering[node] += 1
            self._around.spawn(self._reply(node, message))

    def link_down(self, node: NodeId) -> None:
        self._calls.link_down(node)

    async def stop(self) -> None:
        tasks = [bring.task for bring in self._brings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reply(self, node: NodeId, asked: CheckpointRequest) -> None:
        answer: CheckpointAnswer
        try:
            match asked:
                case HeldCheckpointsRequest():
                    answer = await self._tell_held(node, asked)
                case FilesRequest():
                    answer = FilesResponse(asked.serial, await self._lend(node, asked))
                case CopyOffer():
                    await self._take_copy(node, asked)
                    answer = CopyResult(asked.serial)
        except (BarnraiseError, OSError) as error:
            words = (error.message if isinstance(error, BarnraiseError) else str(error))[:1000] or "it failed"
            if isinstance(asked, HeldCheckpointsRequest):
                answer = HeldCheckpointsResponse(asked.serial, ())
            elif isinstance(asked, FilesRequest):
                answer = FilesResponse(asked.serial, b"", words)
            else:
                answer = CopyResult(asked.serial, words)
        finally:
            self._answering[node] -= 1
        self._around.send_bulk(node, encode(answer))

    async def _tell_held(self, node: NodeId, asked: HeldCheckpointsRequest) -> HeldCheckpointsResponse:
        runs = [run for run in asked.runs if self._may_have(node, run)]
        held = await self._held(runs)
        known = self._book.runs.get(asked.runs[0])
        files = asked.files and known is not None and self._around.log.role(node) == "owner"
        if files and known is not None:
            files = await asyncio.to_thread(self.shelf.has_files, known.order.manifests)
        return HeldCheckpointsResponse(asked.serial, held, files, await self._sharded(runs))

    async def _lend(self, node: NodeId, asked: FilesRequest) -> bytes:
        if asked.step:
            if not self._may_have(node, asked.run):
                raise RunError("a guest has no checkpoint of a run that it has no part in")
            return await self.loans.lend(node, asked.run, asked.step, self.signers_of(asked.run))
        known = self._book.runs.get(asked.run)
        if known is None or self._around.log.role(node) != "owner":
            raise RunError("what a run was started with is for owners and those who take part")
        self.loans.lend_files(node, known.run, known.order.manifests)
        return known.order.folder

    async def _take_copy(self, node: NodeId, offered: CopyOffer) -> None:
        """An owner's machine lacks others that hold it: keep it, and what its run was started with."""
        known = self._book.runs.get(offered.run)
        if known is None or self._around.log.role(node) != "owner":
            raise RunError(f"no copy of run {offered.run} is kept here", hint="Ask another machine.")
        async with self._taking:
            # The folder first, so that this machine could resume the run alone once it has the checkpoint.
            if not await asyncio.to_thread(self.shelf.has_files, [known.order.folder]):
                try:
                    await self._fetch_files(node, known, [known.order.folder])
                except BarnraiseError as error:
                    _log.warning("the folder of run %s does not come along: %s", known.run, error.message)
            bring = self._bring(offered.run, offered.step, [node])
            await asyncio.shield(bring.task)

    # asking others

    async def survey(
        self, runs: Sequence[str], *, files: bool = False
    ) -> dict[NodeId, HeldCheckpointsResponse]:
        """What this machine has, and all that can be reached."""

        async def ask(node: NodeId) -> tuple[NodeId, HeldCheckpointsResponse] | None:
            make = partial(HeldCheckpointsRequest, runs=tuple(runs), files=files)
            try:
                return node, await self._calls.ask(node, make, HeldCheckpointsResponse, _SURVEY_S)
            except BarnraiseError as error:
                _log.info("%s does not tell what it holds: %s", node.short, error.message)
                return None

        nodes = [node for node in self._around.linked_nodes() if self._may_have(node, runs[0])]
        own = HeldCheckpointsResponse(0, await self._held(runs), False, await self._sharded(runs))
        mine = {self._around.me: own}
        return mine | dict(one for one in await asyncio.gather(*map(ask, nodes)) if one is not None)

    async def _borrow(self, node: NodeId, run: str, step: int) -> bytes:
        lent = await self._calls.ask(node, partial(FilesRequest, run=run, step=step), FilesResponse, _LEND_S)
        if not lent.manifest:
            raise RunError(f"{self._around.name_of(node)} does not lend it: {lent.words}", hint="Try others.")
        return lent.manifest

    async def _fetch_files(self, node: NodeId, known: RunEntry, manifests: Sequence[bytes]) -> None:
        await self._borrow(node, known.run, 0)
        settings = self._around.settings
        for name in manifests:
            limits = folder_limits(settings) if name == known.order.folder else data_limits(settings)
            await self._shipper.fetch(name, [node], [self._around.me], limits)

    # bringing one here

    def _bring(self, run: str, step: int, holders: Sequence[NodeId]) -> _Transfer:
        """Begin, or join what was begun; without holders those are asked who can be reached."""
        for key in [key for key, one in self._brings.items() if one.task.done()]:
            del self._brings[key]
        found = self._brings.get((run, step))
        if found is None:
            task = self._loop.create_task(self._bring_now(run, step, holders))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            found = self._brings[run, step] = _Transfer(task)
        return found

    async def _bring_now(self, run: str, step: int, holders: Sequence[NodeId]) -> None:
        may_sign = self.signers_of(run)
        if await asyncio.to_thread(self.shelf.is_whole, run, step, may_sign):
            return
        if not holders:
            told = await self.survey([run])
            holders = [node for node, one in told.items() if any(held.step == step for held in one.held)]
        why = "no machine that is here has it"
        for node in [node for node in holders if node != self._around.me]:
            try:
                await self._bring_from(node, run, step, may_sign)
            except (BarnraiseError, OSError) as error:
                why = error.message if isinstance(error, BarnraiseError) else str(error)
                _log.warning("no checkpoint comes from %s: %s", self._around.name_of(node), why)
            else:
                return
        raise RunError(
            f"the checkpoint of step {step} of run {run} cannot be had: {why}",
            hint="Switch on the machines that saved it: barnraise status",
        )

    async def _bring_from(self, node: NodeId, run: str, step: int, may_sign: Collection[bytes]) -> None:
        name = await self._borrow(node, run, step)
        progress = self._brings[run, step].progress
        limits = data_limits(self._around.settings)
        # Whoever lends may name a list of files that this machine has for another reason.
        was_here = await asyncio.to_thread(self.shelf.knows, name)
        files = await self._shipper.fetch(name, [node], [self._around.me], limits, progress)
        try:
            await asyncio.to_thread(self.shelf.keep, files, run, step, may_sign)
        finally:
            if name not in self.loans and not was_here:  # its place is on the shelf
                await asyncio.to_thread(self.shelf.take_back, name)

    # who has what, and for whom

    async def _held(self, runs: Sequence[str]) -> tuple[HeldCheckpoint, ...]:
        may_sign = {run: self.signers_of(run) for run in runs}

        def look() -> tuple[HeldCheckpoint, ...]:
            held = [sorted(self.shelf.held(run, who), key=_by_age) for run, who in may_sign.items()]
            return tuple(one for some in held for one in some[-2 * KEPT :])

        return await asyncio.to_thread(look)

    async def _sharded(self, runs: Sequence[str]) -> int:
        return await asyncio.to_thread(lambda: max(map(self.shelf.sharded, runs), default=0))

    def signers_of(self, run: str) -> frozenset[bytes]:
        known = self._book.runs.get(run)
        if known is None:  # a guest does not know of the runs that its own goes on with
            return frozenset(node.raw for node in self._around.log.owners)
        return allowed_signers(self._around.log, known.order)

    def _may_have(self, node: NodeId, run: str) -> bool:
        """An owner all; a guest what its own runs saved, or go on with."""
        if self._around.log.role(node) == "owner":
            return True
        return any(
            known.run == run or (run in known.order.resumes and not known.has_ended)
            for known in self._book.runs.values()
            if node.raw in known.order.nodes
        )


def _newest_of(
    told: Mapping[NodeId, HeldCheckpointsResponse],
    runs: Sequence[str],
    passing_over: Collection[tuple[str, int]],
) -> LocatedCheckpoint | ShardedCheckpoint | None:
    held = {one for answer in told.values() for one in answer.held}
    best = newest_checkpoint((one for one in held if (one.run, one.step) not in passing_over), runs)
    if best is None:
        parts = {node: answer.sharded for node, answer in told.items() if answer.sharded}
        return ShardedCheckpoint(max(parts.values()), list(parts)) if parts else None
    return LocatedCheckpoint(best, [node for node, answer in told.items() if best in answer.held])


def _by_age(held: HeldCheckpoint) -> tuple[int, int]:
    return held.age
