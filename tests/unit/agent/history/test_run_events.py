"""Events of a run's record follow from two versions of the run."""

from __future__ import annotations

from msgspec.structs import replace

from barnraise.agent.history.run_events import change_entries, with_resumes
from barnraise.history.entries import ChangeKind, Entry, FailureNote, MembershipChange, NoteEntry, RunEnd
from barnraise.history.sentences import running_headline
from barnraise.history.view import CHANGE_STATES, MachineView
from barnraise.runs.record import (
    LeftOutNode,
    NodeReport,
    RecordedFailure,
    RunOutcome,
    RunRecord,
    WorkerFailure,
    WorkerSlot,
    WorkerState,
)

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
_SLOTS = tuple(WorkerSlot(node, 0, "cpu", 1) for node in (A, B, C))
_OLD = RunRecord(
    order=b"", signature=bytes(64), phase="running", generation=1, slots=_SLOTS, workers=_SLOTS, elastic=True
)
_WITHOUT_C = replace(_OLD, generation=2, slots=_SLOTS[:2], why="c is slow; training continues on 2 machines")


def _changes(
    new: RunRecord, old: RunRecord = _OLD, pause: str = "", **states: str
) -> list[tuple[bytes, ChangeKind, str]]:
    nodes = {"a": A, "b": B, "c": C}
    reports = {
        nodes[name]: NodeReport(
            run="train-1",
            incarnation=bytes(16),
            serial=1,
            stage="running",
            workers=(WorkerState(0, state, start=1, signal=9 if state == "ended" else 0),),  # type: ignore[arg-type]
            paused=pause,
        )
        for name, state in states.items()
    }
    entries: list[Entry] = change_entries(old, new, reports, {A, B, C}, 5.0)
    return [
        (entry.node, entry.change, entry.reason) for entry in entries if isinstance(entry, MembershipChange)
    ]


def test_machine_that_a_person_paused_is_paused_and_trains_again() -> None:
    ((node, change, reason),) = _changes(_WITHOUT_C, c="leaving", pause="a person at a paused it")
    assert (node, change) == (C, "paused")
    machine = MachineView(node=A.hex(), name="a", state="trains")
    nas = MachineView(node=C.hex(), name="nas", state=CHANGE_STATES[change], state_reason=reason)
    headline = running_headline([machine, nas], steps=5)
    assert headline == "1 of 2 machines trains; nas is paused: a person at a paused it"
    back = MembershipChange(9.0, C, "recovered", "", 12, 3)
    assert with_resumes([back], [C]) == [replace(back, change="resumed")]
    assert with_resumes([back], [A]) == [back]


def test_machine_without_a_slot_is_evicted_paused_dead_or_gone() -> None:
    assert _changes(_WITHOUT_C) == [(C, "evicted", "c is slow")]
    paused = replace(_WITHOUT_C, paused=(LeftOutNode(C, "its link is slow"),))
    assert _changes(paused) == [(C, "paused", "its link is slow")]
    assert _changes(_WITHOUT_C, c="ended") == [(C, "died", "its worker was killed by signal 9")]
    assert _changes(_WITHOUT_C, c="leaving") == [(C, "left", "the machine was asked to leave")]
    disappearance = replace(_WITHOUT_C, why="c disappeared; training continues on 2 machines")
    assert _changes(disappearance) == [(C, "died", "the machine does not answer")]


def test_machine_that_comes_back_joins_then_recovers() -> None:
    slot = WorkerSlot(C, 0, "cpu", 2)
    joining = replace(_WITHOUT_C, joining=(slot,))
    assert [change[:2] for change in _changes(joining, _WITHOUT_C)] == [(C, "joining")]
    back = replace(_WITHOUT_C, generation=3, slots=(*_SLOTS[:2], slot))
    assert [change[:2] for change in _changes(back, joining)] == [(C, "recovered")]
    new = WorkerSlot(bytes([4]) * 32, 0, "cpu", 2)
    added = replace(_OLD, generation=2, slots=(*_SLOTS, new))
    assert [change[:2] for change in _changes(added)] == [(new.node, "joined")]
    paused = replace(_WITHOUT_C, paused=(LeftOutNode(C, "slow"),))
    assert [change[:2] for change in _changes(back, paused)] == [(C, "resumed")]


def test_same_machines_make_no_event() -> None:
    assert _changes(replace(_OLD, version=2, restarts=1)) == []
    first = replace(_OLD, generation=0, slots=(), workers=())
    assert _changes(_OLD, first) == []


def test_failure_and_end_are_written_once() -> None:
    failure = RecordedFailure(B, WorkerFailure(1, 0, 1, 3, 0, "ValueError\x1b[2J"))
    failed = replace(_OLD, failures=(failure,))
    (note,) = change_entries(_OLD, failed, {}, {A, B, C}, 5.0)
    assert isinstance(note, FailureNote)
    assert (note.node, note.sentence, note.tail) == (B, "it exited with code 3", "ValueError?[2J")
    ended = replace(failed, phase="ended", outcome=RunOutcome(code=1, sentence="it failed"), slots=())
    assert change_entries(failed, ended, {}, {A}, 6.0) == [RunEnd(6.0, 1, "it failed", was_stopped=False)]


def test_provisional_end_is_a_note_until_the_majority_confirms_it() -> None:
    outcome = RunOutcome(code=130, sentence="stopped from a")
    provisional = replace(_OLD, version=5, phase="ended", outcome=outcome, provisional=3)
    (note,) = change_entries(_OLD, provisional, {}, {A}, 5.0)
    assert isinstance(note, NoteEntry)
    assert note.is_warning
    assert note.text.endswith("without a majority of the machines, which may overrule that: stopped from a")
    assert change_entries(provisional, replace(provisional, version=6), {}, {A}, 6.0) == []
    confirmed = replace(provisional, version=6, provisional=0)
    assert change_entries(provisional, confirmed, {}, {A}, 6.0) == [
        RunEnd(6.0, 130, "stopped from a", was_stopped=True)
    ]
    assert change_entries(provisional, replace(_OLD, version=6), {}, {A, B, C}, 6.0) == []
