"""Checkpoints of a split model: each member saves what it holds, and loads what it needs under any split.

First all members write their parts, then all learn which parts there are, then each machine signs. A part
is what is trained in one unit of the model. Mirrors write copies. Members without a disk, such as a guest in
a sandbox, have theirs written and read by another member, one unit at a time.
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
from barnraise.core.errors import BarnraiseError, CheckpointError, RunError
from barnraise.core.metrics import catalogue
from barnraise.core.sanitize import printable
from barnraise.core.units import format_size
from barnraise.runs.checkpoint_manifest import MOST_PARTS, CheckpointManifest, CheckpointPart, HeldCheckpoint
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.members.member_stage import MemberStage
from barnraise.training.pipeline.members.refusals import read_reports
from barnraise.training.pipeline.members.state_exchange import StateExchange, checked_schedule, is_state
from barnraise.training.pipeline.trained_state import ParameterStates
from barnraise.training.state.checkpoint_manager import CheckpointManager

log = logging.getLogger("barnraise.training")

_MAX_SKELETON = 2 << 20
_MAX_FAILURE = 500
_CHOICES = 8  # of a checkpoint to restore
_OTHER_MODEL = "the checkpoint is of a model that trains other parameters"
_HINT = "Resume with the same adapter, or start a new run."
_TWO_CHECKPOINTS = "the machines have two checkpoints of this step"
_NONE_HINT = "Switch on the machines that saved it, then continue the run: barnraise resume"


class PartReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of a member on what it has written of a checkpoint.

    ``failure``: why it failed; empty if it did not. ``skeleton``: what belongs to no part, of a member that
    trains anything. ``previous``: digest of the checkpoint before, if it knows one; while a checkpoint is
    restored, of this one.
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


class _OpenedParts(NamedTuple):
    """Checkpoint of which this member needs parts. ``own``: what its own units contain."""

    files: PartFiles
    manifest: CheckpointManifest
    own: Mapping[int, Any]


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
    files = {
        (rank, part.number): part
        for rank, report in enumerate(reports)
        if machines[rank] not in failed
        for part in report.parts
    }
    parts = []
    for unit, ranks in plan.writers.items():
        part = next((files[rank, unit] for rank in ranks if (rank, unit) in files), None)
        if part is None:
            return None, frozenset()
        parts.append(part)
    counted = set(parts)
    signing = frozenset(machines[rank] for (rank, _), part in files.items() if part in counted)
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


def restore_failures(outcomes: Sequence[PartReport]) -> list[str]:
    """Return why members cannot read a checkpoint together; empty if all can."""
    failures = {printable(outcome.failure) for outcome in outcomes} - {""}
    if len({outcome.previous for outcome in outcomes} - {""}) > 1:
        failures.add(_TWO_CHECKPOINTS)
    return sorted(failures)


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
        self._has_restored = False
        self._units = tuple(sorted(held.unit_bytes()))  # in which something is trained

    # saving

    def save(
        self,
        manager: GroupManager,
        holders: Mapping[int, Sequence[int]],
        disks: Sequence[bool],
        done: int,
    ) -> None:
        """Save a checkpoint in parts. It counts when all parts are signed.

        ``holders``: by unit, the ranks that have its state; those that train it first. If a part is not
        signed, an older checkpoint stays the newest complete one.
        """
        if not any(disks):  # and still a member asks for it
            return
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
        skeleton = b""
        try:
            skeleton = self._skeleton(info.step)
        except BarnraiseError as error:
            failure = failure or _words(error)
        return PartReport(tuple(parts), skeleton, self._previous, failure)

    def _skeleton(self, done: int) -> bytes:
        """Return what belongs to no part, in the form that exports read; empty if nothing is trained here."""
        schedule = self._held.export_schedule()
        if not schedule:
            return b""
        adapter = {} if self._adapter is None else {"adapter": self._adapter._asdict()}
        hashes = None if self._held.has_frozen else {}
        skeleton = flatten(
            {**adapter, "base": {"hashes": hashes}, "split": {"schedule": schedule}, "done": done}
        ).skeleton
        if len(skeleton) > _MAX_SKELETON:  # the others refuse a longer one
            size, limit = format_size(len(skeleton)), format_size(_MAX_SKELETON)
            raise CheckpointError(f"the names of what is trained take {size}; the limit is {limit}")
        return skeleton

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

        ``wanted``: the units of each rank. A checkpoint that a member cannot read is passed over by all. If
        none is left, raise CheckpointError: a run from step 0 would replace them in the end.
        """
        if chosen is None and self._has_restored:
            raise CheckpointError("the checkpoint that was read before is out of reach", hint=_NONE_HINT)
        if chosen is None or not any(disks):
            return None
        trained = [[unit for unit in units if unit in self._units] for units in wanted]
        transfers = plan_readers(trained, disks)
        rank = manager.rank
        own = trained[rank] if disks[rank] else []
        needed = sorted({*own, *(each.unit for each in transfers if each.sender == rank)})
        why = ""
        for _ in range(_CHOICES):
            opened, failure = self._open(chosen, own, needed)
            digest = opened.manifest.digest if opened is not None else ""
            failures = restore_failures(self._gather(manager, PartReport(previous=digest, failure=failure)))
            if not failures:
                if manager.rank == 0:
                    count = len(chosen.parts)
                    log.warning("resuming from the checkpoint of step %d, in %d parts", chosen.step, count)
                return self._load(manager, chosen, opened, transfers)
            why = "; ".join(failures)
            log.warning("the checkpoint of step %d is passed over: %s", chosen.step, why)
            self._checkpoints.pass_over(chosen)
            older = self.choose(manager)
            if older is None:
                break
            chosen = older
        hint = _HINT if _OTHER_MODEL in why else _NONE_HINT
        raise CheckpointError(f"no checkpoint can be read: {why}", hint=hint)

    def _open(
        self, chosen: HeldCheckpoint, own: Collection[int], needed: Sequence[int]
    ) -> tuple[_OpenedParts | None, str]:
        """Read the parts of a checkpoint that belong to this member. Return why that failed, or no words.

        ``needed``: those, and the ones that it reads for others.
        """
        if chosen.parts != self._units:
            return None, _OTHER_MODEL
        if not needed:
            return None, ""
        try:
            files, manifest = self._checkpoints.fetch_parts(chosen, needed)
            return _OpenedParts(files, manifest, {unit: files.read(manifest, unit) for unit in own}), ""
        except (OSError, BarnraiseError) as error:
            return None, _words(error)

    def _load(
        self,
        manager: GroupManager,
        chosen: HeldCheckpoint,
        opened: _OpenedParts | None,
        transfers: Sequence[Transfer],
    ) -> RestoredState:
        """Check what was read, and read what members without a disk need."""
        schedule: dict[str, Any] = {}
        states: ParameterStates = {}
        if opened is not None:
            schedule = self._schedule_of(opened.manifest)
            for unit, content in opened.own.items():
                states |= self._checked(unit, content)
        for each in transfers:
            sent: ParameterStates = {}
            if each.sender == manager.rank and opened is not None:
                sent = self._checked(each.unit, opened.files.read(opened.manifest, each.unit))
            received, sender_schedule = self._exchange.run(
                manager.group, [each], sent, schedule, {each.sender}
            )
            states |= received
            schedule = schedule or sender_schedule
        self._has_restored = True
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
        return read_reports(manager, _reports, messages)


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
