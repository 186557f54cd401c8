"""Recorder of one worker's commits: a row for each.

The first worker of each machine writes the steps. The values of a step are known one commit later, so they
follow in rows of their own. At the end, and where no vote brought them, each worker writes its own sums. The
other workers of a machine hold the rows of the last seconds. They write them when the group changes, because
the first worker may have died.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from barnraise.agent_client.queue.requests import METRIC_VARIABLE
from barnraise.core.sanitize import printable
from barnraise.history.entries import (
    MOST_VALUES,
    GroupStart,
    MachineSample,
    OwnValues,
    PlanAdopted,
    StateOrigin,
    TrainingGoal,
)
from barnraise.history.step_rows import StepRow, ValueRow
from barnraise.training.autotune.tuner import SyncChoice
from barnraise.training.group.interface import GroupManager
from barnraise.training.metrics import Logged, MetricsLog
from barnraise.training.record.entry_writer import EntryWriter, Item, node_of
from barnraise.training.record.phase_clock import PhaseClock
from barnraise.training.record.share_counter import ShareCounter
from barnraise.training.record.sinks import RecordSink
from barnraise.training.record.split_record import PlacementNote
from barnraise.training.record.step_counters import StepCounters
from barnraise.training.record.step_trace import TracedStep, open_trace
from barnraise.training.state.checkpoint_manager import CheckpointManager

_SAMPLE_S = 15.0
_HELD_S = 10.0  # longer than the first worker keeps rows in its queue
_MOST_HELD = 10_000
_MAX_NAME = 64
_MAX_WORD = 200
_MAX_SENTENCE = 4000


class RecordedSteps(Protocol):
    """The commits of a worker, as the recorder reads them: those of `StepCommitter`, or of a split model."""

    on_commit: list[Callable[[], None]]
    on_checkpoint: list[Callable[[], None]]
    on_handover: list[Callable[[], None]]

    @property
    def done(self) -> int: ...

    @property
    def commit_range(self) -> tuple[int, int] | None: ...

    @property
    def committed_samples(self) -> int: ...

    @property
    def computed_samples(self) -> int: ...

    @property
    def state_origin(self) -> StateOrigin: ...


class RecordedWork(Protocol):
    """Speeds, phases and shares of the computation, as the recorder reads them."""

    @property
    def speeds(self) -> Sequence[float]:
        """Return the samples per second of each rank."""

    @property
    def assigned(self) -> Sequence[int]:
        """Return the parts of the newest step by rank: micro-batches, or blocks of a split model."""

    @property
    def phases(self) -> PhaseClock: ...


class RunRecorder:
    """Callback after each commit that queues its row.

    ``make_sink`` is called with the first commit; it returns None if nothing can be written. ``batch``:
    samples of a step. ``total_steps``: returns the steps of the training, if they are known.
    """

    def __init__(
        self,
        make_sink: Callable[[], RecordSink | None],
        manager: GroupManager,
        steps: RecordedSteps,
        metrics: MetricsLog,
        work: RecordedWork,
        batch: int,
    ) -> None:
        self.total_steps: Callable[[], int | None] = lambda: None
        self._manager, self._steps = manager, steps
        self._metrics, self._work, self._batch = metrics, work, batch
        self._writer = EntryWriter(make_sink)
        self._last_commit = time.perf_counter()
        self._counters = StepCounters()
        self._trace = open_trace(os.environ.get("BARNRAISE_RUN", "alone"))
        self._share, self._is_writer = ShareCounter(), False
        self._sample_slot = -1  # all machines write at the same quarters of a minute
        self._previous: StepRow | None = None  # the newest commit, whose values are not known yet
        self._previous_rank = 0  # of this worker at that commit
        self._held: deque[tuple[float, Item]] = deque(maxlen=_MOST_HELD)
        self._generation = -1
        self._written_total: int | None = -1

    def attach(self, checkpoints: CheckpointManager) -> None:
        """Follow the commits, so that no valid checkpoint and no new worker is ahead of the record."""
        self._steps.on_commit.append(self)
        self._steps.on_checkpoint.append(self._queue_newest)
        self._steps.on_handover.append(self._write_all)
        checkpoints.before_seal(self._writer.flush)

    def __call__(self) -> None:
        """Queue the row of a commit, and the values of the one before."""
        now, at, manager, steps = time.perf_counter(), time.time(), self._manager, self._steps
        if not self._writer.has_started:
            self._writer.start(self.close)
        first, end = steps.commit_range or (0, 0)
        seconds, self._last_commit = now - self._last_commit, now
        phases = self._work.phases.take(seconds)
        self._count(end - first, seconds, phases)
        if self._trace is not None:
            samples = steps.computed_samples
            step = TracedStep(manager.generation, end, at, seconds, phases, samples)
            self._trace.add(step, manager.rank)
        if manager.generation != self._generation:
            self._queue_held()
            self._note_group(at, first)
        row = StepRow(
            manager.generation,
            first,
            end - first,
            at,
            seconds,
            steps.committed_samples,
            phases,
            manager.provisional,
        )
        self._is_writer = is_writer = is_first_of_machine(self._manager)
        self._queue_values(self._previous, is_writer)
        self._previous, self._previous_rank = row, manager.rank
        if row.stride > 0:
            self._queue_row(row, is_writer)
        machines = manager.machines()
        self._share.add(machines, machines[manager.rank], self._work.assigned)
        if row.stride > 0 and int(at / _SAMPLE_S) != self._sample_slot:
            self._sample_slot, share = int(at / _SAMPLE_S), self._share.take()
            if is_writer:
                self._queue_speeds(at, share)

    def _count(self, steps: int, seconds: float, phases: Sequence[float]) -> None:
        """Count the commit in the metrics of this worker."""
        self._counters.count(steps, self._steps.computed_samples, seconds, phases)
        history = self._metrics.history
        self._counters.set_state(self._manager.world, history[-1].get("loss") if history else None)

    def note_plan(self, choice: SyncChoice, nodes: Mapping[str, str]) -> None:
        """Queue a plan that rank 0 has chosen; ``nodes``: the id of each machine by its name."""
        plan = choice.plan
        phases = plan.phases
        communication_s = phases.communication_s + phases.waiting_s
        self._writer.put(
            PlanAdopted(
                time.time(),
                self._previous.first + 1 if self._previous is not None else 0,
                printable(plan.name)[:_MAX_WORD],
                printable(choice.sync.describe())[:_MAX_WORD],
                printable(choice.why)[:_MAX_SENTENCE],
                plan.step_s,
                (0.0, phases.compute_s, communication_s, 0.0, 0.0, phases.overhead_s),
                tuple((node_of(nodes[part.name]), part.samples) for part in plan.parts),
            )
        )

    def note_placement(self, note: PlacementNote) -> None:
        """Queue the placement of a split model that rank 0 has chosen."""
        words = printable(note.title)[:_MAX_WORD], printable(note.blocks)[:_MAX_WORD]
        why = printable(note.why)[:_MAX_SENTENCE]
        self._writer.put(PlanAdopted(time.time(), self._steps.done, *words, why, *note.step))

    def close(self) -> None:
        """Write the rest, with this worker's values of the last step, when the script ends."""
        self._queue_newest()
        share, node = self._share.take(), self._writer.node
        if self._is_writer and share is not None and node is not None:
            self._writer.put(MachineSample(time.time(), node, share=share))
        self._writer.close()

    def _queue_newest(self) -> None:
        """Queue this worker's own values of the newest step, whose means may never be known."""
        if self._previous is not None:
            self._queue_own(self._previous, self._metrics.of_step(self._steps.done - 1))

    def _write_all(self) -> None:
        """Write everything: another worker gets the state, and this one may die before the next commit."""
        if self._writer.has_started:
            self._queue_held()
            self._queue_newest()
            self._writer.flush()

    # rows

    def _queue_row(self, row: Item, is_writer: bool) -> None:
        """Queue a row that the first worker of each machine writes; another worker holds it for a while."""
        if is_writer:
            self._writer.put(row)
            return
        now = time.monotonic()
        self._held.append((now, row))
        while self._held[0][0] < now - _HELD_S:
            self._held.popleft()

    def _queue_held(self) -> None:
        while self._held:
            self._writer.put(self._held.popleft()[1])

    def _note_group(self, at: float, first: int) -> None:
        self._generation = self._manager.generation
        origin: StateOrigin = "start" if first == 0 else self._steps.state_origin
        if origin == "kept" and self._previous is not None and self._previous.first + 1 > first:
            origin = "discarded"
        members = tuple(map(node_of, self._manager.machines()))
        if is_first_of_machine(self._manager):
            provisional = self._manager.provisional
            self._writer.put(GroupStart(at, self._generation, first, members, origin, provisional))

    def _queue_values(self, previous: StepRow | None, is_writer: bool) -> None:
        """Queue the values of the commit before this one."""
        if previous is None:
            return
        step, means = self._metrics.newest
        if step == self._steps.done - 2:
            if means:
                names = {printable(name)[:_MAX_NAME]: value for name, value in means.items()}
                generation, is_provisional = self._manager.generation, self._manager.provisional
                row = ValueRow(generation, previous.first, previous.stride, names, is_provisional)
                self._queue_row(row, is_writer)
        else:  # the group changed in between, and no vote has brought them
            self._queue_own(previous, self._metrics.of_step(self._steps.done - 2))

    def _queue_own(self, row: StepRow, logged: Logged) -> None:
        values = list(logged.items())[:MOST_VALUES]
        if values:
            self._writer.put(
                OwnValues(
                    row.generation,
                    row.first,
                    self._previous_rank,
                    tuple(printable(name)[:_MAX_NAME] for name, _ in values),
                    tuple(total for _, (total, _) in values),
                    tuple(weight for _, (_, weight) in values),
                    row.is_provisional,
                )
            )

    def _queue_speeds(self, at: float, share: float | None) -> None:
        """Queue the speed of this machine's workers, and their part of the samples since the last time."""
        if (total := self.total_steps()) != self._written_total:
            self._written_total = total
            metric = os.environ.get(METRIC_VARIABLE, "")[:_MAX_NAME]
            self._writer.put(TrainingGoal(at, total, self._batch, metric=metric))
        speeds, machines = self._work.speeds, self._manager.machines()
        node = self._writer.node
        if node is None:
            return
        pairs = zip(machines, speeds, strict=True) if len(speeds) == len(machines) else ()
        own = sum(speed for machine, speed in pairs if machine == machines[self._manager.rank])
        self._writer.put(MachineSample(at, node, samples_per_s=own or None, share=share))


def is_first_of_machine(manager: GroupManager) -> bool:
    """Return True on the first worker of each machine in the group, which writes for the others."""
    machines = manager.machines()
    return machines.index(machines[manager.rank]) == manager.rank
