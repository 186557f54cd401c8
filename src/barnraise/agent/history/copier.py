"""Copier of records between the machines of owners: each copies the logs that the others write.

It asks every connected owner's machine for the logs that it holds, often for those that changed lately and
now and then for all. Requests name run, machine, identity and offset; responses are bounded. What a person
removed, and what is too much for this disk, is not copied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from barnraise.agent.context import AgentContext
from barnraise.agent.history.disk_thread import DiskThread
from barnraise.agent.history.kept_logs import kept_logs, remove_named
from barnraise.agent.history.removals import RemovedRecords
from barnraise.agent.pending_calls import PendingCalls
from barnraise.agent.runs.messages import (
    MOST_HELD_LOGS,
    HeldLogsRequest,
    HeldLogsResponse,
    HistoryMessage,
    LogPartRequest,
    LogPartResponse,
    encode,
)
from barnraise.agent_client.history.requests import KeptLog
from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.history.log_file import RecordPart, RunLogCopy, log_path, logs_of, read_head, read_part
from barnraise.history.logs.copy_plan import HeldLog, logs_to_copy
from barnraise.history.logs.retention import is_removed, runs_beyond
from barnraise.identity import NodeId

_EVERY_S = 2.0
_ALL_EVERY_S = 60.0
_RECENT_S = 120.0
_ANSWER_S = 10.0
_MOST_PARTS = 64  # of one log in a row
_MAX_REPLYING = 4  # requests of one machine
_MAX_PAGES = 64
_MOST_COPIES = 512  # whose places are remembered

_log = logging.getLogger(__name__)


class HistoryCopier:
    """Background task that copies logs, and the answers to the copiers of other machines.

    ``disk`` is the one thread of all records. ``active``: returns the runs whose records must stay.
    """

    def __init__(
        self,
        context: AgentContext,
        disk: DiskThread,
        removals: RemovedRecords,
        active: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._context = context
        self._disk = disk
        self._removals, self._active = removals, active
        self._calls = PendingCalls(context)
        self._replying: Counter[NodeId] = Counter()
        self._copies: dict[tuple[str, bytes], RunLogCopy] = {}
        self._asked_all: dict[NodeId, float] = {}  # when a machine was asked for all of its logs
        self._asking: set[NodeId] = set()  # machines that are copied from now
        self._copying: set[tuple[str, bytes]] = set()  # logs that are copied now

    async def run(self) -> None:
        """Copy from all connected machines of owners at intervals, until cancelled.

        One that answers slowly does not delay the others.
        """
        while True:
            await asyncio.sleep(_EVERY_S)
            if not self._is_owner(self._context.me):
                continue
            for node in self._context.linked_nodes():
                if self._is_owner(node) and node not in self._asking:
                    self._asking.add(node)
                    self._context.spawn(self._copy_and_note(node))

    async def _copy_and_note(self, node: NodeId) -> None:
        try:
            await self._copy_from(node)
        finally:
            self._asking.discard(node)

    def link_up(self, node: NodeId) -> None:
        """Ask a newly connected machine for all of its logs."""
        self._asked_all.pop(node, None)

    def link_down(self, node: NodeId) -> None:
        """Fail the requests to a machine whose connection is lost."""
        self._calls.link_down(node)

    def forget(self, run: str) -> None:
        """Forget the copies of a run that was removed."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != run}

    async def remove_named(self) -> None:
        """Remove the records that a person has removed on some machine."""
        times, active = self._removals.times, self._active()
        for run in await self._disk.run(lambda: remove_named(self._context.directory, times, active)):
            self.forget(run)

    def received(self, node: NodeId, message: HistoryMessage) -> None:
        """Handle a message of another agent; those of a guest, and too many at once, are ignored."""
        if isinstance(message, HeldLogsResponse | LogPartResponse):
            self._calls.resolve(node, message)
        elif self._is_owner(node) and self._replying[node] < _MAX_REPLYING:
            self._replying[node] += 1
            self._context.spawn(self._reply(node, message))

    # copies

    async def _copy_from(self, node: NodeId) -> None:
        now = asyncio.get_running_loop().time()
        asks_all = now - self._asked_all.get(node, -_ALL_EVERY_S) >= _ALL_EVERY_S
        try:
            held = await self._held_by(node, recent_s=0.0 if asks_all else _RECENT_S)
            for log in await self._disk.run(lambda: self._wanted(held, node)):
                await self._try_copy(node, log)
            if asks_all:
                self._asked_all[node] = now
        except (BarnraiseError, OSError) as error:
            _log.info("cannot copy the records of runs from %s: %s", self._context.name_of(node), error)

    def _wanted(self, held: Sequence[HeldLog], sender: NodeId) -> list[HeldLog]:
        """Return the logs to copy from a machine."""
        now, own = time.time(), self._held_here(0.0, {(log.run, log.node) for log in held})
        offered = [KeptLog(log.run, log.node, log.size, min(now, log.changed_at or log.at)) for log in held]
        logs = [*kept_logs(self._context.directory), *offered]
        unwanted = set(runs_beyond(logs, self._context.settings.runs.history_bytes, self._active()))
        unwanted |= {log.run for log in held if is_removed(log.run, log.at, self._removals.times)}
        linked = {other.raw for other in self._context.linked_nodes()}
        known = {(log.run, log.node): log for log in own}
        me = self._context.me.raw
        return logs_to_copy(held, known, sender=sender.raw, me=me, linked=linked, unwanted=unwanted)

    async def _try_copy(self, node: NodeId, log: HeldLog) -> None:
        """Copy what is new in one log; one that cannot be copied does not keep the others back."""
        key = (log.run, log.node)
        if key in self._copying:  # from another machine that has it
            return
        self._copying.add(key)
        try:
            await self._copy(node, log)
        except ProtocolError as error:
            name = self._context.name_of(node)
            _log.info("cannot copy the record of run %s from %s: %s", log.run, name, error)
        finally:
            self._copying.discard(key)

    async def _held_by(self, node: NodeId, recent_s: float) -> list[HeldLog]:
        held: list[HeldLog] = []
        for page in range(_MAX_PAGES):
            digest = self._removals.digest
            make = partial(HeldLogsRequest, recent_s=recent_s, page=page, removals=digest)
            response = await self._calls.ask(node, make, HeldLogsResponse, _ANSWER_S)
            if self._removals.add(response.removals):
                await self.remove_named()
            held.extend(response.logs)
            if not response.has_more:
                break
        return held

    async def _copy(self, node: NodeId, log: HeldLog) -> None:
        """Copy what is new in one log."""
        key = (log.run, log.node)
        copy = self._copies.get(key)
        if copy is None:
            path = log_path(self._context.directory, log.run, log.node)
            copy = self._copies[key] = await self._disk.run(lambda: RunLogCopy(path, *key))
            if len(self._copies) > _MOST_COPIES:  # one that is not complete begins again
                del self._copies[next(other for other in self._copies if other not in self._copying)]
        for _ in range(_MOST_PARTS):
            make = partial(
                LogPartRequest, run=log.run, node=log.node, identity=copy.identity, offset=copy.size
            )
            response = await self._calls.ask(node, make, LogPartResponse, _ANSWER_S)
            part = RecordPart(response.identity, response.offset, response.data, response.size)
            changed_at = min(time.time(), log.changed_at) or None
            if not response.identity or not await self._disk.run(partial(copy.add, part, changed_at)):
                return

    # answers

    async def _reply(self, node: NodeId, request: HeldLogsRequest | LogPartRequest) -> None:
        response: HeldLogsResponse | LogPartResponse
        try:
            if isinstance(request, HeldLogsRequest):
                held = await self._disk.run(lambda: self._held_here(request.recent_s))
                start, end = request.page * MOST_HELD_LOGS, (request.page + 1) * MOST_HELD_LOGS
                is_new = request.page == 0 and request.removals != self._removals.digest
                removals = self._removals.all if is_new else ()
                response = HeldLogsResponse(request.serial, tuple(held[start:end]), end < len(held), removals)
            else:
                part = await self._disk.run(lambda: self._part_of(request))
                response = LogPartResponse(request.serial, *part)
        except OSError as error:
            _log.info("a record cannot be read for %s: %s", self._context.name_of(node), error)
            return
        finally:
            self._replying[node] -= 1
        self._context.send_bulk(node, encode(response))

    def _held_here(
        self, recent_s: float, named: Collection[tuple[str, bytes]] | None = None
    ) -> list[HeldLog]:
        """Return the logs of this cluster; with ``recent_s``, those that changed since then.

        ``named``: only these runs and machines. The heads of all others need not be read.
        """
        held = []
        since = time.time() - recent_s if recent_s else 0.0
        for log in kept_logs(self._context.directory):
            if log.changed_at < since or not log.node:
                continue
            if named is not None and (log.run, log.node) not in named:
                continue
            head = read_head(log_path(self._context.directory, log.run, log.node))
            if head is not None and head.cluster == self._context.log.cluster and head.run == log.run:
                held.append(HeldLog(log.run, log.node, head.identity, head.at, log.size, log.changed_at))
        return held

    def _part_of(self, request: LogPartRequest) -> RecordPart:
        path = logs_of(self._context.directory, request.run).get(request.node)
        if path is None or not self._is_of_cluster(path):
            return RecordPart(b"", 0, b"", 0)
        return read_part(path, request.identity, request.offset)

    def _is_of_cluster(self, path: Path) -> bool:
        head = read_head(path)
        return head is not None and head.cluster == self._context.log.cluster

    def _is_owner(self, node: NodeId) -> bool:
        return self._context.log.role(node) == "owner"
