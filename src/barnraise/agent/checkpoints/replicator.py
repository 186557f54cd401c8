"""Sees to it that the newest checkpoint of a run is on as many machines as its session wished.

One copy is given at a time, and then there is a pause as long as that took: training needs the line as well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from barnraise.agent.checkpoints.service import CheckpointService
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId
from barnraise.identity.trust import TrustLog
from barnraise.membership.node import MembershipNode
from barnraise.runs.checkpoint_manifest import (
    CheckpointManifest,
    HeldCheckpoint,
    newest_checkpoint,
    next_copy_target,
    to_held_checkpoint,
)

_LOOK_S = 2.0
_AGAIN_S = 15.0  # when nobody could take a copy
_REFUSED_S, _UNREACHED_S = 3600.0, 60.0  # that a machine is not asked again
_GRACE_S = 10.0  # so long the other members may still be writing theirs

_log = logging.getLogger(__name__)


class ReplicatorHost(Protocol):
    """What the copies need of the agent."""

    me: NodeId
    member: MembershipNode

    @property
    def log(self) -> TrustLog: ...

    def name_of(self, node: NodeId) -> str: ...

    def linked_nodes(self) -> list[NodeId]: ...


class CheckpointReplicator:
    """One for each agent; it gives what is on its own disk."""

    def __init__(self, around: ReplicatorHost, book: RunRegistry, keeper: CheckpointService) -> None:
        self._around = around
        self._book = book
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._open: set[str] = set()  # runs that went on while we looked: the last one may lack copies
        self._settled: dict[str, int] = {}  # the step of which there are enough
        self._seen: dict[str, tuple[int, float]] = {}  # the newest step, and since when it is here
        self._next_look: dict[str, float] = {}
        self._refused: dict[tuple[str, int, bytes], float] = {}  # until when it is not offered that step

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._keeper.loans.end_overdue()
            if self._around.log.role(self._around.me) != "owner":
                continue
            self._open |= {run for run, known in self._book.runs.items() if not known.has_ended}
            for run in list(self._open):
                known = self._book.runs.get(run)
                step = await asyncio.to_thread(self._keeper.shelf.latest, run)
                if self._seen.get(run, (0, 0.0))[0] != step:
                    self._seen[run] = step, self._loop.time()
                is_settled = self._settled.get(run, 0) == step
                if known is None or (is_settled and known.has_ended):
                    self._forget(run)
                elif not is_settled and self._loop.time() >= self._next_look.get(run, 0.0):
                    await self._look(known, step)

    def _forget(self, run: str) -> None:
        self._open.discard(run)
        for noted in (self._settled, self._seen, self._next_look):
            noted.pop(run, None)
        self._refused = {one: until for one, until in self._refused.items() if one[0] != run}

    async def _look(self, known: RunEntry, step: int) -> None:
        begin = self._loop.time()
        pause = _AGAIN_S
        try:
            lacking = await self._lacking(known)
            if lacking is None:
                self._settled[known.run] = step
            elif await self._give(known.run, *lacking):
                pause = self._loop.time() - begin
        except (BarnraiseError, OSError) as error:
            _log.info("a checkpoint of run %s was not copied: %s", known.run, error)
        self._next_look[known.run] = self._loop.time() + pause

    async def _lacking(self, known: RunEntry) -> tuple[int, NodeId | None] | None:
        """The newest one here, and who should have it; None if enough have it, or something newer."""
        may_sign = self._keeper.signers_of(known.run)
        manifests = await asyncio.to_thread(self._keeper.shelf.manifests, known.run, may_sign)
        mine: dict[HeldCheckpoint, CheckpointManifest] = {to_held_checkpoint(one): one for one in manifests}
        told = await self._keeper.survey([known.run])
        best = newest_checkpoint((one for answer in told.values() for one in answer.held), [known.run])
        if best is None or best not in mine:
            return None
        me, copies = self._around.me.raw, mine[best].copies
        holders = {node.raw for node, answer in told.items() if best in answer.held} | {me}
        if len(holders) >= copies:
            return None
        if self._loop.time() < self._seen[known.run][1] + _GRACE_S and not known.has_ended:
            holders |= set(known.record.nodes)
        now = self._loop.time()
        refused = {
            node
            for (run, step, node), until in self._refused.items()
            if (run, step) == (known.run, best.step) and now < until
        }
        able = [node for node in self._candidates(known) if node not in refused]
        target = next_copy_target(me, holders, able, copies)
        return best.step, NodeId(target) if target is not None else None

    async def _give(self, run: str, step: int, node: NodeId | None) -> bool:
        if node is None:
            return False
        try:
            words = await self._keeper.offer(node, run, step)
            again_s = _REFUSED_S
        except BarnraiseError as error:  # its line, more often than not
            words, again_s = error.message, _UNREACHED_S
        if words:
            self._refused[run, step, node.raw] = self._loop.time() + again_s
            _log.warning("%s keeps no copy of run %s: %s", self._around.name_of(node), run, words)
            return False
        _log.info("the checkpoint of step %d of run %s is on %s, too", step, run, self._around.name_of(node))
        return True

    def _candidates(self, known: RunEntry) -> list[bytes]:
        """The run's own machines first, then other owners'; witnesses last."""
        linked = {node.raw for node in self._around.linked_nodes()}
        present = [one for one in self._around.member.view.members if self._is_owner(one.node)]
        others = [one.node for one in sorted(present, key=lambda one: not one.works)]
        return [node for node in dict.fromkeys((*known.order.nodes, *others)) if node in linked]

    def _is_owner(self, raw: bytes) -> bool:
        return self._around.log.role(NodeId(raw)) == "owner"
