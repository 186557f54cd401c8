"""Recorder of one worker: a row for each commit, written by a thread about once a second.

The first worker of each machine writes the steps. The values of a step are known one commit later, so they
follow in rows of their own. At the end, and where no vote brought them, each worker writes its own sums.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from barnraise.agent_client.queue.requests import METRIC_VARIABLE
from barnraise.core.errors import BarnraiseError
from barnraise.core.sanitize import printable
from barnraise.history.entries import (
    MOST_VALUES,
    Entry,
    GroupStart,
    MachineSample,
    OwnValues,
    PlanAdopted,
    StateOrigin,
    TrainingGoal,
)
from barnraise.history.step_rows import StepRow, ValueRow, step_batches, value_batches
from barnraise.training.autotune.tuner import SyncChoice
from barnraise.training.group.interface import GroupManager
from barnraise.training.metrics import Logged, MetricsLog
from barnraise.training.record.sinks import RecordSink
from barnraise.training.record.step_counters import StepCounters
from barnraise.training.record.step_trace import TracedStep, open_trace
from barnraise.training.steps.commit import StepCommitter
from barnraise.training.steps.throughput import Throughput

log = logging.getLogger("barnraise.training")

_FLUSH_S = 1.0
_SAMPLE_S = 15.0
_CLOSE_S = 5.0
_MOST_QUEUED = 20_000  # entries and rows that wait for the agent
_MAX_NAME = 64
_MAX_WORD = 200
_MAX_SENTENCE = 4000

_Item = Entry | StepRow | ValueRow


class RunRecorder:
    """Callback after each commit, and the thread that writes the rows.

    ``make_sink`` is called with the first commit; it returns None if nothing can be written. ``batch``:
    samples of a step. ``total_steps``: returns the steps of the training, if they are known.
    """

    def __init__(
        self,
        make_sink: Callable[[], RecordSink | None],
        manager: GroupManager,
        steps: StepCommitter,
        metrics: MetricsLog,
        throughput: Throughput,
        batch: int,
    ) -> None:
        self.total_steps: Callable[[], int | None] = lambda: None
        self._make_sink, self._manager, self._steps = make_sink, manager, steps
        self._metrics, self._throughput, self._batch = metrics, throughput, batch
        self._sink: RecordSink | None = None
        self._queue: deque[_Item] = deque(maxlen=_MOST_QUEUED)
        self._last_commit = time.perf_counter()
        self._counters = StepCounters()
        self._trace = open_trace(os.environ.get("BARNRAISE_RUN", "alone"))
        self._last_sample = 0.0
        self._previous: StepRow | None = None  # the newest commit, whose values are not known yet
        self._generation = -1
        self._written_total: int | None = -1
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def __call__(self) -> None:
        """Queue the row of a commit, and the values of the one before."""
        now, at, manager, steps = time.perf_counter(), time.time(), self._manager, self._steps
        if self._thread is None:
            self._start()
        first, end = steps.commit_range or (0, 0)
        seconds, self._last_commit = now - self._last_commit, now
        phases = self._throughput.phases.take(seconds)
        self._count(end - first, seconds, phases)
        if self._trace is not None:
            samples = steps.computed_samples
            step = TracedStep(manager.generation, end, at, seconds, phases, samples)
            self._trace.add(step, manager.rank)
        if manager.generation != self._generation:
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
        is_writer = self._is_writer()
        self._queue_values(self._previous, is_writer)
        self._previous = row
        if is_writer and row.stride > 0:
            self._queue.append(row)
            if now - self._last_sample >= _SAMPLE_S:
                self._last_sample = now
                self._queue_speeds(at)

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
        self._queue.append(
            PlanAdopted(
                time.time(),
                self._previous.first + 1 if self._previous is not None else 0,
                printable(plan.name)[:_MAX_WORD],
                printable(choice.sync.describe())[:_MAX_WORD],
                printable(choice.why)[:_MAX_SENTENCE],
                plan.step_s,
                (0.0, phases.compute_s, communication_s, 0.0, 0.0, phases.overhead_s),
                tuple((bytes.fromhex(nodes[part.name]), part.samples) for part in plan.parts),
            )
        )

    def close(self) -> None:
        """Write the rest, with this worker's values of the last step, when the script ends."""
        if self._thread is None:
            return
        if self._previous is not None:
            self._queue_own(self._previous, self._metrics.of_step(self._steps.done - 1))
            self._previous = None
        self._is_closing.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive() or self._sink is None:
            return
        try:
            self._flush()
            self._sink.close()
        except (BarnraiseError, OSError) as error:
            self._warn(error)

    # rows

    def _start(self) -> None:
        self._sink = self._make_sink()
        self._thread = threading.Thread(target=self._run, name="barnraise-record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _is_writer(self) -> bool:
        """Return True on the first worker of each machine in the group."""
        machines, rank = self._manager.machines(), self._manager.rank
        return machines.index(machines[rank]) == rank

    def _note_group(self, at: float, first: int) -> None:
        self._generation = self._manager.generation
        origin: StateOrigin = "start" if first == 0 else self._steps.state_origin
        if origin == "kept" and self._previous is not None and self._previous.first + 1 > first:
            origin = "discarded"
        members = tuple(map(bytes.fromhex, self._manager.machines()))
        if self._is_writer():
            provisional = self._manager.provisional
            self._queue.append(GroupStart(at, self._generation, first, members, origin, provisional))

    def _queue_values(self, previous: StepRow | None, is_writer: bool) -> None:
        """Queue the values of the commit before this one."""
        if previous is None:
            return
        step, means = self._metrics.newest
        if step == self._steps.done - 2:
            if means and is_writer:
                names = {printable(name)[:_MAX_NAME]: value for name, value in means.items()}
                generation, is_provisional = self._manager.generation, self._manager.provisional
                row = ValueRow(generation, previous.first, previous.stride, names, is_provisional)
                self._queue.append(row)
        else:  # the group changed in between, and no vote has brought them
            self._queue_own(previous, self._metrics.of_step(self._steps.done - 2))

    def _queue_own(self, row: StepRow, logged: Logged) -> None:
        values = list(logged.items())[:MOST_VALUES]
        if values:
            self._queue.append(
                OwnValues(
                    row.generation,
                    row.first,
                    self._manager.rank,
                    tuple(printable(name)[:_MAX_NAME] for name, _ in values),
                    tuple(total for _, (total, _) in values),
                    tuple(weight for _, (_, weight) in values),
                    row.is_provisional,
                )
            )

    def _queue_speeds(self, at: float) -> None:
        """Queue the speed of this machine's workers, and their part of a step."""
        if (total := self.total_steps()) != self._written_total:
            self._written_total = total
            metric = os.environ.get(METRIC_VARIABLE, "")[:_MAX_NAME]
            self._queue.append(TrainingGoal(at, total, self._batch, metric=metric))
        speeds, machines = self._throughput.speeds, self._manager.machines()
        if self._sink is None or len(speeds) != len(machines):
            return
        own = sum(
            speed
            for speed, node in zip(speeds, machines, strict=True)
            if node == machines[self._manager.rank]
        )
        share = min(1.0, own / sum(speeds)) if sum(speeds) else None
        self._queue.append(MachineSample(at, self._sink.node, samples_per_s=own or None, share=share))

    # the thread

    def _run(self) -> None:
        while not self._is_closing.wait(_FLUSH_S):
            try:
                self._flush()
            except (BarnraiseError, OSError) as error:
                self._warn(error)

    def _flush(self) -> None:
        """Write what is queued; it stays queued if that fails."""
        items = [self._queue.popleft() for _ in range(len(self._queue))]
        if not items or self._sink is None:
            return
        try:
            self._sink.write(_entries(items))
        except (BarnraiseError, OSError):
            self._queue.extendleft(reversed(items))
            raise

    def _warn(self, error: BarnraiseError | OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.info("the record of this run could not be written, and is tried again: %s", error)


def _entries(items: Sequence[_Item]) -> list[Entry]:
    """Return events in their order, then steps and values in batches."""
    events = [item for item in items if not isinstance(item, StepRow | ValueRow)]
    steps = [item for item in items if isinstance(item, StepRow)]
    values = [item for item in items if isinstance(item, ValueRow)]
    return [*events, *step_batches(steps), *value_batches(values)]
