"""The runs that this machine knows: their newest records, and the status reports of every machine.

Records come from owners and are saved; each is as trustworthy as the signature of its spec. A report is
accepted only from the machine that it is about. Guests receive only runs that they take part in.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.runs.messages import RecordUpdate, ReportUpdate, encode
from barnraise.core.errors import BarnraiseError, ProtocolError, RunError, TrustError
from barnraise.core.flow.events import ChangeEvent
from barnraise.core.names import NamedItem, match_name
from barnraise.core.sanitize import printable
from barnraise.identity import NodeId
from barnraise.membership.storage import MOST_FORGOTTEN
from barnraise.runs.control.eviction import is_waiting_for_group
from barnraise.runs.control.lifecycle import end_forgotten
from barnraise.runs.control.pausing import pause_reason
from barnraise.runs.queue.spec import SignedJob, read_job
from barnraise.runs.record import (
    ENDED,
    DroppedSteps,
    NodeReport,
    RunRecord,
    RunSpec,
    WorkerSlot,
    decode_record,
    encode_record,
    read_spec,
    supersedes,
)

_MAX_ENDED = 100  # runs that have ended
_MAX_ACTIVE = 256
_MAX_GENERATIONS = 16
_MAX_HELD = 64
_HELD_POLL_S = 0.05

_log = logging.getLogger(__name__)


class RunEntry:
    """One run: spec, newest record, and the reports of its machines."""

    def __init__(self, record: RunRecord, order: RunSpec, now: float) -> None:
        self.spec = order
        self.record = record
        self.seen_at = now  # when this version was first seen here; of a run that has ended: its end
        self.stuck_at: float | None = None  # since when a member has waited for a new group
        self.reports: dict[bytes, NodeReport] = {}
        self.dropped: tuple[DroppedSteps, ...] = ()  # steps that this machine trained without a quorum
        self.slots: dict[int, tuple[WorkerSlot, ...]] = {record.generation: record.slots}  # by generation

    @property
    def run(self) -> str:
        """Return the name of the run."""
        return self.spec.run

    @property
    def has_ended(self) -> bool:
        """Tell whether the run has ended."""
        return self.record.phase == ENDED

    def update(self, record: RunRecord, now: float) -> None:
        """Replace the record by a newer version."""
        self.record, self.seen_at = record, now
        self.stuck_at = None
        self.update_stuck(now)
        self.slots[record.generation] = record.slots
        while len(self.slots) > _MAX_GENERATIONS:
            del self.slots[next(iter(self.slots))]

    def is_leaving(self, slot: WorkerSlot) -> bool:
        """Tell whether a worker leaves or is paused; it finishes the current step with its group."""
        if pause_reason(self.record, slot.node):
            return True
        report = self.reports.get(slot.node)
        states = report.workers if report is not None else ()
        return any(
            (state.local_rank, state.start, state.state) == (*slot.key[1:], "leaving") for state in states
        )

    def update_stuck(self, now: float) -> None:
        """Update since when a member has waited for a new group."""
        generation = self.record.generation
        states = (state for report in self.reports.values() for state in report.workers)
        if not any(is_waiting_for_group(state, generation) for state in states):
            self.stuck_at = None
        elif self.stuck_at is None:
            self.stuck_at = now


class RunRegistry:
    """Table of runs, saved on disk and exchanged between machines.

    ``on_record`` is called for each newer version, and ``on_change`` for each version or report.
    ``on_settled`` is called before them, with whether steps trained without a quorum are kept.
    ``on_forgotten`` is called with the name of each run whose record is deleted here. ``needed_runs`` returns
    the ended runs that must stay.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.runs: dict[str, RunEntry] = {}
        self.on_record: Callable[[RunEntry], None] = lambda entry: None
        self.on_settled: Callable[[RunEntry, bool], None] = lambda entry, counts: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_forgotten: Callable[[str], None] = lambda run: None
        self.needed_runs: Callable[[], Collection[str]] = tuple
        self._forgotten: dict[str, bytes] = {}  # hashes of specs by run, oldest first
        self._changed = ChangeEvent()
        self._held: dict[str, tuple[RunRecord, NodeId]] = {}  # orders that wait for a quorum, by run
        self._warned: set[NodeId] = set()  # guests whose refusal was logged

    def load(self) -> None:
        """Load the records that were saved before this start."""
        self._forgotten = dict(self._context.storage.forgotten_runs())
        for run in self._forgotten:
            self.on_forgotten(run)
        for name, value in self._context.storage.runs():
            try:
                record = decode_record(value)
                spec = self._read_spec(record)
            except BarnraiseError:
                self._context.storage.drop_run(name)  # written by another version
                continue
            # The disk has those that ended first before the others, so they are older here, too.
            self.runs[spec.run] = RunEntry(record, spec, self._loop.time())
        self.runs = dict(sorted(self.runs.items(), key=lambda item: item[1].spec.at))

    def reset(self) -> None:
        """Forget all runs of the old cluster."""
        self.runs.clear()
        self._forgotten.clear()

    def _read_spec(self, record: RunRecord) -> RunSpec:
        """Return the spec with the keys that its machines have now; its signer stays as it was."""
        spec = read_spec(record)
        return replace(spec, nodes=self._current(spec.nodes))

    def _current(self, nodes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Return the keys that machines have now."""
        log = self._context.log
        current = (
            node if log.role(NodeId(node)) is not None else log.current(NodeId(node)).raw for node in nodes
        )
        return tuple(dict.fromkeys(current))

    def view_changed(self) -> list[RunEntry]:
        """Follow machines that have changed their keys, and return the runs of such machines."""
        changed = []
        for entry in self.runs.values():
            spec = self._read_spec(entry.record)
            if spec.nodes != entry.spec.nodes:
                entry.spec = spec
                changed.append(entry)
        return changed

    def find(self, text: str, *, exact: bool = False) -> RunEntry:
        """Return a run by its name or a unique prefix; raise RunError unless exactly one matches.

        ``exact``: the beginning of a name is not enough.
        """
        if not self.runs:
            raise RunError("this machine knows no run", hint="Start one: barnraise run SCRIPT")
        named = (NamedItem(run, entry) for run, entry in self.runs.items())
        match = match_name(text, named, kind="run", exact=exact)
        if match.value is None:
            raise RunError(match.problem, hint=match.hint)
        return match.value

    def at_work(self, node: NodeId) -> tuple[str, ...]:
        """Return the runs that have workers on a machine now."""
        return tuple(
            run
            for run, entry in self.runs.items()
            if not entry.has_ended and any(slot.node == node.raw for slot in entry.record.slots)
        )

    def apply(self, record: RunRecord, sender: NodeId | None = None, *, is_ours: bool = False) -> bool:
        """Store a record if it outranks the known one; return False if not.

        ``is_ours``: this machine decided it with a quorum. Raise ProtocolError or RunError if the sender may
        not change the run.
        """
        if sender is not None and self._context.log.role(sender) != "owner":
            self._warn_once(sender)
            raise ProtocolError(f"{sender.short} is a guest and cannot start or change a run")
        spec = self._read_spec(record)
        entry = self.runs.get(spec.run)
        role = self._context.log.role(NodeId(spec.by))
        if role == "guest":
            raise RunError(f"run {spec.run} was started by a guest of this cluster")
        if entry is None and role is None:
            return False  # its owner is removed or not known here yet: no fault of the sender
        if entry is None and self.has_forgotten(spec.run, record):
            self._answer_forgotten(spec.run, record, sender)
            return False
        if entry is None and (others := self._not_named(record, spec)):
            names = " and ".join(self._context.name_of(NodeId(node)) for node in others)
            text = f"run {spec.run} may not use {names}: the option --on of its job names other machines"
            if sender is None:
                raise TrustError(text)
            _log.warning("%s; it came from %s", text, sender.short)
            return False  # a machine may have a new key that is not known here yet
        if entry is not None and record.order != entry.record.order:
            raise ProtocolError(f"two different runs are called {spec.run}")
        if entry is not None and not supersedes(record, entry.record):
            return False
        if sender is not None and self._must_wait(record, entry):
            self._hold(spec.run, record, sender)
            return False
        self._held.pop(spec.run, None)
        if entry is not None and entry.record.provisional and not record.provisional:
            self._settle(entry, record, is_ours)
        if entry is None:
            self._evict_ended()
            entry = self.runs[spec.run] = RunEntry(record, spec, self._loop.time())
        self._replace(entry, record)
        if sender is not None:
            self._forward(entry, sender)
        return True

    def has_forgotten(self, run: str, record: RunRecord) -> bool:
        """Tell whether this run has ended and its record was deleted here; another may have its name."""
        return run in self._forgotten and self._forgotten[run] == _spec_digest(record)

    def _answer_forgotten(self, run: str, record: RunRecord, sender: NodeId | None) -> None:
        """Tell a machine that was away that the run has ended; its old record must not revive the run."""
        if sender is None or record.phase == ENDED:
            return
        self.on_forgotten(run)  # that machine may have written its record again
        if self._context.log.role(self._context.me) == "owner":
            self._context.send_bulk(sender, encode(RecordUpdate(end_forgotten(record))))

    def _not_named(self, record: RunRecord, spec: RunSpec) -> list[bytes]:
        """Return the machines of an attempt that are not among those that the owner of its job named."""
        named = read_job(SignedJob(spec.job, record.signature)).nodes if spec.job else ()
        allowed = self._current(named)
        return [node for node in spec.nodes if node not in allowed] if allowed else []

    def _must_wait(self, record: RunRecord, entry: RunEntry | None) -> bool:
        """Return True if an order must wait until a quorum confirms this machine's view.

        A machine that slept may not know that the sender was removed. Only a run that goes on here without a
        quorum takes provisional changes meanwhile.
        """
        if entry is not None and not entry.has_ended and record.provisional:
            return False
        return not self._context.member.is_current(self._loop.time())

    def _hold(self, run: str, record: RunRecord, sender: NodeId) -> None:
        if run in self._held or len(self._held) < _MAX_HELD:
            self._held[run] = (record, sender)

    def apply_held(self) -> None:
        """Apply the orders that waited, once a quorum confirms this machine's view."""
        if not self._held or not self._context.member.is_current(self._loop.time()):
            return
        held, self._held = self._held, {}
        for record, sender in held.values():
            if self._context.log.role(sender) == "owner":
                try:
                    self.apply(record, sender)
                except BarnraiseError as error:
                    _log.info("an order that waited is rejected: %s", error.message)

    async def wait_for_held(self, seconds: float) -> None:
        """Wait until no order waits for a quorum: a machine that just came back would show old runs."""
        deadline = self._loop.time() + seconds
        while self._held and self._loop.time() < deadline:
            await asyncio.sleep(_HELD_POLL_S)

    def _settle(self, entry: RunEntry, decided: RunRecord, is_ours: bool) -> None:
        """Report whether steps that were trained here without a quorum are kept."""
        own = entry.record
        is_same = is_ours or (decided.generation, decided.slots) == (own.generation, own.slots)
        outcome = "kept" if is_same else "discarded because the majority had moved on"
        self._context.report_event(f"run {entry.run}: steps trained here without a quorum were {outcome}")
        self.on_settled(entry, is_same)

    def _replace(self, entry: RunEntry, record: RunRecord) -> None:
        self._context.storage.keep_run(entry.run, encode_record(record))
        entry.update(record, self._loop.time())
        self._announce()
        self.on_record(entry)

    def apply_report(self, sender: NodeId, report: NodeReport) -> None:
        """Store the status report of a machine, unless a newer one is known."""
        entry = self.runs.get(report.run)
        if entry is None or sender.raw not in entry.spec.nodes:
            return
        last = entry.reports.get(sender.raw)
        if last is not None and last.incarnation == report.incarnation and report.serial <= last.serial:
            return
        entry.reports[sender.raw] = (
            report if self._context.log.role(sender) == "owner" else _sanitized(report)
        )
        entry.update_stuck(self._loop.time())
        self._announce()

    def send_record(self, entry: RunEntry) -> None:
        """Send the record of a run to all connected machines that may see it."""
        message = encode(RecordUpdate(entry.record))
        for node in self._context.linked_nodes():
            if self._may_see(node, entry):
                self._context.send_bulk(node, message)

    def _forward(self, entry: RunEntry, sender: NodeId) -> None:
        """Forward a record to the machines of the run, because its sender may not reach all of them."""
        if self._context.log.role(self._context.me) != "owner":
            return
        at_work = {slot.node for slots in entry.slots.values() for slot in slots}
        message = encode(RecordUpdate(entry.record))
        for node in self._context.linked_nodes():
            if node != sender and node.raw in at_work:
                self._context.send_bulk(node, message)

    def send_report(self, report: NodeReport) -> None:
        """Store this machine's report and send it to every owner, as any may coordinate next."""
        entry = self.runs.get(report.run)
        if entry is None:
            _log.warning("a report about run %s is not sent: its record is not kept any more", report.run)
            return
        report = replace(report, dropped=entry.dropped)
        self.apply_report(self._context.me, report)
        message = encode(ReportUpdate(report))
        for node in self._context.linked_nodes():
            if self._context.log.role(node) == "owner":
                self._context.send_bulk(node, message)

    def link_up(self, node: NodeId) -> None:
        """Send records and own reports to a machine that may have missed some."""
        for entry in self.runs.values():
            if not self._may_see(node, entry):
                continue
            if self._context.log.role(self._context.me) == "owner":
                self._context.send_bulk(node, encode(RecordUpdate(entry.record)))
            own_report = entry.reports.get(self._context.me.raw)  # also of an ended run: it names the results
            if own_report is not None and self._context.log.role(node) == "owner":
                self._context.send_bulk(node, encode(ReportUpdate(own_report)))

    async def wait_for_change(self, seconds: float) -> bool:
        """Wait for a new record or report; return False after ``seconds``."""
        return await self._changed.wait(seconds)

    def _announce(self) -> None:
        self._changed.announce()
        self.on_change()

    def _warn_once(self, guest: NodeId) -> None:
        if guest not in self._warned:
            self._warned.add(guest)
            _log.warning("%s is a guest and cannot start or change a run (logged once)", guest.short)

    def _may_see(self, node: NodeId, entry: RunEntry) -> bool:
        role = self._context.log.role(node)
        return role == "owner" or (role == "guest" and node.raw in entry.spec.nodes)

    def _evict_ended(self) -> None:
        """Forget the runs that ended first, before another one is added; those that are needed stay."""
        ended = [entry for entry in self.runs.values() if entry.has_ended]
        if len(self.runs) - len(ended) >= _MAX_ACTIVE:
            raise RunError(
                f"there are {_MAX_ACTIVE} active runs already", hint="Stop some: barnraise stop RUN"
            )
        if len(ended) < _MAX_ENDED:
            return
        needed = self.needed_runs()
        others = [entry for entry in ended if entry.run not in needed and not entry.record.provisional]
        others.sort(key=lambda entry: entry.seen_at)
        for entry in others[: max(0, len(others) - _MAX_ENDED + 1)]:
            self._forget(entry)

    def _forget(self, entry: RunEntry) -> None:
        digest = _spec_digest(entry.record)
        self._context.storage.forget_run(entry.run, digest)
        del self.runs[entry.run]
        self._forgotten.pop(entry.run, None)
        self._forgotten[entry.run] = digest
        while len(self._forgotten) > MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        self.on_forgotten(entry.run)


def _spec_digest(record: RunRecord) -> bytes:
    """Return the hash that tells a run from a later one of the same name."""
    return hashlib.sha256(record.order).digest()


def _sanitized(report: NodeReport) -> NodeReport:
    """Return a guest's report without control characters and pause requests.

    Owners see its texts in a terminal, and only owners may pause machines.
    """
    workers = tuple(
        replace(
            state,
            tail=printable(state.tail, also="\n\t"),
            wait_reason=printable(state.wait_reason),
            pauses=(),
            pauses_in=0,
            pauses_why="",
            progress=None
            if state.progress is None
            else replace(state.progress, metric=printable(state.progress.metric)),
        )
        for state in report.workers
    )
    failures = tuple(
        replace(failure, tail=printable(failure.tail, also="\n\t")) for failure in report.failures
    )
    rest = msgspec.to_builtins(replace(report, workers=(), failures=()), builtin_types=(bytes,))
    return replace(msgspec.convert(_all_printable(rest), NodeReport), workers=workers, failures=failures)


def _all_printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_all_printable(item) for item in value]
    return value
