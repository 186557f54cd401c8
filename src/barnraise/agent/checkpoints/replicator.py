"""Replicates the newest checkpoint of each run to as many machines as its session asked for.

One copy is sent at a time, followed by a pause of the same length, because training needs the network, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from barnraise.agent.checkpoints.service import CheckpointService
from barnraise.agent.context import AgentContext
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId
from barnraise.runs.checkpoint_manifest import (
    HeldCheckpoint,
    find_checkpoints,
    lacks_copies,
    newest_checkpoint,
    next_copy_target,
    next_part_copies,
)

_CHECK_S = 2.0
_RETRY_S = 15.0  # when no machine could take a copy
_REFUSED_S, _UNREACHED_S = 3600.0, 60.0  # until a machine is asked again
_GRACE_S = 10.0  # other members may still be writing their own copy

_log = logging.getLogger(__name__)


class _MissingCopy(NamedTuple):
    """Checkpoint that too few machines have. ``node``: the one to copy it to; None if it is another's turn.

    ``parts``: those to copy of a checkpoint in parts.
    """

    step: int
    node: NodeId | None
    parts: tuple[int, ...] = ()


class CheckpointReplicator:
    """Background task that offers this machine's checkpoints to other machines."""

    def __init__(self, context: AgentContext, book: RunRegistry, service: CheckpointService) -> None:
        self._context = context
        self._registry = book
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._open: set[str] = set()  # runs whose last checkpoint may lack copies
        self._settled: dict[str, int] = {}  # step with enough copies, by run
        self._seen: dict[str, tuple[int, float]] = {}  # newest step and when it was seen
        self._next_check: dict[str, float] = {}
        self._refused: dict[tuple[str, int, bytes], float] = {}  # when to offer again, by run, step and node

    async def run(self) -> None:
        """Check every run at intervals, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._service.grants.remove_expired()
            if self._context.log.role(self._context.me) != "owner":
                continue
            self._open |= {run for run, entry in self._registry.runs.items() if not entry.has_ended}
            for run in list(self._open):
                entry = self._registry.runs.get(run)
                step = await asyncio.to_thread(self._service.local.latest, run)
                if self._seen.get(run, (0, 0.0))[0] != step:
                    self._seen[run] = step, self._loop.time()
                is_settled = self._settled.get(run, 0) == step
                if entry is None or (is_settled and entry.has_ended):
                    self._forget(run)
                elif not is_settled and self._loop.time() >= self._next_check.get(run, 0.0):
                    await self._check(entry, step)

    def _forget(self, run: str) -> None:
        self._open.discard(run)
        for table in (self._settled, self._seen, self._next_check):
            table.pop(run, None)
        self._refused = {key: until for key, until in self._refused.items() if key[0] != run}

    async def _check(self, entry: RunEntry, step: int) -> None:
        begin = self._loop.time()
        pause = _RETRY_S
        try:
            lacking = await self._missing_copy(entry)
            if lacking is None:
                self._settled[entry.run] = step
            elif await self._offer(entry.run, lacking):
                pause = self._loop.time() - begin
        except (BarnraiseError, OSError) as error:
            _log.info("cannot copy a checkpoint of run %s: %s", entry.run, error)
        self._next_check[entry.run] = self._loop.time() + pause

    async def _missing_copy(self, entry: RunEntry) -> _MissingCopy | None:
        """Return the newest checkpoint, as far as this machine has it, and the machine to copy it to.

        Return None if enough machines have it, or if only other machines do.
        """
        responses = await self._service.survey([entry.run])
        known = {
            each.held: {node.raw: parts for node, parts in each.holders.items()}
            for each in find_checkpoints({node: response.held for node, response in responses.items()})
        }
        best = newest_checkpoint(known, [entry.run])
        signers = self._service.signers_of(entry.run)
        manifests = await asyncio.to_thread(self._service.local.manifests, entry.run, signers)
        lacking = None
        if best is not None and self._context.me.raw in known[best]:
            copies = next((each.copies for each in manifests if each.step == best.step), 0)
            lacking = self._next_copy(entry, best, known[best], copies)
        age = best.age if best is not None else (0, 0)
        is_incomplete = any(each.parts and (each.generation, each.step) > age for each in manifests)
        if lacking is None and is_incomplete and not entry.has_ended:
            return _MissingCopy(0, None)  # others may still be writing their parts
        return lacking

    def _next_copy(
        self, entry: RunEntry, best: HeldCheckpoint, holders: Mapping[bytes, frozenset[int]], copies: int
    ) -> _MissingCopy | None:
        """Return the machine to copy a checkpoint of this machine to; None if enough machines have it.

        ``holders``: the parts of each machine.
        """
        me = self._context.me.raw
        if not (lacks_copies(me, holders, copies) if best.count else len(holders) < copies):
            return None
        candidates = self._candidates(entry, best.step)
        parts: tuple[int, ...] = ()
        if best.count:  # it is complete, so all members have written theirs
            target, parts = next_part_copies(me, holders, candidates, copies) or (None, ())
        else:
            is_new = self._loop.time() < self._seen[entry.run][1] + _GRACE_S and not entry.has_ended
            writing = entry.record.nodes if is_new else ()
            target = next_copy_target(me, {*holders, *writing}, candidates, copies)
        return _MissingCopy(best.step, NodeId(target) if target is not None else None, parts)

    async def _offer(self, run: str, copy: _MissingCopy) -> bool:
        step, node, parts = copy
        if node is None:
            return False
        try:
            reason = await self._service.offer(node, run, step, parts)
            retry_s = _REFUSED_S
        except BarnraiseError as error:  # most often its network
            reason, retry_s = error.message, _UNREACHED_S
        if reason:
            self._refused[run, step, node.raw] = self._loop.time() + retry_s
            _log.warning("%s cannot keep a copy of run %s: %s", self._context.name_of(node), run, reason)
            return False
        _log.info("copied the checkpoint of step %d of run %s to %s", step, run, self._context.name_of(node))
        return True

    def _candidates(self, entry: RunEntry, step: int) -> list[bytes]:
        """Return the connected machines to copy to: of the run, then of other owners, then witnesses.

        Those that have just refused this step are left out.
        """
        now = self._loop.time()
        refused = {
            node
            for (run, refused_step, node), until in self._refused.items()
            if (run, refused_step) == (entry.run, step) and now < until
        }
        linked = {node.raw for node in self._context.linked_nodes()}
        present = [member for member in self._context.member.view.members if self._is_owner(member.node)]
        others = [member.node for member in sorted(present, key=lambda member: not member.works)]
        return [node for node in dict.fromkeys((*entry.spec.nodes, *others)) if node in linked - refused]

    def _is_owner(self, raw: bytes) -> bool:
        return self._context.log.role(NodeId(raw)) == "owner"
