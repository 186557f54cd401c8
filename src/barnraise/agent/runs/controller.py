"""Writes the next version of each run's record, if this machine coordinates; anybody's wish to stop, too.

A version is written by comparing with the one before on the cluster's board, so that two machines that both
believe to coordinate cannot lead a run in two ways; then it is told to everybody whom it concerns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from typing import Protocol

from msgspec.structs import replace

from barnraise.agent.cluster.kv_service import KvService
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent_client.kv_messages import LOBBY, CompareAndSet, KvDenied, Namespace
from barnraise.core.errors import BarnraiseError, MembershipError, RunError
from barnraise.identity import NodeId
from barnraise.membership.failure_detector import watched
from barnraise.membership.node import MembershipNode
from barnraise.runs.control.eviction import Pair
from barnraise.runs.control.lifecycle import ReconcileInput, leads_alone, next_record, provisional, stopped_by
from barnraise.runs.record import RunRecord, decode_record, encode_record, read_order

_TICK_S = 0.25
_TELL_AGAIN_S = 3.0
_PATIENCE_S = 10.0
_SCOPE = Namespace("@runs", LOBBY)

_log = logging.getLogger(__name__)


class ControllerHost(Protocol):
    """What the keeper needs of the agent."""

    me: NodeId
    member: MembershipNode
    board: KvService

    def name_of(self, node: NodeId) -> str: ...

    def say(self, text: str) -> None: ...


class RunController:
    """One for each agent; it decides only while its machine coordinates."""

    def __init__(self, around: ControllerHost, book: RunRegistry) -> None:
        self._around = around
        self._book = book
        self._loop = asyncio.get_running_loop()
        self._client = secrets.token_bytes(16)
        self._serial = 0
        self._writing = asyncio.Lock()
        self._told_at: dict[str, float] = {}
        self._apart: dict[Pair, float] = {}

    async def run(self) -> None:
        while True:
            now = self._loop.time()
            self._notice_apart(now)
            decides = self._around.member.quorum_status(now).decides
            coordinates = self._around.member.coordinator(now)[0] == self._around.me.raw
            for known in list(self._book.runs.values()):
                try:
                    if decides and coordinates and (known.record.provisional or not known.has_ended):
                        await self._keep(known)
                    elif not decides and not known.has_ended:
                        self._keep_alone(known)
                except Exception:  # noqa: BLE001  # one run must not take the others, or the agent, with it
                    _log.exception("run %s could not be kept", known.run)
                    await asyncio.sleep(_TICK_S)
            await self._book.news_within(_TICK_S)

    async def write(self, known: RunEntry | None, record: RunRecord) -> RunEntry:
        """Make it the next version everywhere; RunError if another version came first."""
        name = read_order(record).run
        record = replace(record, provisional=0)
        before = encode_record(known.record) if known is not None else b""
        desired = encode_record(record)
        async with self._writing:
            seen = await self._compare_set(name, before, desired)
            if seen == before and seen != desired:  # the board has forgotten it, as nobody asked for long
                seen = await self._compare_set(name, b"", desired)
            elif known is not None and seen != desired and _builds_on(known.record, seen):
                seen = await self._compare_set(name, seen, desired)
        if seen == desired:
            self._book.take(record, is_ours=True)
        else:
            self._book.take(decode_record(seen))
        result = self._book.runs[name]
        self._tell(result)
        if seen != desired:
            raise RunError(f"run {name} has changed meanwhile", hint="Try again.")
        return result

    async def stop(self, known: RunEntry, *, hard: bool) -> None:
        """For a person at this machine; tries again if the run changes at the same moment."""
        for _ in range(20):
            record = stopped_by(known.record, self._around.name_of(self._around.me), hard=hard)
            if record is None:
                return
            try:
                await self.write(known, record)
            except RunError:
                continue
            return
        raise RunError(f"run {known.run} changes too fast to be stopped", hint="Try again.")

    def apart(self) -> dict[Pair, float]:
        """For how long two machines have missed each other."""
        now = self._loop.time()
        return {pair: now - since for pair, since in self._apart.items()}

    def facts(self, known: RunEntry, missing: Collection[bytes] = ()) -> ReconcileInput:
        now = self._loop.time()
        return ReconcileInput(
            order=known.order,
            reports=known.reports,
            here=[node for node in self._around.member.view.nodes if node not in missing],
            since_s=now - known.seen_at,
            stuck_s=now - known.stuck_at if known.stuck_at is not None else 0.0,
            apart=self.apart(),
            keeper=self._around.me.raw,
            name=lambda raw: self._around.name_of(NodeId(raw)),
        )

    def _notice_apart(self, now: float) -> None:
        """By what each member says of whom it does not hear, and by what is heard here."""
        member = self._around.member
        me, peers = self._around.me.raw, member.peers
        pairs = {frozenset((node, one)) for node, peer in peers.items() for one in peer.suspects(now) or ()}
        near = watched(member.view.nodes, me)
        pairs |= {frozenset((me, node)) for node in near if node in peers and peers[node].is_suspect(now)}
        self._apart = {pair: self._apart.get(pair, now) for pair in pairs}

    def _keep_alone(self, known: RunEntry) -> None:
        """No quorum is here: go on provisionally where that is allowed."""
        now = self._loop.time()
        me, member = self._around.me.raw, self._around.member
        missing = member.quorum_status(now).missing
        why = leads_alone(known.record, me, member.view.nodes, missing, member.dead(now))
        changed = next_record(known.record, self.facts(known, missing)) if why is not None else None
        if changed is None:
            return
        record = provisional(known.record, changed)
        self._book.take(record)
        self._tell(known)
        self._around.say(f"run {known.run}: {record.phase}, {record.why}; provisionally, because {why}")

    async def _keep(self, known: RunEntry) -> None:
        record = next_record(known.record, self.facts(known))
        if record is None and known.record.provisional:
            record = replace(known.record, version=known.record.version + 1)
        if record is None:
            if self._loop.time() - self._told_at.get(known.run, 0.0) > _TELL_AGAIN_S:
                self._tell(known)
            return
        try:
            await self.write(known, record)
        except BarnraiseError as error:
            _log.info("run %s could not be changed: %s", known.run, error.message)
            return
        self._around.say(f"run {known.run}: {record.phase}, {record.why}")

    def _tell(self, known: RunEntry) -> None:
        self._told_at[known.run] = self._loop.time()
        self._book.tell_record(known)

    async def _compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        """What the board has now; see `CompareAndSet`."""
        self._serial += 1
        operation = CompareAndSet(_SCOPE, self._client, self._serial, b"", name, expected, desired)
        result = await self._around.board.request(operation, _PATIENCE_S)
        if isinstance(result, KvDenied):
            raise MembershipError(f"the cluster cannot note the run now: {result.message}", hint=result.hint)
        return result.value or b""


def _builds_on(record: RunRecord, seen: bytes) -> bool:
    """Whether nobody has decided anything since this record went on without a quorum."""
    return bool(record.provisional) and decode_record(seen).version <= record.provisional
