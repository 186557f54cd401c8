"""Entries of a run's record that follow from a change of the run. Pure.

Every machine of a run writes the same events, so that they survive the death of any other.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from barnraise.core.sanitize import printable
from barnraise.history.entries import (
    ChangeKind,
    Entry,
    FailureNote,
    MachineFacts,
    MembershipChange,
    NoteEntry,
    RunEnd,
    RunStart,
)
from barnraise.history.sentences import because
from barnraise.runs.control.worker_status import reported_states
from barnraise.runs.record import NodeReport, RecordedFailure, RunOutcome, RunRecord, RunSpec, WorkerState
from barnraise.topology import Machine

UNANSWERED = "the machine does not answer"  # the reason of a machine that is gone without a word
_PROVISIONAL_END = "the run ended here without a majority of the machines, which may overrule that"
_NAME, _WORD, _SENTENCE = 64, 200, 4000

States = Mapping[tuple[bytes, int, int], WorkerState]


def start_entries(
    spec: RunSpec,
    name_of: Callable[[bytes], str],
    machine_of: Callable[[bytes], Machine | None],
) -> list[Entry]:
    """Return what is known at the start of a run: what was asked for, and its machines."""
    starter = machine_of(spec.by)
    return [
        RunStart(
            at=spec.at,
            command=printable(shlex.join(["barnraise", "run", *spec.program.command]))[:_SENTENCE],
            title=printable(spec.options.title)[:_WORD],
            started_by=printable(name_of(spec.by))[:_NAME],
            options=tuple(_options(spec)),
            environment=tuple(_environment(starter)),
            resumes=spec.resumes[0] if spec.resumes else "",
        ),
        *(machine_entry(node, name_of(node), machine_of(node)) for node in spec.nodes),
    ]


def machine_entry(node: bytes, name: str, machine: Machine | None) -> MachineFacts:
    """Return what is known of a machine."""
    name = printable(name)[:_NAME]
    if machine is None:
        return MachineFacts(node, name)
    device = next((device for device in machine.devices if device.kind != "cpu"), None)
    return MachineFacts(
        node,
        name,
        printable(device.name if device is not None else machine.cpu_name)[:_WORD],
        float((device.memory_bytes if device is not None else 0) or machine.memory_bytes),
        printable(f"{machine.os} {machine.os_version}")[:_WORD],
    )


def change_entries(
    old: RunRecord,
    new: RunRecord,
    reports: Mapping[bytes, NodeReport],
    present: Collection[bytes],
    at: float,
) -> list[Entry]:
    """Return the events between two versions of a run.

    ``reports``: of the machines. ``present``: machines that are in the cluster's view.
    """
    known = {failure.key for failure in old.failures}
    entries: list[Entry] = [
        failure_entry(failure, at) for failure in new.failures if failure.key not in known
    ]
    if new.phase == "ended" and new.outcome is not None:
        return [*entries, *_end_entries(old, new, new.outcome, at)]
    step = _newest_step(reported_states(reports))
    for node, change, reason in _membership_changes(old, new, reports, present):
        reason = printable(reason)[:_SENTENCE]
        entries.append(MembershipChange(at, node, change, reason, step, new.generation))
    return entries


def with_resumes(entries: Iterable[Entry], paused: Collection[bytes]) -> list[Entry]:
    """Return the entries; a machine that was ``paused`` does not recover, but trains again."""
    return [
        replace(entry, change="resumed")
        if isinstance(entry, MembershipChange) and entry.change == "recovered" and entry.node in paused
        else entry
        for entry in entries
    ]


def end_entry(outcome: RunOutcome, at: float) -> RunEnd:
    """Return the entry of the end of a run."""
    return RunEnd(at, outcome.code, printable(outcome.sentence)[:_SENTENCE], outcome.is_stop)


def failure_entry(recorded: RecordedFailure, at: float) -> FailureNote:
    """Return the entry of a failed worker."""
    failure = recorded.failure
    return FailureNote(
        at=at,
        node=recorded.node,
        sentence=_exit_sentence(failure.code, failure.signal),
        rank=failure.rank,
        code=failure.code,
        signal=failure.signal,
        start=failure.start,
        tail=printable(failure.tail, also="\n\t")[-_SENTENCE:],
    )


def _end_entries(old: RunRecord, new: RunRecord, outcome: RunOutcome, at: float) -> Iterator[Entry]:
    """Yield the end of a run. A provisional one is a note only, because the majority may overrule it."""
    if not new.provisional and (old.phase != "ended" or old.provisional):
        yield end_entry(outcome, at)
    elif new.provisional and old.phase != "ended":
        text = because(_PROVISIONAL_END, printable(outcome.sentence))[:_SENTENCE]
        yield NoteEntry(at, text, is_warning=True)


def _exit_sentence(code: int, signal: int) -> str:
    return f"it was killed by signal {signal}" if signal else f"it exited with code {code}"


def _membership_changes(
    old: RunRecord, new: RunRecord, reports: Mapping[bytes, NodeReport], present: Collection[bytes]
) -> Iterator[tuple[bytes, ChangeKind, str]]:
    """Yield each machine whose part in the run has changed, how, and why."""
    was_paused = {machine.node for machine in old.paused}
    earlier = {slot.node for slot in old.workers}
    has_started = old.generation > 0
    for node in [node for node in old.nodes if node not in new.nodes]:
        departure = _departure(node, old, new, reports, present)
        if departure is not None:
            yield node, *departure
    for node in dict.fromkeys(slot.node for slot in new.joining):
        if node not in {slot.node for slot in old.joining} | set(new.nodes):
            yield node, "joining", "it receives the state while the others train"
    for node in [node for node in new.nodes if node not in old.nodes and has_started]:
        if node in was_paused:
            yield node, "resumed", ""
        else:
            yield node, "recovered" if node in earlier else "joined", ""
    known = {machine.node for machine in old.left_out}
    for machine in new.left_out:
        if machine.node not in known:
            yield machine.node, "refused", machine.why


def _departure(
    node: bytes,
    old: RunRecord,
    new: RunRecord,
    reports: Mapping[bytes, NodeReport],
    present: Collection[bytes],
) -> tuple[ChangeKind, str] | None:
    """Return how and why a machine has left the group; None if its workers have finished the script."""
    for machine in new.paused:
        if machine.node == node:
            return "paused", machine.why
    known = {failure.key for failure in old.failures}
    for failure in new.failures:
        if failure.node == node and failure.key not in known:
            return "died", _exit_sentence(failure.failure.code, failure.failure.signal).replace(
                "it ", "its worker ", 1
            )
    states = reported_states(reports)
    workers = [states[slot.key] for slot in old.slots if slot.node == node and slot.key in states]
    for worker in workers:
        if worker.failed:
            return "died", _exit_sentence(worker.code, worker.signal).replace("it ", "its worker ", 1)
    if any(worker.state == "leaving" for worker in workers):
        pause = reports[node].paused  # by a person, or by hours, battery or connection that a person set
        return ("paused", pause) if pause else ("left", "the machine was asked to leave")
    if workers and all(worker.state == "ended" for worker in workers):
        return None
    if node not in present or "disappeared" in new.why:
        return "died", UNANSWERED
    return "evicted", new.why.rpartition("; ")[0] or new.why


def _newest_step(states: States) -> int | None:
    return max((state.progress.step for state in states.values() if state.progress is not None), default=None)


def _options(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield the options of the run that are not as by default."""
    options = spec.options
    for name in options.__struct_fields__:
        value, default = getattr(options, name), getattr(type(options)(), name)
        if value != default and name != "title":
            yield name.replace("_", "-")[:_WORD], printable(str(value))[:_WORD]


def _environment(machine: Machine | None) -> Iterator[tuple[str, str]]:
    if machine is not None:
        yield "python", printable(machine.python)[:_WORD]
        yield "torch", printable(machine.torch or "none")[:_WORD]
        yield "barnraise", printable(machine.barnraise)[:_WORD]
