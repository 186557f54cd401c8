"""The progress of a run is what its main worker reports."""

from __future__ import annotations

import pytest
from msgspec import ValidationError, msgpack
from msgspec.structs import replace

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.runs.control.worker_status import training_progress
from barnraise.runs.record import WorkerState
from tests.unit.runs.control.test_lifecycle import A, B, at_work, order, running


def test_training_progress_is_that_of_rank_0_and_else_the_highest() -> None:
    record = replace(running(order()), elastic=True)
    assert record.slots[0].node == A
    assert training_progress(record, {}) is None
    old = WorkerState(1, "running", progress=TrainingProgress(40, 64))
    reports = {B: at_work(record, B, x=old)}
    assert training_progress(record, reports) == TrainingProgress(40, 64), "rank 0 has not reported yet"
    main = WorkerState(0, "running", progress=TrainingProgress(30, 64))
    reports[A] = at_work(record, A, x=main)
    assert training_progress(record, reports) == TrainingProgress(30, 64), "later steps were dropped"


@pytest.mark.parametrize(
    "values",
    [
        [-1],
        [10**12],
        [1, 2, "x" * 25],
        [1, 2, "loss", 0.0, -1.0],
        [1, 2, "loss", 0.0, float("nan")],
        [1, 2, "loss", 0.0, 1.0, float("inf")],
    ],
)
def test_training_progress_of_a_peer_is_bounded(values: list[object]) -> None:
    with pytest.raises(ValidationError):
        msgpack.decode(msgpack.encode(values), type=TrainingProgress)
