"""Restart policy: a worker that fails alone is restarted once; an error of the script fails the run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.runs.control.lifecycle import next_record
from barnraise.runs.control.restart_policy import failure_kind
from barnraise.runs.record import RunRecord, WorkerState
from tests.unit.runs.control.test_lifecycle import A, B, C, at_work, facts, in_session, order


def trace(line: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3\n    f()\n{line}\n  -> Fix it.\n'


def raised(
    rank: int, line: str = "OSError: [Errno 5] Input/output error", *, trained: bool = True
) -> WorkerState:
    return WorkerState(rank, "ended", 1, 0, trace(line), trained=trained)


def after(record: RunRecord, *ends: WorkerState, since_s: float = 0.0) -> RunRecord | None:
    spec = order()
    given = {record.slots[end.rank].node: end for end in ends}
    reports = {
        node: at_work(record, node, **({"x": given[node]} if node in given else {})) for node in record.nodes
    }
    return next_record(record, facts(spec, reports, since_s=since_s))


def test_failed_worker_that_had_trained_is_removed_and_may_join_again() -> None:
    record = in_session(order())
    next_one = after(record, raised(1))
    assert next_one is not None
    assert (next_one.phase, next_one.nodes) == ("running", (A, C))
    assert "pc failed (OSError) and is restarted once" in next_one.why


@pytest.mark.parametrize(
    "end",
    [
        raised(1, trained=False),
        raised(1, "barnraise.core.errors.RunError: [run] members count 3, 4 samples"),
        raised(1, "barnraise.core.errors.CheckpointError: [checkpoint] no checkpoint can be read"),
    ],
)
def test_failure_before_training_or_one_for_a_person_fails_the_run(end: WorkerState) -> None:
    stopping = after(in_session(order()), end)
    assert stopping is not None
    assert stopping.phase == "stopping"
    assert stopping.outcome is not None
    assert (stopping.outcome.node, stopping.outcome.tail) == (B, end.tail)


def test_second_failure_of_a_slot_fails_the_run_unless_settled() -> None:
    record = in_session(order())
    once = after(record, raised(1))
    assert once is not None
    again = raised(0, "RuntimeError: CUDA error: unspecified launch failure")
    twice = after(once, again)
    assert twice is not None
    assert twice.nodes == (C,), "another place, with another failure"
    third = after(twice, raised(0, "MemoryError"))
    assert third is not None
    assert third.phase == "stopping", "no other worker trains"
    settled = after(once, since_s=601.0)
    assert settled is not None
    assert settled.restarted_failures == ()
    back = replace(once, slots=record.slots)
    same = after(back, raised(1, "MemoryError"))
    assert same is not None
    assert same.phase == "stopping"


def test_equal_failures_of_two_workers_fail_the_run() -> None:
    """A sample that the script cannot read moves from one worker to the next."""
    record = in_session(order())
    first = after(record, raised(0, "KeyError: 'label'"))
    assert first is not None
    assert first.phase == "running"
    second = after(first, raised(0, "KeyError: 'label'"))
    assert second is not None
    assert second.phase == "stopping"
    assert second.outcome is not None
    assert "KeyError" in second.outcome.tail
    both = after(record, raised(0, "KeyError: 'label'"), raised(1, "KeyError: 'label'"))
    assert both is not None
    assert both.phase == "stopping"


def test_worker_that_lost_a_peer_in_its_own_collective_counts_as_killed() -> None:
    record = in_session(order())
    lost = "barnraise.core.errors.PeerLost: [peer-lost] rank 2 is lost: its machine is gone"
    killed = WorkerState(2, "ended", 0, 9)
    again = after(record, raised(0, lost), raised(1, lost), killed)
    assert again is not None
    assert again.phase == "restarting", "from the last checkpoint"


def test_failure_kind_is_that_of_the_last_traceback() -> None:
    chained = trace("KeyError: 3") + "\nDuring handling of the above exception, another occurred:\n\n"
    assert (
        failure_kind(WorkerState(0, "ended", 1, 0, chained + trace("a.b.CustomError: no"))) == "CustomError"
    )
    assert failure_kind(WorkerState(0, "ended", 3, 0, "bye")) == "code 3"


REFUSED = "barnraise.core.errors.WorkerRefused: [worker-refused] pc is refused by the others: its lr is 1"


def test_refused_worker_leaves_the_session_and_the_others_go_on() -> None:
    record = in_session(order())
    left = after(record, raised(1, REFUSED))
    assert left is not None
    assert (left.phase, left.nodes) == ("running", (A, C))
    assert left.why.startswith("pc is refused by the others: its lr is 1; training continues on")
    assert left.restarted_failures == (), "another failure may still be restarted"


def test_refusal_before_anything_was_trained_fails_the_run() -> None:
    stopping = after(in_session(order()), raised(1, REFUSED, trained=False))
    assert stopping is not None
    assert stopping.phase == "stopping"
    assert stopping.outcome is not None
    assert "its lr is 1" in stopping.outcome.tail
