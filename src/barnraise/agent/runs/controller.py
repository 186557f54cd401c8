"""The controller of runs: reconciles spec and status of each run while this machine coordinates.

As in Kubernetes, `RunSpec` is the spec, `NodeReport` is the status, and `next_record` is the reconcile
function. A new record is written to the key-value store with compare-and-set, so that two coordinators cannot
diverge. Then it is sent to all machines that it concerns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.record_store import RecordStore
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent_client.kv_messages import LOBBY, Namespace
from barnraise.core.errors import BarnraiseError, MembershipError, ProtocolError, RunError
from barnraise.identity import NodeId
from barnraise.membership.failure_detector import watched
from barnraise.runs.control.eviction import Pair
from barnraise.runs.control.lifecycle import (
    mark_provisional,
    next_record,
    reason_to_decide_alone,
    request_stop,
)
from barnraise.runs.control.notifier import ChosenNotifier, choose_notifier
from barnraise.runs.control.transitions import ReconcileInput
from barnraise.runs.record import RunRecord, decode_record, encode_record, read_spec

_TICK_S = 0.25
_RESEND_S = 3.0
_SCOPE = Namespace("@runs", LOBBY)
_FREE_SPACE = (
    "Stop runs that are no longer needed: barnraise stop RUN. Records of old runs are deleted within minutes."
)

_log = logging.getLogger(__name__)


class RunController:
    """Reconcile loop of all runs; it decides only while this machine is the coordinator."""

    def __init__(self, context: AgentContext, registry: RunRegistry) -> None:
        self._context = context
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._records = RecordStore(context, _SCOPE, "run", _FREE_SPACE)
        registry.on_forgotten = self._on_forgotten
        self._writing = asyncio.Lock()
        self._sent_at: dict[str, float] = {}
        self._partitioned_since: dict[Pair, float] = {}

    async def run(self) -> None:
        """Reconcile all runs at every change, until cancelled."""
        while True:
            now = self._loop.time()
            self._registry.apply_held()
            self._update_partitions(now)
            decides = self._context.member.quorum_status(now).decides
            coordinates = self._context.member.coordinator(now)[0] == self._context.me.raw
            for entry in list(self._registry.runs.values()):
                try:
                    if decides and coordinates and (entry.record.provisional or not entry.has_ended):
                        await self._reconcile(entry)
                    elif not decides and not entry.has_ended:
                        self._reconcile_without_quorum(entry)
                except Exception:  # noqa: BLE001  # one run must not stop the others or the agent
                    _log.exception("run %s could not be reconciled", entry.run)
                    await asyncio.sleep(_TICK_S)
            await self._registry.wait_for_change(_TICK_S)

    async def delete_forgotten(self) -> None:
        """Delete the store's records of forgotten runs while this machine coordinates, until cancelled."""
        await self._records.delete_forgotten(lambda run: run in self._registry.runs)

    def reset(self) -> None:
        """Forget the keys of the old cluster."""
        self._records.reset()

    def _on_forgotten(self, run: str) -> None:
        self._records.forget([run])

    async def write(self, entry: RunEntry | None, record: RunRecord) -> RunEntry:
        """Write the next version of a record and send it; raise RunError if another version came first."""
        name = read_spec(record).run
        if entry is None and self._registry.has_forgotten(name, record):
            raise RunError(
                f"run {name} has ended, and its record is not kept any more", hint="Start it again."
            )
        record = replace(record, provisional=0)
        expected = encode_record(entry.record) if entry is not None else b""
        desired = encode_record(record)
        async with self._writing:
            stored = await self._records.compare_set(name, expected, desired)
            if stored == expected and stored != desired:  # the store has expired it
                stored = await self._records.compare_set(name, b"", desired)
            elif entry is not None and stored != desired and _replaces(entry.record, stored):
                stored = await self._records.compare_set(name, stored, desired)
        if stored == desired:
            self._registry.apply(record, is_ours=True)
        else:
            self._apply_stored(name, decode_record(stored))
        result = self._registry.runs.get(name)
        if result is not None:
            self._broadcast(result)
        if stored != desired or result is None:
            raise RunError(f"run {name} was changed at the same time", hint="Try again.")
        return result

    def _apply_stored(self, name: str, record: RunRecord) -> None:
        """Apply the version of a run that the store has in place of ours.

        A machine that slept may ask a store that only a removed machine serves. So it takes no order from it
        before a quorum confirms its view.
        """
        if read_spec(record).run != name:
            raise ProtocolError(f"the store has another run under the name {name}")
        if not self._context.member.is_current(self._loop.time()):
            raise MembershipError(
                f"run {name} was changed elsewhere, and no quorum of this cluster confirms it",
                hint="Wait until most of the machines are here (`barnraise status`), then try again.",
            )
        self._registry.apply(record)

    async def stop(self, entry: RunEntry, *, hard: bool) -> None:
        """Stop a run for a person at this machine; retry if the record changes meanwhile."""
        for _ in range(20):
            record = request_stop(entry.record, self._context.name_of(self._context.me), hard=hard)
            if record is None:
                return
            try:
                await self.write(entry, record)
            except RunError:
                continue
            return
        raise RunError(f"run {entry.run} changes too fast; cannot stop it", hint="Try again.")

    def partitioned(self) -> dict[Pair, float]:
        """Return for how many seconds two machines have not reached each other, by pair."""
        now = self._loop.time()
        return {pair: now - since for pair, since in self._partitioned_since.items()}

    def observe(self, entry: RunEntry, missing: Collection[bytes] = ()) -> ReconcileInput:
        """Return everything that the reconcile function needs to know of a run."""
        now = self._loop.time()
        return ReconcileInput(
            spec=entry.spec,
            reports=entry.reports,
            present=[
                node
                for node in self._context.member.view.nodes
                # A machine that was removed does not take part from now on, also if it is still in the view.
                if node not in missing and self._context.log.role(NodeId(node)) is not None
            ],
            since_s=now - entry.seen_at,
            stuck_s=now - entry.stuck_at if entry.stuck_at is not None else 0.0,
            unreachable_s=self.partitioned(),
            controller=self._context.me.raw,
            name=self._name_of,
            notifier=self._notifier(entry).node,
        )

    def _notifier(self, entry: RunEntry) -> ChosenNotifier:
        """Return which machine sends the notices of a run; of one without a job, the one that started it."""
        if not entry.spec.job:
            return ChosenNotifier(b"", "")
        log, by = self._context.log, NodeId(entry.spec.by)
        adder = by if log.role(by) is not None else log.current(by)
        owners = [node for node in self._context.member.view.nodes if log.role(NodeId(node)) == "owner"]
        notifying = {node for node in owners if self._context.sends_notices(NodeId(node))}
        return choose_notifier(adder.raw, owners, notifying, self._name_of)

    def _name_of(self, node: bytes) -> str:
        return self._context.name_of(NodeId(node))

    def _update_partitions(self, now: float) -> None:
        """Update the pairs that do not hear each other, from heartbeats here and reports of members."""
        member = self._context.member
        me, peers = self._context.me.raw, member.peers
        pairs = {
            frozenset((node, suspect)) for node, peer in peers.items() for suspect in peer.suspects(now) or ()
        }
        watched_nodes = watched(member.view.nodes, me)
        pairs |= {
            frozenset((me, node)) for node in watched_nodes if node in peers and peers[node].is_suspect(now)
        }
        self._partitioned_since = {pair: self._partitioned_since.get(pair, now) for pair in pairs}

    def _reconcile_without_quorum(self, entry: RunEntry) -> None:
        """Advance a run provisionally without a quorum, where that is allowed."""
        now = self._loop.time()
        me, member = self._context.me.raw, self._context.member
        missing = member.quorum_status(now).missing
        why = reason_to_decide_alone(entry.record, me, member.view.nodes, missing, member.dead(now))
        # Only a quorum names another machine for the notices: else the two sides might each name one.
        facts = self.observe(entry, missing)._replace(notifier=entry.record.notifier)
        changed = next_record(entry.record, facts) if why is not None else None
        if changed is None:
            return
        record = mark_provisional(entry.record, changed)
        self._registry.apply(record)
        self._broadcast(entry)
        self._context.report_event(
            f"run {entry.run}: {record.phase}, {record.why}; without a majority, because {why}"
        )

    async def _reconcile(self, entry: RunEntry) -> None:
        record = next_record(entry.record, self.observe(entry))
        if record is None and entry.record.provisional:
            record = replace(entry.record, version=entry.record.version + 1)
        if record is None:
            if self._loop.time() - self._sent_at.get(entry.run, 0.0) > _RESEND_S:
                self._broadcast(entry)
            return
        before = entry.record
        try:
            await self.write(entry, record)
        except BarnraiseError as error:
            _log.info("cannot change run %s: %s", entry.run, error.message)
            return
        if record.notifier != before.notifier:
            self._context.report_event(f"run {entry.run}: {self._notifier(entry).why}")
            if replace(record, notifier=before.notifier, version=before.version) == before:
                return
        self._context.report_event(f"run {entry.run}: {record.phase}, {record.why}")

    def _broadcast(self, entry: RunEntry) -> None:
        self._sent_at[entry.run] = self._loop.time()
        self._registry.send_record(entry)


def _replaces(record: RunRecord, stored: bytes) -> bool:
    """Return True if no quorum has decided since this record became provisional.

    Return True as well if the store lost its contents, and a job's run was started again from the beginning.
    """
    other = decode_record(stored)
    if record.provisional:
        return other.version <= record.provisional
    return other.order == record.order and not other.provisional and other.version < record.version
