"""Events of a run by kind, and what displays show of them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from barnraise.history.entries import (
    CheckpointSaved,
    Entry,
    FailureNote,
    GroupStart,
    MachineFacts,
    MembershipChange,
    NoteEntry,
    PlanAdopted,
    RunEnd,
    RunStart,
    TrainingGoal,
)
from barnraise.history.machines.deaths import with_deaths
from barnraise.history.outcome import end_state
from barnraise.history.sentences import because, change_text, counted, listed
from barnraise.history.view import CheckpointView, CurveMark, EventLevel, EventView

_SIGKILL = 9
_KILLED = "Signal 9 often means that the memory was full, or that a person ended the process."
_MARKED = frozenset(
    ["joined", "left", "paused", "resumed", "evicted", "died", "recovered", "plan", "rollback"]
)
_WARNINGS = frozenset(["left", "evicted", "died", "refused", "rollback"])

E = TypeVar("E", bound=Entry)
S = TypeVar("S", PlanAdopted, CheckpointSaved)


class RunEvents:
    """Distinct events of a run, by time."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self.start = next(iter(_of(entries, RunStart)), None)
        self.end = next(reversed(_of(entries, RunEnd)), None)
        self.goal = next(reversed(_of(entries, TrainingGoal)), None)
        self.groups = _of(entries, GroupStart)
        self.plans = sorted(_without_dropped(entries, PlanAdopted), key=lambda plan: (plan.step, plan.at))
        self.facts = {facts.node: facts for facts in _of(entries, MachineFacts)}
        self.moves = _of(entries, MembershipChange)
        self.changes = {change.node: change for change in self.moves}

    def name(self, node: bytes) -> str:
        """Return the name of a machine, or the beginning of its id."""
        facts = self.facts.get(node)
        return (facts.name if facts else "") or (node.hex()[:8] if node else "this machine")

    @cached_property
    def nodes(self) -> tuple[bytes, ...]:
        """Return each machine that was ever in the run, in the order in which it appeared."""
        members = (node for group in self.groups for node in group.members)
        return tuple(dict.fromkeys([*self.facts, *members, *self.changes]))

    @cached_property
    def checkpoints(self) -> tuple[CheckpointView, ...]:
        """Return each checkpoint once, with the machines that hold it."""
        by_step: dict[int, list[CheckpointSaved]] = defaultdict(list)
        for saved in _without_dropped(self._entries, CheckpointSaved):
            by_step[saved.step].append(saved)
        return tuple(
            CheckpointView(
                at=min(copy.at for copy in saved),
                step=step,
                machines=tuple(self.name(copy.node) for copy in saved),
                size_bytes=max(copy.size_bytes for copy in saved) or None,
            )
            for step, saved in sorted(by_step.items())
        )

    @cached_property
    def shown(self) -> tuple[EventView, ...]:
        """Return all events in words, by time."""
        events = with_deaths(event for entry in self._entries for event in self._events_of(entry))
        for checkpoint in self.checkpoints:
            text = _checkpoint_text(checkpoint)
            event = EventView(at=checkpoint.at, kind="checkpoint", step=checkpoint.step, text=text)
            events.append(event)
        return tuple(sorted(events, key=lambda event: event.at))

    @cached_property
    def marks(self) -> tuple[CurveMark, ...]:
        """Return the events that are marked on the curves."""
        return tuple(
            CurveMark(step=event.step, at=event.at, kind=event.kind, text=event.text)
            for event in self.shown
            if event.step is not None and event.kind in _MARKED
        )

    def _events_of(self, entry: Entry) -> Iterable[EventView]:
        match entry:
            case RunStart(at=at, started_by=by):
                yield EventView(at=at, kind="start", text=f"the run started{f' from {by}' if by else ''}")
            case RunEnd(at=at, code=code, sentence=sentence, was_stopped=was_stopped):
                state = end_state(code, was_stopped=was_stopped)
                text = {"ended": "the run ended", "stopped": "the run was stopped"}.get(state)
                level: EventLevel = "error" if state == "failed" else "info"
                yield EventView(
                    at=at, kind="end", level=level, text=because(text or "the run failed", sentence)
                )
            case MembershipChange(at=at, node=node, change=change, reason=reason, step=step):
                yield EventView(
                    at=at,
                    kind=change,
                    level="warning" if change in _WARNINGS else "info",
                    text=change_text(change, self.name(node), reason),
                    step=step,
                    node=node.hex(),
                )
            case PlanAdopted(at=at, step=step, sync=sync, shares=shares):
                names = [self.name(node) for node, _ in shares]
                text = f"new plan{f' for {listed(names)}' if names else ''}: {sync}"
                yield EventView(at=at, kind="plan", step=step, text=text)
            case GroupStart(at=at, step=step, origin=origin, dropped=dropped) if dropped:
                source = "the checkpoint" if origin == "checkpoint" else "the state"
                text = f"training went back to {source} of step {step}; {counted(dropped, 'step')} dropped"
                yield EventView(at=at, kind="rollback", level="warning", step=step, text=text)
            case FailureNote(at=at, node=node, sentence=sentence, tail=tail, signal=signal):
                text = because(f"a worker on {self.name(node)} failed", sentence)
                detail = "\n".join(filter(None, (_KILLED if signal == _SIGKILL else "", tail)))
                yield EventView(
                    at=at, kind="failure", level="error", text=text, node=node.hex(), detail=detail
                )
            case NoteEntry(at=at, text=text, node=node, step=step, is_warning=is_warning):
                level = "warning" if is_warning else "info"
                yield EventView(at=at, kind="note", level=level, text=text, step=step, node=node.hex())
            case _:
                return


def _of(entries: Iterable[Entry], kind: type[E]) -> list[E]:
    return [entry for entry in entries if type(entry) is kind]  # faster; no entry has a subclass


def _without_dropped(entries: Iterable[Entry], kind: type[S]) -> list[S]:
    """Return the plans or checkpoints but those of steps that training has dropped. ``entries``: by time."""
    kept: list[S] = []
    for entry in entries:
        if isinstance(entry, kind):
            kept.append(entry)
        elif isinstance(entry, GroupStart) and entry.dropped:
            kept = [item for item in kept if item.step <= entry.step]
    return kept


def _checkpoint_text(checkpoint: CheckpointView) -> str:
    where = f" on {', '.join(checkpoint.machines)}" if checkpoint.machines else ""
    return f"checkpoint of step {checkpoint.step}{where}"
