"""Checkpoints of a split model: each member saves what it holds, and loads what it needs under any split.

First all members write their parts, then all learn which parts there are, then each machine signs. A part
is what is trained in one unit of the model. Mirrors write copies. What only members without a disk hold, such
as a guest in a sandbox, another member writes and reads for them, one unit at a time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta

from barnraise.checkpoint.adapter_files import AdapterDescription
from barnraise.checkpoint.files import CheckpointInfo
from barnraise.checkpoint.parts import PartFiles, WrittenParts, shared_state
from barnraise.checkpoint.serialization import flatten
from barnraise.core import metrics
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError, RunError
from barnraise.core.metrics import catalogue
from barnraise.runs.checkpoint_manifest import MOST_PARTS, CheckpointManifest, CheckpointPart, HeldCheckpoint
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.members.member_stage import MemberStage
from barnraise.training.pipeline.members.state_exchange import StateExchange, checked_schedule, is_state
from barnraise.training.pipeline.trained_state import ParameterStates
from barnraise.training.state.checkpoint_manager import CheckpointManager

log = logging.getLogger("barnraise.training")

_MAX_SKELETON = 2 << 20
_MAX_FAILURE = 500
_UNREADABLE = "what another worker says about a checkpoint cannot be read"
_OTHER_MODEL = "the checkpoint is of a model that trains other parameters"
_HINT = "Resume with the same adapter, or start a new run."


class PartReport(msgspec.Struct, frozen=True, array_like=True):
    """What a member has written of a checkpoint. ``failure``: why it failed; empty if it did not.

    ``skeleton``: what belongs to no part, of a member that trains anything. ``previous``: digest of the
    checkpoint before, if it knows one.
    """

    parts: Annotated[tuple[CheckpointPart, ...], Meta(max_length=MOST_PARTS)] = ()
    skeleton: Annotated[bytes, Meta(max_length=_MAX_SKELETON)] = b""
    previous: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    failure: Annotated[str, Meta(max_length=_MAX_FAILURE)] = ""


class WritePlan(NamedTuple):
    """Ranks that write each unit, on different machines. The first one whose file is there counts.

    ``transfers``: units that no member with a disk holds, which one receives first.
    """

    writers: dict[int, tuple[int, ...]]
    transfers: tuple[Transfer, ...]


class RestoredState(NamedTuple):
    """State from a checkpoint of this many steps, by name."""

    done: int
    states: ParameterStates
    schedule: dict[str, Any]


_reports = msgspec.msgpack.Decoder(PartReport)


def plan_writers(
    holders: Mapping[int, Sequence[int]], machines: Sequence[str], disks: Sequence[bool], copies: int
) -> WritePlan:
    """Return which ranks write which units. At least one rank has a disk.

    ``holders``: by unit, the ranks that have its state; the ones that train it come first.
    """
    writers: dict[int, tuple[int, ...]] = {}
    transfers = []
    sent: Counter[int] = Counter()
    for unit, ranks in sorted(holders.items()):
        chosen: dict[str, int] = {}
        for rank in ranks:
            if disks[rank] and len(chosen) < copies:
                chosen.setdefault(machines[rank], rank)
        if not chosen:
            receiver = _least_busy(disks, sent)
            transfers.append(Transfer(unit, ranks[0], receiver))
            chosen[machines[receiver]] = receiver
        writers[unit] = tuple(chosen.values())
    return WritePlan(writers, tuple(transfers))


def plan_readers(wanted: Sequence[Collection[int]], disks: Sequence[bool]) -> list[Transfer]:
    """Return which rank with a disk reads which unit for which rank without one.

    ``wanted``: the units that each rank needs.
    """
    sent: Counter[int] = Counter()
    return [
        Transfer(unit, _least_busy(disks, sent), rank)
        for rank, units in enumerate(wanted)
        if not disks[rank]
        for unit in sorted(units)
    ]


def combine_reports(
    plan: WritePlan, reports: Sequence[PartReport], machines: Sequence[str]
) -> tuple[WrittenParts | None, frozenset[str]]:
    """Return the parts of the checkpoint, and the machines that sign it; None if a part is missing.

    A machine on which any worker failed does not count. Mirrors on processors of another kind may differ in
    the last bits: their files do not count either.
    """
    failed = {machines[rank] for rank, report in enumerate(reports) if report.failure}
    found = {
        (rank, part.number): part
        for rank, report in enumerate(reports)
        if machines[rank] not in failed
        for part in report.parts
    }
    parts = []
    for unit, ranks in plan.writers.items():
        part = next((found[rank, unit] for rank in ranks if (rank, unit) in found), None)
        if part is None:
            return None, frozenset()
        parts.append(part)
    counted = set(parts)
    signing = frozenset(machines[rank] for (rank, _), part in found.items() if part in counted)
    first = next((report for report in reports if report.skeleton), None)
    if first is None:
        return None, frozenset()
    return WrittenParts(parts, first.skeleton, first.previous or None), signing


def is_complete(
    written: WrittenParts, reports: Sequence[PartReport], machines: Sequence[str], signed: Collection[str]
) -> bool:
    """Tell whether the machines that have signed a checkpoint have all of its parts together."""
    there = {
        part for rank, report in enumerate(reports) if machines[rank] in signed for part in report.parts
    }
    return there.issuperset(written.parts)


def _least_busy(disks: Sequence[bool], sent: Counter[int]) -> int:
    rank = min((rank for rank, has_disk in enumerate(disks) if has_disk), key=lambda rank: (sent[rank], rank))
    sent[rank] += 1
    return rank


class StageCheckpoints:
    """Saves and restores what the members of a group train. All members call its methods together."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        held: MemberStage,
        exchange: StateExchange,
        adapter: AdapterDescription | None,
    ) -> None:
        self._checkpoints, self._held, self._exchange = checkpoints, held, exchange
        self._adapter = adapter
        self._previous = ""
        self._units = tuple(sorted(held.unit_bytes()))  # in which something is trained

    # saving

    def save(
        self,
        manager: GroupManager,
        holders: Mapping[int, Sequence[int]],
        disks: Sequence[bool],
        done: int,
    ) -> None:
        """Save a checkpoint. ``holders``: by unit, the ranks that have its state; those that train it first.

        It counts when all parts are signed. Otherwise an older one stays the newest complete one.
        """
        start = time.monotonic()
        machines, rank = manager.machines(), manager.rank
        trained = {unit: holders[unit] for unit in self._units}
        plan = plan_writers(trained, machines, disks, self._checkpoints.copies)
        info = CheckpointInfo(done, manager.generation, manager.provisional, self._checkpoints.copies)
        own_ranks = [other for other, machine in enumerate(machines) if machine == machines[rank]]
        leads = rank == next((other for other in own_ranks if disks[other]), -1)
        reports = self._gather(manager, self._write(manager, plan, info, leads=leads))
        written, signing = combine_reports(plan, reports, machines)
        failure = ""
        if leads:
            own = [part for other in own_ranks for part in reports[other].parts]
            failure = self._sign(info, written if machines[rank] in signing else None, own)
        outcomes = self._gather(manager, PartReport(failure=failure))
        signed = signing - {machines[other] for other, outcome in enumerate(outcomes) if outcome.failure}
        if written is not None and is_complete(written, reports, machines, signed):
            self._previous = written.digest
            nodes = [bytes.fromhex(machine) for machine in sorted(signed)]
            self._checkpoints.note_holders(done, nodes, manager.generation)
            if leads:
                self._remove_outdated(done)
        if rank == 0:
            _log_failures(manager, reports, outcomes, done)
        duration_s = time.monotonic() - start
        if leads and machines[rank] in signed:
            metrics.histogram(catalogue.CHECKPOINT_TIME).observe(duration_s)
        self._checkpoints.note_duration(duration_s)

    def _remove_outdated(self, done: int) -> None:
        try:
            self._checkpoints.part_files().remove_outdated(done)
        except OSError as error:  # there is less space on the disk, and nothing else
            log.warning("old checkpoints were not removed: %s", error)

    def _write(
        self, manager: GroupManager, plan: WritePlan, info: CheckpointInfo, *, leads: bool
    ) -> PartReport:
        """Write the parts of this member, and those that it receives."""
        files = self._checkpoints.part_files() if self._checkpoints.has_disk else None
        parts: list[CheckpointPart] = []
        moved = {each.unit for each in plan.transfers}
        failure = ""

        def write(unit: int, states: ParameterStates) -> None:
            nonlocal failure
            if files is None or failure:
                return
            try:
                parts.append(files.write(info, unit, states))
            except (OSError, BarnraiseError) as error:
                failure = _words(error)

        if files is not None and leads:
            files.remove_drafts(info)
        for unit, ranks in plan.writers.items():
            if unit not in moved and manager.rank in ranks:
                write(unit, self._held.export_unit(unit))
        for each in plan.transfers:
            states = self._held.export_unit(each.unit) if each.sender == manager.rank else {}
            received, _ = self._exchange.run(manager.group, [each], states, {}, ())
            if each.receiver == manager.rank:
                write(each.unit, received)
        schedule = self._held.export_schedule()
        skeleton = self._skeleton(schedule, info.step) if schedule else b""
        return PartReport(tuple(parts), skeleton, self._previous, failure)

    def _skeleton(self, schedule: Mapping[str, Any], done: int) -> bytes:
        """Return what belongs to no part, in the form that exports read."""
        adapter = {} if self._adapter is None else {"adapter": self._adapter._asdict()}
        hashes = None if self._held.has_frozen else {}
        return flatten(
            {**adapter, "base": {"hashes": hashes}, "split": {"schedule": schedule}, "done": done}
        ).skeleton

    def _sign(self, info: CheckpointInfo, written: WrittenParts | None, own: Sequence[CheckpointPart]) -> str:
        """Turn the draft of this machine into a checkpoint, or remove it. Return why that failed."""
        files = self._checkpoints.part_files()
        try:
            if written is not None:
                files.seal(info, written, own)
                return ""
        except (OSError, BarnraiseError) as error:
            files.drop(info)
            return _words(error)
        files.drop(info)
        return ""

    # restoring

    def choose(self, manager: GroupManager) -> HeldCheckpoint | None:
        """Choose the newest checkpoint that the machines in reach have together."""
        return self._checkpoints.choose_parts(manager)

    def restore(
        self,
        manager: GroupManager,
        chosen: HeldCheckpoint | None,
        wanted: Sequence[Collection[int]],
        disks: Sequence[bool],
    ) -> RestoredState | None:
        """Read what this member needs of a checkpoint. Return None if there is no checkpoint to start from.

        ``wanted``: the units of each rank. A checkpoint that a member cannot read is passed over by all.
        """
        if chosen is None:
            return None
        trained = [[unit for unit in units if unit in self._units] for units in wanted]
        transfers = plan_readers(trained, disks)
        rank = manager.rank
        own = trained[rank] if disks[rank] else []
        needed = sorted({*own, *(each.unit for each in transfers if each.sender == rank)})
        while True:
            if chosen.parts != self._units:
                raise RunError(_OTHER_MODEL, hint=_HINT)
            opened: tuple[PartFiles, CheckpointManifest] | None = None
            raw: dict[int, Any] = {}
            failure = ""
            try:
                if needed:
                    files, manifest = opened = self._checkpoints.fetch_parts(chosen, needed)
                    raw = {unit: files.read(manifest, unit) for unit in own}
            except (OSError, BarnraiseError) as error:
                failure = _words(error)
            outcomes = self._gather(manager, PartReport(failure=failure))
            if not any(outcome.failure for outcome in outcomes):
                break
            for failed in sorted({outcome.failure for outcome in outcomes} - {""}):
                log.warning("the checkpoint of step %d is passed over: %s", chosen.step, failed)
            self._checkpoints.pass_over(chosen)
            chosen = self.choose(manager)
            if chosen is None:
                return None
        if manager.rank == 0:
            log.warning("resuming from step %d, whose checkpoint is in %d parts", chosen.step, len(chosen.parts))
        return self._load(manager, chosen, opened, raw, transfers)

    def _load(
        self,
        manager: GroupManager,
        chosen: HeldCheckpoint,
        opened: tuple[PartFiles, CheckpointManifest] | None,
        raw: Mapping[int, Any],
        transfers: Sequence[Transfer],
    ) -> RestoredState:
        """Check what was read, and read what members without a disk need."""
        schedule: dict[str, Any] = {}
        if opened is not None:
            schedule = self._schedule_of(opened[1])
        states: ParameterStates = {}
        for unit, content in raw.items():
            states |= self._checked(unit, content)
        for each in transfers:
            sent: ParameterStates = {}
            if each.sender == manager.rank and opened is not None:
                files, manifest = opened
                sent = self._checked(each.unit, files.read(manifest, each.unit))
            received, sender_schedule = self._exchange.run(
                manager.group, [each], sent, schedule, {each.sender}
            )
            states |= received
            schedule = schedule or sender_schedule
        return RestoredState(chosen.step, states, schedule)

    def _schedule_of(self, manifest: CheckpointManifest) -> dict[str, Any]:
        """Return the learning rates of a checkpoint. Raise RunError if it has none."""
        state = shared_state(manifest)
        split = state.get("split") if isinstance(state, dict) else None
        if not isinstance(split, dict):
            raise RunError("the checkpoint is of a training whose model was not split", hint=_HINT)
        return checked_schedule(split.get("schedule", {}))

    def _checked(self, unit: int, content: Any) -> ParameterStates:
        """Return the states of a unit, without tensors of its file in what the optimizer keeps."""
        trained = self._held.trained
        if (
            not isinstance(content, dict)
            or sorted(content) != self._held.names_of_unit(unit)
            or not all(map(is_state, content.values()))
            or any(state["value"].shape != trained[name].shape for name, state in content.items())
        ):
            raise RunError(_OTHER_MODEL, hint=_HINT)
        return {
            name: {
                "value": state["value"],
                "memory": {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state["memory"].items()
                },
            }
            for name, state in content.items()
        }

    def _gather(self, manager: GroupManager, report: PartReport) -> list[PartReport]:
        messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(report))
        return [decode(_reports, message, _UNREADABLE) for message in messages]


def _log_failures(
    manager: GroupManager, reports: Sequence[PartReport], outcomes: Sequence[PartReport], done: int
) -> None:
    for rank, pair in enumerate(zip(reports, outcomes, strict=True)):
        for failure in (each.failure for each in pair if each.failure):
            log.warning(
                "the checkpoint of step %d was not written on %s: %s", done, manager.name_of(rank), failure
            )


def _words(error: OSError | BarnraiseError) -> str:
    reason = error.message if isinstance(error, BarnraiseError) else error.strerror or str(error)
    return (reason or type(error).__name__)[:_MAX_FAILURE]
