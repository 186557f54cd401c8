"""Builder of the read model from the entries of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.history.curves import CurveTable
from barnraise.history.entries import (
    Entry,
    GroupStart,
    MachineFacts,
    MachineSample,
    MembershipChange,
    RunStart,
    TrainingGoal,
)
from barnraise.history.logs.joined_log import JoinedLog
from barnraise.history.machines.shares import with_recent_shares, with_total_shares
from barnraise.history.merge import MergedRows, distinct, entry_time, merge_rows
from barnraise.history.outcome import end_state
from barnraise.history.sentences import counted, ended_headline, running_headline
from barnraise.history.step_table import Pace, StepTable
from barnraise.history.view import (
    CHANGE_STATES,
    CurveView,
    MachineView,
    PlanView,
    RunState,
    RunView,
    StartView,
)
from barnraise.history.views.events import RunEvents
from barnraise.history.views.measurements import Measurements


def build_view(entries: Sequence[Entry], *, run: str = "", now: float | None = None) -> RunView:
    """Return what a display shows of a run.

    ``entries``: of one log, or of a merged history. ``now``: seconds since 1970; the last entry's time if
    not given.
    """
    history = RunHistory(run)
    history.add(b"", entries)
    return history.view(now)


class RunHistory:
    """History of a run that grows. A view costs what has changed since the view before.

    Parts of the view that have not changed are the same objects as before.
    """

    def __init__(self, run: str = "") -> None:
        self.run = run
        self._logs: dict[bytes, JoinedLog] = {}
        self._measurements = Measurements()
        self._table, self._curves = StepTable(), CurveTable()
        self._events = RunEvents(())
        self._event_key: object = None
        self._forgotten = 0

    @property
    def is_empty(self) -> bool:
        """Return True if there is no entry."""
        return not self._logs

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """Return the machines whose logs are here."""
        return tuple(self._logs)

    def add(self, node: bytes, entries: Sequence[Entry]) -> None:
        """Add entries that follow in the log of a machine."""
        if entries:
            if node not in self._logs:
                self._logs = dict(sorted([*self._logs.items(), (node, JoinedLog())]))
            log = self._logs[node]
            known = len(log.measured)
            log.add(entries)
            self._measurements.add(log.measured[known:])

    def forget(self, node: bytes) -> None:
        """Drop the log of a machine, because it was replaced."""
        if self._logs.pop(node, None) is not None:
            self._forgotten += 1
            self._measurements = Measurements()
            for log in self._logs.values():
                self._measurements.add(log.measured)

    def view(self, now: float | None = None) -> RunView:
        """Return what a display shows. ``now``: seconds since 1970; the last entry's time if not given."""
        rows = self._merged_rows()
        self._table.update(rows.steps)
        self._curves.update(rows.values)
        self._update_events(rows.groups)
        if now is None:
            now = self._newest_at()
        return self._view(now)

    def view_until_end(self, now: float) -> RunView:
        """Return what a display shows now; of a run that has ended, as of its end."""
        view = self.view(now)
        return view if view.ended_at is None else self._view(self._newest_at())

    def _merged_rows(self) -> MergedRows:
        logs = self._logs.values()
        return merge_rows(
            [start for log in logs for start in log.groups],
            [batch for log in logs for batch in log.steps()],
            [batch for log in logs for batch in log.values()],
            [own for log in logs for own in log.own],
        )

    def _newest_at(self) -> float:
        return max([self._table.last_at, *(log.last_at for log in self._logs.values())])

    def _update_events(self, groups: Sequence[GroupStart]) -> None:
        """Take new events and groups, if there are any."""
        count = sum(len(log.events) for log in self._logs.values())
        key = self._forgotten, count, groups
        if key != self._event_key:
            self._event_key = key
            logs = sorted(self._logs.values(), key=_count_machines, reverse=True)  # gives their order
            events = distinct(event for log in logs for event in log.events)
            self._events = RunEvents(sorted([*events, *groups], key=entry_time))

    def _view(self, now: float) -> RunView:
        events, table = self._events, self._table
        start, end = events.start, events.end
        goal = events.goal or TrainingGoal(0.0)
        plan = events.plans[-1] if events.plans else None
        started_at = start.at if start is not None else self._first_at()
        finish = end.at if end is not None else now
        elapsed_s = max(0.0, finish - started_at) if started_at is not None else 0.0
        state: RunState = "running" if end is None else end_state(end.code, was_stopped=end.was_stopped)
        curves = self._curves.curves()
        pace = table.recent(plan)
        machines = self._machines(pace)
        energies = [machine.energy_j for machine in machines if machine.energy_j is not None]
        return RunView(
            run=self.run,
            state=state,
            headline=self._headline(state, machines, goal, elapsed_s),
            start=_start_view(start, is_session=bool(events.groups or events.goal)),
            started_at=started_at,
            ended_at=end.at if end is not None else None,
            exit_code=end.code if end is not None else None,
            outcome=end.sentence if end is not None else "",
            at=now,
            newest_at=self._newest_at() or None,
            counts=goal.counts,
            step=table.end,
            first_step=table.first,
            total_steps=goal.total,
            eta_s=_eta(goal.total, table.end, pace) if end is None else None,
            elapsed_s=elapsed_s,
            batch=goal.batch,
            samples=table.samples,
            steps_per_s=1 / pace.step_s if pace is not None else None,
            samples_per_s=pace.samples_per_s if pace is not None else None,
            step_s=pace.step_s if pace is not None else None,
            recent_steps=pace.steps if pace is not None else 0,
            predicted_step_s=(plan.step_s or None) if plan is not None else None,
            energy_j=sum(energies) if energies else None,
            machines=machines,
            links=self._measurements.links(events.name),
            metric=_metric(goal.metric, curves),
            curves=curves,
            marks=events.marks,
            rates=table.rates(events.groups),
            samples_of=self._measurements.samples_of(),
            phases=table.phases(plan),
            events=events.shown,
            plans=self._plan_views(),
            checkpoints=events.checkpoints,
            rolled_back=sum(group.dropped for group in events.groups),
            missing=table.missing,
            phase_totals_s=table.phase_totals_s(),
        )

    def _first_at(self) -> float | None:
        times = [self._table.first_at, *(log.first_at for log in self._logs.values())]
        return min(filter(None, times), default=None)

    def _headline(
        self, state: RunState, machines: Sequence[MachineView], goal: TrainingGoal, elapsed_s: float
    ) -> str:
        end = self._events.end
        if end is None:
            return running_headline(machines, steps=self._table.end)
        steps = counted(self._table.end, goal.counts)
        return ended_headline(state, end.sentence, steps=steps, elapsed_s=elapsed_s)

    def _machines(self, pace: Pace | None) -> tuple[MachineView, ...]:
        """Return each machine that was ever in the run, in the order in which it appeared."""
        events = self._events
        newest_group = max(events.groups, key=lambda group: group.generation, default=None)
        machines = [
            _machine_view(
                events.facts.get(node, MachineFacts(node, events.name(node))),
                events.changes.get(node),
                self._measurements.newest(node),
                () if newest_group is None or events.end is not None else _ranks(newest_group, node),
                ended=events.end is not None,
            )
            for node in events.nodes
        ]
        if events.end is None:
            return with_recent_shares(machines, pace.samples_per_s if pace is not None else None)
        shares = self._measurements.shares()
        return with_total_shares(machines, shares, events.moves, self._table.samples_between)

    def _plan_views(self) -> tuple[PlanView, ...]:
        plans = self._events.plans
        ends = [*(plan.step for plan in plans[1:]), None][: len(plans)]
        paces = [self._table.pace(plan.step, end) for plan, end in zip(plans, ends, strict=True)]
        return tuple(
            PlanView(
                at=plan.at,
                step=plan.step,
                name=plan.name,
                sync=plan.sync,
                reason=plan.reason,
                predicted_step_s=plan.step_s or None,
                measured_step_s=pace.step_s if pace is not None else None,
                measured_steps=pace.steps if pace is not None else 0,
                shares={self._events.name(node): share for node, share in plan.shares},
            )
            for plan, pace in zip(plans, paces, strict=True)
        )


def _machine_view(
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
        name=facts.name or facts.node.hex()[:8] or "this machine",
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


def _count_machines(log: JoinedLog) -> int:
    return sum(isinstance(event, MachineFacts) for event in log.events)


def _ranks(group: GroupStart, node: bytes) -> tuple[int, ...]:
    return tuple(rank for rank, member in enumerate(group.members) if member == node)


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


def _eta(total: int | None, step: int, pace: Pace | None) -> float | None:
    return max(0, total - step) * pace.step_s if total is not None and pace is not None else None


def _metric(wanted: str, curves: Sequence[CurveView]) -> str:
    names = [curve.name for curve in curves]
    return next((name for name in (wanted, "loss", *names) if name in names), "")
