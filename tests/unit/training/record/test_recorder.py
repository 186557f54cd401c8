"""Commits of a worker become rows, and their values follow one commit later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_request
from barnraise.agent_client.history.requests import RecordRequest
from barnraise.core.errors import AgentError
from barnraise.history.columns import unpack_column
from barnraise.history.entries import (
    Entry,
    GroupStart,
    MachineSample,
    NoteEntry,
    OwnValues,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.log_format import decode_frames, encode_frames
from barnraise.history.merge import merge
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.metrics import MetricsLog
from barnraise.training.record import entry_writer
from barnraise.training.record.recorder import RunRecorder
from barnraise.training.record.sinks import AgentSink
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.throughput import Throughput
from barnraise.transport.ipc.messages import LARGEST_BODY


class FakeSink:
    node = b""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.fails = 0
        self.is_closed = False

    def write(self, entries: Sequence[Entry]) -> None:
        if self.fails:
            self.fails -= 1
            raise AgentError("the agent of this machine has stopped")
        self.entries.extend(entries)

    def close(self) -> None:
        self.is_closed = True


class FakeSteps:
    done, committed_samples, computed_samples, state_origin = 0, 12, 12, "kept"
    commit_range: tuple[int, int] | None = None
    on_commit: list[Callable[[], None]]
    on_checkpoint: list[Callable[[], None]]
    on_handover: list[Callable[[], None]]

    def __init__(self) -> None:
        self.on_commit, self.on_checkpoint, self.on_handover = [], [], []


class Worker:
    """A recorder with the parts of a session that it reads."""

    def __init__(self, rank: int = 0, machines: tuple[str, ...] = ("",)) -> None:
        self.sink, self.steps, self.metrics = FakeSink(), FakeSteps(), MetricsLog()
        self.throughput, self.manager = Throughput(), SingleWorkerManager()
        self.manager.rank, self.manager.generation = rank, 1  # type: ignore[misc]
        self.manager.machines = lambda: machines  # type: ignore[method-assign]
        steps: Any = self.steps
        self.recorder = RunRecorder(lambda: self.sink, self.manager, steps, self.metrics, self.throughput, 12)
        self.recorder.total_steps = lambda: 30

    def commit(self, loss: float | None, *, stride: int = 1, has_votes: bool = True) -> None:
        """Train a step and commit it, as the step loop does."""
        done = self.steps.done
        covered = self.steps.commit_range[1] if self.steps.commit_range else 0
        self.metrics.start_microbatch(done, 12)
        if loss is not None:
            self.metrics.log({"loss": loss})
        votes = [dict(self.metrics.of_step(done - 1))]
        self.steps.done = done + 1
        if has_votes:
            self.metrics.update(votes, self.steps.done)
        self.steps.commit_range = (covered, covered + stride)
        self.recorder()


def _losses(entries: Sequence[Entry]) -> dict[int, float]:
    return {
        entry.first + row * entry.stride: value
        for entry in merge([entries])
        if isinstance(entry, ValueBatch) and entry.names
        for row, value in enumerate(unpack_column(entry.columns[0]))
    }


def _steps(entries: Sequence[Entry]) -> list[int]:
    batches = [entry for entry in merge([entries]) if isinstance(entry, StepBatch)]
    return [step for entry in batches for step in range(entry.first, entry.end)]


def test_all_steps_and_values_are_written_with_the_last_one() -> None:
    worker = Worker()
    for step in range(10):
        worker.commit(float(step))
    worker.recorder.close()
    entries = worker.sink.entries
    assert worker.sink.is_closed
    assert _losses(entries) == {step: float(step) for step in range(10)}
    assert sum(sum(e.samples) for e in entries if isinstance(e, StepBatch)) == 120
    assert [e.step for e in entries if isinstance(e, GroupStart)] == [0]
    assert [e.total for e in entries if isinstance(e, TrainingGoal)] == [30]


def test_rows_are_written_again_after_the_agent_did_not_answer() -> None:
    worker = Worker()
    worker.sink.fails = 2
    for step in range(5):
        worker.commit(float(step))
    worker.recorder._writer.flush()
    worker.recorder._writer.flush()
    worker.recorder._writer.flush()
    worker.recorder.close()
    assert _steps(worker.sink.entries) == list(range(5))


def test_second_worker_of_a_machine_writes_only_its_own_values() -> None:
    worker = Worker(rank=1, machines=("", ""))
    for step in range(5):
        worker.commit(float(step))
    worker.recorder.close()
    assert {type(entry) for entry in worker.sink.entries} == {OwnValues}


def test_second_worker_writes_what_a_dead_first_one_may_not_have_written() -> None:
    worker = Worker(rank=1, machines=("", ""))
    for step in range(5):
        worker.commit(float(step))
    worker.manager.rank, worker.manager.generation = 0, 2  # type: ignore[misc]
    worker.manager.machines = lambda: ("",)  # type: ignore[method-assign]
    for step in range(5, 8):
        worker.commit(float(step))
    worker.recorder.close()
    assert _steps(worker.sink.entries) == list(range(8))
    assert _losses(worker.sink.entries) == {step: float(step) for step in range(8)}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_rows_are_written_before_another_worker_gets_the_state(rank: int) -> None:
    worker = Worker(rank=rank, machines=("", ""))
    worker.recorder.attach(CheckpointManager(None, 60.0, 2))
    for step in range(5):
        worker.commit(float(step))
    for callback in worker.steps.on_handover:
        callback()
    # Nothing more of it: the worker is killed.
    assert _steps(worker.sink.entries) == list(range(5))
    assert _losses(worker.sink.entries) == {step: float(step) for step in range(5)}


def test_values_without_votes_are_written_as_own_ones() -> None:
    worker = Worker()
    worker.commit(1.0)
    worker.commit(2.0, has_votes=False)  # the group broke, and the step counts all the same
    worker.manager.generation = 2  # type: ignore[misc]
    worker.commit(3.0)
    worker.recorder.close()
    assert _losses(worker.sink.entries) == {0: 1.0, 1: 2.0, 2: 3.0}


def test_rounds_of_local_steps_are_rows_of_several_steps() -> None:
    worker = Worker()
    for step in range(3):
        worker.commit(float(step), stride=4)
    worker.recorder.close()
    steps = [entry for entry in worker.sink.entries if isinstance(entry, StepBatch)]
    assert [(entry.first, entry.stride) for entry in steps] == [(0, 4)]
    assert _losses(worker.sink.entries)[4] == 1.0


def test_steps_of_a_lease_are_one_row_with_the_exchange_after_it() -> None:
    worker = Worker()
    for lease in range(3):
        for loss in (1.0, 3.0):
            worker.commit(lease + loss, stride=0)
        worker.steps.committed_samples = 0
        worker.commit(None, stride=5)  # the exchange: all groups have trained five batches meanwhile
        worker.steps.committed_samples = 12
    worker.recorder.close()
    entries = decode_frames(encode_frames(worker.sink.entries)).entries
    steps = [entry for entry in merge([entries]) if isinstance(entry, StepBatch)]
    assert [(entry.first, entry.stride, entry.samples) for entry in steps] == [(0, 5, (24, 24, 24))]
    assert _losses(entries) == {0: 2.0, 5: 3.0, 10: 4.0}
    assert {entry.origin for entry in entries if isinstance(entry, GroupStart)} == {"start"}


def test_steps_in_which_nothing_was_logged_are_rows_without_values() -> None:
    worker = Worker()
    worker.commit(None)
    for step in range(1, 30):
        worker.commit(float(step) if step % 10 == 1 else None)
    worker.recorder.close()
    rows = [entry for entry in worker.sink.entries if isinstance(entry, ValueBatch)]
    gaps = [(entry.first, entry.stride) for entry in rows if not entry.names]
    assert gaps == [(2, 9), (12, 9), (22, 7)], "the values of the last step come with no commit"
    assert _losses([row for row in rows if row.names]) == {1: 1.0, 11: 11.0, 21: 21.0}


def test_phases_of_a_step_add_up_to_its_time() -> None:
    worker = Worker()
    worker.commit(1.0)
    with worker.throughput.phases.measure("communication"):
        time.sleep(0.02)
    worker.commit(2.0)
    worker.recorder.close()
    steps = [entry for entry in worker.sink.entries if isinstance(entry, StepBatch)]
    ticks, communication = steps[-1].ticks[-1], steps[-1].phases[2][-1]
    assert communication >= 200
    assert sum(column[-1] for column in steps[-1].phases) == pytest.approx(ticks, abs=3)


def test_share_of_a_machine_is_of_the_micro_batches_that_it_got() -> None:
    worker = Worker(rank=1, machines=("aa", "bb", "bb"))
    worker.throughput.assigned = (4, 3, 1)
    for step in range(3):
        worker.commit(float(step))
    worker.recorder.close()
    shares = [entry.share for entry in worker.sink.entries if isinstance(entry, MachineSample)]
    assert shares
    assert set(shares) == {0.5}
    assert len(shares) <= 3, "one at the first commit, one at the end, and one at a quarter of a minute"


def test_rows_become_coarser_while_nothing_can_be_written_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_writer, "_MOST_WAITING", 20_000)
    worker = Worker()
    worker.sink.fails = 10_000
    for step in range(3000):
        worker.commit(float(step))
        if step % 100 == 99:
            worker.recorder._writer.flush()
    assert len(encode_frames(worker.recorder._writer._waiting)) < 25_000
    worker.sink.fails = 0
    worker.recorder.close()
    assert _steps(worker.sink.entries) == list(range(3000))
    batches = [entry for entry in worker.sink.entries if isinstance(entry, StepBatch)]
    assert sum(sum(entry.samples) for entry in batches) == 12 * 3000
    covered = {entry.first for entry in batches}
    assert len(covered) == len(batches)


def test_entry_that_the_agent_would_reject_does_not_hold_up_the_others() -> None:
    worker = Worker()
    worker.commit(0.0)
    worker.recorder._writer.put(MachineSample(1.0, b"", samples_per_s=float("inf")))
    for step in range(1, 5):
        worker.commit(float(step))
    worker.recorder.close()
    assert _steps(decode_frames(encode_frames(worker.sink.entries)).entries) == list(range(5))


def test_many_entries_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    class Client:
        def ask(self, question: bytes, timeout: float) -> None:
            assert len(question) <= LARGEST_BODY
            request = decode_request(question)
            assert isinstance(request, RecordRequest)
            received.append(request.frames)

        def close(self) -> None: ...

    monkeypatch.setattr(ListenerClient, "connect", lambda state: Client())
    entries = [NoteEntry(float(number), "x" * 4000) for number in range(1000)]
    sink = AgentSink(WorkerId("train-k3f9", 0, 1, Path(), "00" * 32))
    sink.write(entries)
    assert len(received) > 4
    assert decode_frames(b"".join(received)).entries == tuple(entries)
