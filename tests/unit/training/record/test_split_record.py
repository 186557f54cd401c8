"""Commits of a split model become rows of the record, with values, phases, shares and placements."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from barnraise.core import metrics
from barnraise.core.metrics import catalogue
from barnraise.history.columns import unpack_column
from barnraise.history.entries import Entry, GroupStart, MachineSample, PlanAdopted, StepBatch, ValueBatch
from barnraise.history.merge import merge
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.record.recorder import RunRecorder
from barnraise.training.record.split_record import SplitRecord
from barnraise.training.state.checkpoint_manager import CheckpointManager


class FakeSink:
    node = b"\xaa"

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(entries)

    def close(self) -> None:
        return


class FakeStage:
    busy_s, sent_bytes = 0.0, 0


class Worker:
    """A record of a split model, with the recorder that follows it."""

    def __init__(self) -> None:
        self.sink, self.metrics, self.manager = FakeSink(), MetricsLog(), SingleWorkerManager()
        self.manager.machines = lambda: ("aa", "bb")  # type: ignore[method-assign]
        self.record = SplitRecord(self.metrics)
        self.recorder = RunRecorder(
            lambda: self.sink, self.manager, self.record, self.metrics, self.record, 8
        )
        self.recorder.attach(CheckpointManager(None, 60.0, 1))
        self.record.on_placement.append(self.recorder.note_placement)

    def commit(self, loss: float) -> None:
        """Train a step and commit it, as the loop of a split model does."""
        self.record.commit(8, loss, [self.record.logged()], [3.0, 1.0])
        self.record.run_callbacks()

    @property
    def losses(self) -> list[float]:
        values = [entry for entry in merge([self.sink.entries]) if isinstance(entry, ValueBatch)]
        return [value for batch in values for value in unpack_column(batch.columns[0])]


def test_loss_is_recorded_also_if_the_script_logs_nothing() -> None:
    worker = Worker()
    for loss in (4.0, 3.0, 2.0):
        worker.commit(loss)
    worker.recorder.close()
    assert worker.losses == [4.0, 3.0, 2.0]
    assert worker.metrics.history == [{"loss": 4.0}, {"loss": 3.0}]
    steps = [entry for entry in worker.sink.entries if isinstance(entry, StepBatch)]
    assert [samples for batch in steps for samples in batch.samples] == [8, 8, 8]


def test_loss_that_the_script_logs_comes_before_that_of_the_step() -> None:
    worker = Worker()
    worker.commit(4.0)
    worker.metrics.log({"loss": 40.0})
    worker.commit(3.0)
    worker.recorder.close()
    assert worker.losses == [40.0, 3.0]


def test_loss_of_the_newest_step_is_written_before_a_checkpoint_and_a_handover() -> None:
    for prepare in (SplitRecord.before_checkpoint, SplitRecord.hand_over):
        worker = Worker()
        worker.commit(4.0)
        prepare(worker.record)
        worker.recorder._writer.flush()
        assert worker.losses == [4.0], "all workers may be killed now"


def test_passes_count_what_is_no_computation_as_waiting_for_activations() -> None:
    worker, stage = Worker(), FakeStage()
    worker.commit(4.0)
    with worker.record.passes(stage):
        stage.busy_s += 0.01
        stage.sent_bytes += 100
        time.sleep(0.03)
    worker.commit(3.0)
    worker.recorder.close()
    steps = [entry for entry in worker.sink.entries if isinstance(entry, StepBatch)]
    phases = [column[-1] for column in steps[-1].phases]
    assert phases[1] == 100, "ticks of 0.1 ms"
    assert phases[6] >= 200
    assert sum(phases) == pytest.approx(steps[-1].ticks[-1], abs=3)


def test_share_is_the_part_of_the_blocks_and_a_speed_is_that_of_the_whole_model() -> None:
    worker, stage = Worker(), FakeStage()
    worker.record.place(0, [(0, 3), (3, 4)], [], [])
    with worker.record.passes(stage):
        stage.busy_s += 2.0
    assert worker.record.speed(0, 8) == 3.0, "8 samples in 2 s, of three of four blocks"
    worker.commit(1.0)
    worker.recorder.close()
    samples = [entry for entry in worker.sink.entries if isinstance(entry, MachineSample)]
    assert {sample.share for sample in samples} == {0.75}
    assert {sample.samples_per_s for sample in samples} <= {3.0, None}


def test_placement_is_a_plan_of_the_record() -> None:
    worker = Worker()
    worker.commit(1.0)
    worker.record.place(1, [(0, 3), (3, 4)], ["mac", "pc"], ["mac needs 2 GB", "pc needs 1 GB"])
    worker.record.place(1, [(2, 4), None, (0, 2)], ["mac", "old", "nas"], ["pc has left"])
    assert worker.record.assigned == (2, 0, 2)
    worker.commit(1.0)
    worker.recorder.close()
    plans = [entry for entry in merge([worker.sink.entries]) if isinstance(entry, PlanAdopted)]
    assert [plan.sync for plan in plans] == [
        "mac: blocks 1 to 3; pc: blocks 4 to 4",
        "mac: blocks 3 to 4; old: no blocks; nas: blocks 1 to 2",
    ]
    assert {(plan.step, plan.name) for plan in plans} == {(1, "split over 2 workers")}
    assert plans[0].reason == "mac needs 2 GB; pc needs 1 GB"


def test_group_from_a_checkpoint_says_so_until_its_first_commit() -> None:
    worker = Worker()
    worker.record.state_origin = "checkpoint"
    worker.record.place(5, [(0, 4)], ["mac"], [])
    worker.manager.generation = 3  # type: ignore[misc]
    worker.commit(1.0)
    worker.manager.generation = 4  # type: ignore[misc]
    worker.commit(1.0)
    worker.recorder.close()
    groups = [entry for entry in worker.sink.entries if isinstance(entry, GroupStart)]
    assert [(group.step, group.origin) for group in groups] == [(5, "checkpoint"), (6, "kept")]


def test_moved_state_is_counted_in_bytes() -> None:
    def moved(kind: str) -> float:
        return metrics.counter(catalogue.MOVED_STATE_BYTES, kind)._value.get()

    record, before = SplitRecord(MetricsLog()), (moved("stage"), moved("mirror"))
    memory = {"exp_avg": torch.zeros(4), "step": 3}
    states = {"w": {"value": torch.zeros(4, dtype=torch.bfloat16), "memory": memory}}
    record.count_moved({**states, "v": {"value": torch.zeros(3), "memory": {}}}, {"w"})
    assert (moved("stage") - before[0], moved("mirror") - before[1]) == (24, 12)
