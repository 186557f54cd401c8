"""Builder of the read model from the entries of one merged history. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from barnraise.history.curves import build_curves
from barnraise.history.entries import (
    CheckpointSaved,
    Entry,
    FailureNote,
    GroupStart,
    LinkSample,
    MachineFacts,
    MachineSample,
    MembershipChange,
    NoteEntry,
    PlanAdopted,
    RunEnd,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.merge import merge
from barnraise.history.sentences import because, change_text, counted, ended_headline, running_headline
from barnraise.history.step_table import RECENT_STEPS, StepTable
from barnraise.history.view import (
    CHANGE_STATES,
    CheckpointView,
    CurveMark,
    CurveView,
    EventLevel,
    EventView,
    LinkView,
    MachineView,
    PlanView,
    RunState,
    RunView,
    SamplePoint,
    StartView,
)

MOST_SAMPLES = 500  # of one machine
_STOPPED = 130
_MARKED = frozenset(
    ["joined", "left", "paused", "resumed", "evicted", "died", "recovered", "plan", "rollback"]
)
_WARNINGS = frozenset(["left", "evicted", "died", "refused", "rollback"])

E = TypeVar("E", bound=Entry)


def build_view(entries: Sequence[Entry], *, run: str = "", now: float | None = None) -> RunView:
    """Return what a display shows of a run.

    ``entries``: of one log, or of a merged history. ``now``: seconds since 1970; the last entry's time if
    not given.
    """
    return _Builder(merge([entries]), now).view(run)


class _Builder:
    """Entries by type, and the parts of the view that are built of them."""

    def __init__(self, entries: Sequence[Entry], now: float | None) -> None:
        self._entries = entries
        self._starts = _of(entries, RunStart)
        self._ends = _of(entries, RunEnd)
        self._goals = _of(entries, TrainingGoal)
        self._groups = _of(entries, GroupStart)
        self._plans = sorted(_of(entries, PlanAdopted), key=lambda plan: (plan.step, plan.at))
        self._table = StepTable(_of(entries, StepBatch))
        self._names = {facts.node: facts.name for facts in _of(entries, MachineFacts)}
        times = [self._table.last_at, *(getattr(entry, "at", 0.0) for entry in entries)]
        self._at = max(times) if now is None else now

    def view(self, run: str) -> RunView:
        table = self._table
        start = self._starts[0] if self._starts else None
        end = self._ends[-1] if self._ends else None
        goal = self._goals[-1] if self._goals else TrainingGoal(0.0)
        plan = self._plans[-1] if self._plans else None
        machines = self._machines(ended=end is not None)
        started_at = start.at if start is not None else _first_time(self._entries)
        finish = end.at if end is not None else self._at
        elapsed_s = max(0.0, finish - started_at) if started_at is not None else 0.0
        state: RunState = "running" if end is None else _end_state(end.code)
        curves = build_curves(_of(self._entries, ValueBatch))
        steps_per_s, samples_per_s = table.recent_rates()
        step_s = table.step_s(newest=RECENT_STEPS)
        events = self._events()
        energies = [machine.energy_j for machine in machines if machine.energy_j is not None]
        return RunView(
            run=run,
            state=state,
            headline=self._headline(state, machines, goal, elapsed_s),
            start=_start_view(start, is_session=bool(self._groups or self._goals)),
            started_at=started_at,
            ended_at=end.at if end is not None else None,
            exit_code=end.code if end is not None else None,
            outcome=end.sentence if end is not None else "",
            at=self._at,
            counts=goal.counts,
            step=table.end,
            first_step=table.first,
            total_steps=goal.total,
            eta_s=_eta(goal.total, table.end, steps_per_s) if end is None else None,
            elapsed_s=elapsed_s,
            batch=goal.batch,
            samples=table.samples,
            steps_per_s=steps_per_s,
            samples_per_s=samples_per_s,
            step_s=step_s,
            predicted_step_s=(plan.step_s or None) if plan is not None else None,
            energy_j=sum(energies) if energies else None,
            machines=machines,
            links=self._links(),
            metric=_metric(goal.metric, curves),
            curves=curves,
            marks=_marks(events),
            rates=table.rates(self._groups),
            samples_of=self._samples(),
            phases=table.phases(plan),
            events=events,
            plans=self._plan_views(),
            checkpoints=self._checkpoints(),
            rolled_back=sum(group.dropped for group in self._groups),
            missing=table.missing,
            phase_totals_s=table.phase_totals_s(),
        )

    def _headline(
        self, state: RunState, machines: Sequence[MachineView], goal: TrainingGoal, elapsed_s: float
    ) -> str:
        if state == "running":
            return running_headline(machines, steps=self._table.end)
        steps = counted(self._table.end, goal.counts)
        return ended_headline(state, self._ends[-1].sentence, steps=steps, elapsed_s=elapsed_s)

    def _name(self, node: bytes) -> str:
        return self._names.get(node) or (node.hex()[:8] if node else "this machine")

    def _machines(self, *, ended: bool) -> tuple[MachineView, ...]:
        """Return each machine that was ever in the run, in the order in which it appeared."""
        nodes = [facts.node for facts in _of(self._entries, MachineFacts)]
        newest_group = max(self._groups, key=lambda group: group.generation, default=None)
        for group in self._groups:
            nodes.extend(group.members)
        changes = {change.node: change for change in _of(self._entries, MembershipChange)}
        facts = {each.node: each for each in _of(self._entries, MachineFacts)}
        samples = _newest_samples(_of(self._entries, MachineSample))
        machines = [
            self._machine(
                facts.get(node, MachineFacts(node, "")),
                changes.get(node),
                samples.get(node, MachineSample(0.0, node)),
                () if newest_group is None or ended else _ranks(newest_group, node),
                ended=ended,
            )
            for node in dict.fromkeys([*nodes, *changes])
        ]
        return _with_shares(machines)

    def _machine(
        self,
        facts: MachineFacts,
        change: MembershipChange | None,
        sample: MachineSample,
        ranks: tuple[int, ...],
        *,
        ended: bool,
    ) -> MachineView:
        state = CHANGE_STATES[change.change] if change is not None else "trains"
        is_off = state not in ("trains", "joining")
        return MachineView(
            node=facts.node.hex(),
            name=self._name(facts.node),
            state="ended" if ended and not is_off else state,
            state_reason=change.reason if change is not None and is_off else "",
            since=change.at if change is not None else None,
            device=facts.device,
            system=facts.system,
            memory_bytes=facts.memory_bytes or None,
            used_bytes=sample.used_bytes,
            temperature_c=sample.temperature_c,
            power_w=sample.power_w,
            energy_j=sample.energy_j,
            load=sample.load,
            samples_per_s=sample.samples_per_s,
            share=0.0 if is_off else sample.share,
            ranks=() if is_off else ranks,
            sampled_at=sample.at or None,
        )

    def _samples(self) -> dict[str, tuple[SamplePoint, ...]]:
        by_node: dict[str, list[SamplePoint]] = defaultdict(list)
        for sample in _of(self._entries, MachineSample):
            point = SamplePoint(
                sample.at,
                sample.used_bytes,
                sample.temperature_c,
                sample.power_w,
                sample.samples_per_s,
                sample.load,
            )
            by_node[sample.node.hex()].append(point)
        return {
            node: tuple(points[:: max(1, -(-len(points) // MOST_SAMPLES))])
            for node, points in by_node.items()
        }

    def _links(self) -> tuple[LinkView, ...]:
        newest: dict[tuple[bytes, bytes], LinkView] = {}
        for sample in _of(self._entries, LinkSample):
            for source, target, mbps, rtt_ms in sample.links:
                newest[source, target] = LinkView(
                    source=self._name(source),
                    target=self._name(target),
                    source_node=source.hex(),
                    target_node=target.hex(),
                    mbps=mbps or None,
                    rtt_ms=rtt_ms or None,
                )
        return tuple(newest.values())

    def _plan_views(self) -> tuple[PlanView, ...]:
        ends = [*(plan.step for plan in self._plans[1:]), None][: len(self._plans)]
        return tuple(
            PlanView(
                at=plan.at,
                step=plan.step,
                name=plan.name,
                sync=plan.sync,
                reason=plan.reason,
                predicted_step_s=plan.step_s or None,
                measured_step_s=self._table.step_s(plan.step, end),
                shares={self._name(node): share for node, share in plan.shares},
            )
            for plan, end in zip(self._plans, ends, strict=True)
        )

    def _checkpoints(self) -> tuple[CheckpointView, ...]:
        """Return each checkpoint once, with the machines that hold it."""
        by_step: dict[int, list[CheckpointSaved]] = defaultdict(list)
        for saved in _of(self._entries, CheckpointSaved):
            by_step[saved.step].append(saved)
        return tuple(
            CheckpointView(
                at=min(copy.at for copy in saved),
                step=step,
                machines=tuple(self._name(copy.node) for copy in saved),
                size_bytes=max(copy.size_bytes for copy in saved) or None,
            )
            for step, saved in sorted(by_step.items())
        )

    def _events(self) -> tuple[EventView, ...]:
        events = [event for entry in self._entries for event in self._events_of(entry)]
        for checkpoint in self._checkpoints():
            text = _checkpoint_text(checkpoint)
            event = EventView(at=checkpoint.at, kind="checkpoint", step=checkpoint.step, text=text)
            events.append(event)
        return tuple(sorted(events, key=lambda event: event.at))

    def _events_of(self, entry: Entry) -> Iterable[EventView]:
        match entry:
            case RunStart(at=at, started_by=by):
                yield EventView(at=at, kind="start", text=f"the run started{f' from {by}' if by else ''}")
            case RunEnd(at=at, code=code, sentence=sentence):
                state = _end_state(code)
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
                    text=change_text(change, self._name(node), reason),
                    step=step,
                    node=node.hex(),
                )
            case PlanAdopted(at=at, step=step, name=name, reason=reason):
                words = name if reason.startswith(name) else because(name, reason)  # plans have the rest
                yield EventView(at=at, kind="plan", step=step, text=f"new plan: {words}")
            case GroupStart(at=at, step=step, origin=origin, dropped=dropped) if dropped:
                source = "the checkpoint" if origin == "checkpoint" else "the state"
                text = f"training went back to {source} of step {step}; {counted(dropped, 'step')} dropped"
                yield EventView(at=at, kind="rollback", level="warning", step=step, text=text)
            case FailureNote(at=at, node=node, sentence=sentence, tail=tail):
                text = because(f"a worker on {self._name(node)} failed", sentence)
                yield EventView(at=at, kind="failure", level="error", text=text, node=node.hex(), detail=tail)
            case NoteEntry(at=at, text=text, node=node, step=step, is_warning=is_warning):
                level = "warning" if is_warning else "info"
                yield EventView(at=at, kind="note", level=level, text=text, step=step, node=node.hex())
            case _:
                return


def _of(entries: Iterable[Entry], kind: type[E]) -> list[E]:
    return [entry for entry in entries if type(entry) is kind]  # faster; no entry has a subclass


def _every(count: int) -> int:
    """Return the distance of the samples that are shown."""
    return max(1, -(-count // MOST_SAMPLES))


def _marks(events: Iterable[EventView]) -> tuple[CurveMark, ...]:
    """Return the events that are marked on the curves."""
    return tuple(
        CurveMark(step=event.step, at=event.at, kind=event.kind, text=event.text)
        for event in events
        if event.step is not None and event.kind in _MARKED
    )


def _with_shares(machines: Sequence[MachineView]) -> tuple[MachineView, ...]:
    """Return the machines with shares of one moment: each wrote its own at another time."""
    training = [machine for machine in machines if machine.share]
    speeds = [machine.samples_per_s for machine in training if machine.samples_per_s]
    if len(speeds) < len(training) or not sum(speeds):
        return tuple(machines)
    return tuple(
        msgspec.structs.replace(machine, share=(machine.samples_per_s or 0.0) / sum(speeds))
        if machine.share
        else machine
        for machine in machines
    )


def _ranks(group: GroupStart, node: bytes) -> tuple[int, ...]:
    return tuple(rank for rank, member in enumerate(group.members) if member == node)


def _newest_samples(samples: Iterable[MachineSample]) -> Mapping[bytes, MachineSample]:
    """Return the newest known value of each measurement, by machine."""
    newest: dict[bytes, MachineSample] = {}
    for sample in samples:
        known = {
            name: value for name in sample.__struct_fields__ if (value := getattr(sample, name)) is not None
        }
        before = newest.get(sample.node)
        newest[sample.node] = sample if before is None else msgspec.structs.replace(before, **known)
    return newest


def _start_view(start: RunStart | None, *, is_session: bool) -> StartView:
    if start is None:
        return StartView(is_session=is_session)
    return StartView(
        command=start.command,
        title=start.title,
        started_by=start.started_by,
        options=start.options,
        environment=start.environment,
        is_session=is_session,
        resumes=start.resumes,
    )


def _first_time(entries: Iterable[Entry]) -> float | None:
    return min((at for entry in entries if (at := getattr(entry, "at", 0.0))), default=None)


def _end_state(code: int) -> RunState:
    return "stopped" if code == _STOPPED else "failed" if code not in (0, 3) else "ended"


def _eta(total: int | None, step: int, steps_per_s: float | None) -> float | None:
    return max(0, total - step) / steps_per_s if total is not None and steps_per_s else None


def _metric(wanted: str, curves: Sequence[CurveView]) -> str:
    names = [curve.name for curve in curves]
    return next((name for name in (wanted, "loss", *names) if name in names), "")


def _checkpoint_text(checkpoint: CheckpointView) -> str:
    where = f" on {', '.join(checkpoint.machines)}" if checkpoint.machines else ""
    return f"checkpoint of step {checkpoint.step}{where}"
