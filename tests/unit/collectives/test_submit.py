"""Submission of operations: order, window, deadlines, failures and metrics, against a fake process."""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import pytest
import torch
import torch.distributed as dist

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.c10d.operations import OpenedGroup
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.collectives.messages import (
    AbortGroup,
    CancelOperation,
    Command,
    Failure,
    ReceiveFrom,
    SendTo,
    StartOperation,
)
from barnraise.collectives.ops import chunking, operation, reduction
from barnraise.collectives.per_call import call_options
from barnraise.collectives.shm.arena import SharedArena
from barnraise.collectives.submit import Submitter
from barnraise.collectives.torch_patch.torch_version import warn_if_untested
from barnraise.core import metrics
from barnraise.core.config import CollectiveSettings, Settings
from barnraise.core.errors import (
    CollectiveError,
    CommProcessLost,
    OperationTimeout,
    PeerLost,
)
from barnraise.core.flow import log_once
from barnraise.core.installation import is_tested
from barnraise.core.metrics.sample import value_of
from tests.unit.collectives.fake_comm_process import FakeCommProcess

SUM = dist.ReduceOp(dist.ReduceOp.SUM)
MB = 1 << 20


@pytest.fixture
def comm_process() -> FakeCommProcess:
    return FakeCommProcess()


@pytest.fixture
def submitter(comm_process: FakeCommProcess) -> Submitter:
    return _submitter(comm_process)


def _submitter(comm_process: FakeCommProcess) -> Submitter:
    return Submitter(
        comm_process, SharedArena(comm_process), 77, 2, CostTable.default(), CollectiveSettings()
    )


def _sequences(comm_process: FakeCommProcess) -> list[int]:
    return [command.sequence for command, _, _ in comm_process.pending if isinstance(command, StartOperation)]


def test_sequence_numbers_follow_order_of_calls(comm_process: FakeCommProcess, submitter: Submitter) -> None:
    first = submitter.submit_collective(reduction.all_reduce(torch.ones(5 * MB), SUM, 2), 60)
    second = submitter.submit_collective(operation.barrier(), 60)
    assert _sequences(comm_process) == [0, 1, 2, 3, 4, 5]
    assert not first.is_completed()
    while comm_process.pending:
        comm_process.finish()
    assert first.wait()
    assert second.wait()


def test_window_bounds_staged_bytes(
    comm_process: FakeCommProcess, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.submit._WINDOW_BYTES", 12 * MB)
    work = submitter.submit_collective(reduction.all_reduce(torch.ones(10 * MB), SUM, 2), 60)
    assert _sequences(comm_process) == [0, 1, 2]
    comm_process.finish()
    assert _sequences(comm_process) == [1, 2, 3]
    while comm_process.pending:
        comm_process.finish()
    assert work.wait()


def test_full_arena_allows_one_chunk_per_operation() -> None:
    comm_process = FakeCommProcess(
        msgspec.structs.replace(Settings(), collectives=CollectiveSettings(arena_bytes=8 * MB))
    )
    submitter = _submitter(comm_process)
    works = [
        submitter.submit_collective(reduction.all_reduce(torch.ones(4 * MB), SUM, 2), 60) for _ in range(3)
    ]
    assert _sequences(comm_process) == [0, 1, 4, 8]
    while comm_process.pending:
        comm_process.finish()
    assert all(work.wait() for work in works)


def test_later_chunks_get_remaining_timeout(
    comm_process: FakeCommProcess, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.submit._WINDOW_BYTES", 0)
    submitter.submit_collective(reduction.all_reduce(torch.ones(4 * MB), SUM, 2), 60)
    first = comm_process.pending[0][0]
    time.sleep(0.1)
    comm_process.finish()
    last = comm_process.pending[-1][0]
    assert isinstance(first, StartOperation)
    assert isinstance(last, StartOperation)
    assert first.timeout_s <= 60
    assert last.timeout_s <= first.timeout_s - 0.09


def test_chunks_start_in_order_from_any_thread(
    comm_process: FakeCommProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are handled by another thread while the caller still starts pieces."""
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 4096)
    monkeypatch.setattr("barnraise.collectives.submit._WINDOW_BYTES", 3 * 4096)
    submitter, order = _submitter(comm_process), []

    def note(command: Command) -> None:
        assert isinstance(command, StartOperation)
        order.append(command.sequence)
        time.sleep(0.0002)

    comm_process.on_submit = note
    over = threading.Event()

    def answer() -> None:
        while not over.is_set() or comm_process.pending:
            if comm_process.pending:
                comm_process.finish()
            else:
                time.sleep(0)  # a loop that never rests keeps the interpreter's lock

    thread = threading.Thread(target=answer, daemon=True)  # a failure must not keep the process
    thread.start()
    tensor = torch.ones(300 * 1024)
    try:
        assert submitter.submit_collective(reduction.all_reduce(tensor, SUM, 2), 60).wait()
    finally:
        over.set()
        thread.join(90)
    assert order == sorted(order)
    assert len(order) == 300


def test_lost_comm_process_fails_work_without_deadlock(
    comm_process: FakeCommProcess, submitter: Submitter
) -> None:
    comm_process.lose()
    work = submitter.submit_collective(reduction.all_reduce(torch.ones(20 * MB), SUM, 2), 60)
    with pytest.raises(CommProcessLost):
        work.wait()


def test_failed_chunk_fails_work_and_stops_submission(
    comm_process: FakeCommProcess, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.submit._WINDOW_BYTES", 0)
    tensor = torch.ones(5 * MB)
    work = submitter.submit_collective(reduction.all_reduce(tensor, SUM, 2), 60)
    assert len(comm_process.pending) == 2
    comm_process.fail(Failure("peer-lost", "its process ended", peer=1))
    with pytest.raises(PeerLost) as caught:
        work.wait()
    assert caught.value.peer == 1
    command = comm_process.pending[0][0]
    assert isinstance(command, StartOperation)
    submitter.arena.view(submitter.arena.allocate(1), 1).fill_(9)
    comm_process.finish()
    assert tensor.eq(1).all(), "a failed operation writes no more"
    assert comm_process.pending == []
    assert submitter.arena.has_room(submitter.arena._limit - 256)


def test_timeout_names_late_ranks(comm_process: FakeCommProcess, submitter: Submitter) -> None:
    work = submitter.submit_collective(operation.barrier(), 60)
    comm_process.fail(Failure("operation-timeout", "rank 1 is late", late=(1,)))
    with pytest.raises(OperationTimeout) as caught:
        work.wait()
    assert caught.value.late == (1,)


def test_cancelled_operation_times_out_all_its_chunks(
    comm_process: FakeCommProcess, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.submit._WINDOW_BYTES", 0)
    work = submitter.submit_collective(reduction.all_reduce(torch.ones(5 * MB), SUM, 2), 60)
    in_flight = [number for _, number, _ in comm_process.pending]
    assert len(in_flight) == 2
    assert work.cancel is not None
    work.cancel()
    assert comm_process.sent == [CancelOperation(number, 77) for number in in_flight]
    comm_process.finish()  # before it was cancelled there
    assert comm_process.sent[2:] == [CancelOperation(comm_process.pending[-1][1], 77)]
    comm_process.fail(Failure("operation-timeout", "rank 1 is late", late=(1,)))
    with pytest.raises(OperationTimeout):
        work.wait()
    comm_process.fail(Failure("operation-timeout", "rank 1 is late", late=(1,)))
    assert comm_process.pending == []


def test_block_gives_its_calls_a_timeout(comm_process: FakeCommProcess, submitter: Submitter) -> None:
    group = BarnraiseProcessGroup(OpenedGroup(0, 2, submitter), 60)
    with call_options(timeout=5):
        group.allreduce([torch.ones(2)])
        group.recv([torch.zeros(2)], 1)
    group.recv([torch.zeros(2)], 1)
    commands = [command for command, _, _ in comm_process.pending]
    assert [command.timeout_s > 5 for command in commands] == [False, False, True]  # type: ignore[union-attr]
    receives = [command for command in commands if isinstance(command, ReceiveFrom)]
    assert [receive.fails_alone for receive in receives] == [True, False]


def _broken_call(where: str) -> operation.Operation:
    def copy(_: torch.Tensor) -> None:
        raise RuntimeError("device on fire")

    call = operation.send(torch.ones(1))
    chunk = call.chunks[0]
    broken = chunking.Chunk(
        chunk.sizes,
        chunk.nbytes,
        copy if where == "in" else chunking.no_copy,
        copy if where == "out" else chunking.no_copy,
    )
    return operation.Operation("broadcast", call.element, [broken], [], call.device)


@pytest.mark.parametrize("where", ["in", "out"])
def test_failed_copy_fails_work_and_aborts_group(
    comm_process: FakeCommProcess, submitter: Submitter, where: str
) -> None:
    """The others must not wait for pieces that this rank will never start."""
    work = submitter.submit_collective(_broken_call(where), 60)
    if where == "out":
        comm_process.finish()
    with pytest.raises(CollectiveError, match="device on fire"):
        work.wait()
    assert isinstance(comm_process.sent[0], AbortGroup)
    assert submitter.arena.has_room(submitter.arena._limit)


def test_keyboard_interrupt_reaches_the_script(submitter: Submitter) -> None:
    def fill(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    call = operation.barrier()
    interrupted = operation.Operation(
        "barrier", call.element, [chunking.Chunk((), 0, fill, chunking.no_copy)], [], call.device
    )
    with pytest.raises(KeyboardInterrupt):
        submitter.submit_collective(interrupted, 60)


def test_point_to_point_reports_source_rank(comm_process: FakeCommProcess, submitter: Submitter) -> None:
    submitter.submit_point_to_point(operation.send(torch.ones(3)), 1, 5, 60)
    work = submitter.submit_point_to_point(operation.receive(torch.zeros(3)), -1, 5, 60)
    sent = comm_process.finish()
    received = comm_process.finish(peer=1)
    assert isinstance(sent, SendTo)
    assert (sent.peer, sent.tag, sent.size) == (1, 5, 12)
    assert isinstance(received, ReceiveFrom)
    assert received.peer == -1
    assert work.wait()
    assert work._source_rank() == 1


def test_operations_update_metrics(comm_process: FakeCommProcess, submitter: Submitter) -> None:
    def figures() -> list[float]:
        samples = metrics.registry.samples()
        count = "barnraise_collective_duration_seconds_count"
        return [
            value_of(samples, "barnraise_collective_payload_bytes_total", "broadcast") or 0.0,
            value_of(samples, "barnraise_collective_failures_total", "broadcast", "peer-lost") or 0.0,
            sum(each.value for each in samples if each.name == count and each.labels[0] == "broadcast"),
        ]

    before = figures()
    call = operation.send(torch.ones(8))
    call = operation.Operation("broadcast", call.element, call.chunks, [], call.device, root=0)
    for _ in range(2):
        submitter.submit_collective(call, 60)
    comm_process.finish(time.monotonic_ns())
    comm_process.fail(Failure("peer-lost", "gone", peer=1))
    assert [after - old for after, old in zip(figures(), before, strict=True)] == [32, 1, 1]


def test_algorithm_choice_is_logged_once(
    submitter: Submitter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_once, "_seen", set())
    with caplog.at_level(logging.INFO, "barnraise.collectives"):
        for _ in range(3):
            submitter.submit_collective(reduction.all_reduce(torch.ones(1000), SUM, 2), 60)
        submitter.submit_collective(reduction.all_reduce(torch.ones(1 * MB), SUM, 2), 60)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all(message.startswith("all_reduce by ") and "2 ranks" in message for message in messages)


def test_untested_torch_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_once, "_seen", set())
    assert is_tested("2.13.1+cu130")
    assert is_tested("2.15.0+cpu")
    assert not is_tested("2.16.0")
    assert not is_tested("2.12.9")
    assert not is_tested("main")
    for version in ("2.13.0+cpu", "2.16.0", "2.16.0"):
        warn_if_untested(version)
    assert [record.args[0] for record in caplog.records if record.args] == ["2.16.0"]  # type: ignore[index]


def test_command_line_and_backend_share_torch_range() -> None:
    from barnraise.cli.machine import torch_install
    from barnraise.collectives.torch_patch import torch_version
    from barnraise.core import installation

    assert torch_version.is_tested is torch_install.is_tested is installation.is_tested
    assert torch_version.TESTED_RANGE == installation.TESTED_RANGE


def test_group_is_closed_once_and_destructor_takes_no_lock(
    comm_process: FakeCommProcess, submitter: Submitter
) -> None:
    left: list[int] = []
    forgotten: list[int] = []
    comm_process.close_group = left.append  # type: ignore[method-assign]
    comm_process.close_group_later = forgotten.append  # type: ignore[method-assign]
    closed = BarnraiseProcessGroup(OpenedGroup(0, 2, submitter), 60)
    closed.shutdown()
    del closed
    dropped = BarnraiseProcessGroup(OpenedGroup(0, 2, submitter), 60)
    del dropped
    assert left == [77]
    assert forgotten == [77]


def test_bare_tensors_and_reduce_ops_are_accepted(
    comm_process: FakeCommProcess, submitter: Submitter
) -> None:
    """As DDP's join gives them."""
    group = BarnraiseProcessGroup(OpenedGroup(0, 2, submitter), 60)
    group.allreduce(torch.ones(2))  # type: ignore[arg-type]
    group.allreduce([torch.ones(2)], dist.ReduceOp(dist.ReduceOp.MAX))
    reductions = [
        c.specification.reduction for c, _, _ in comm_process.pending if isinstance(c, StartOperation)
    ]
    assert reductions == ["sum", "max"]
    assert group.allreduce_coalesced([]).wait()


def test_coalesced_operations_complete_as_one_work(
    comm_process: FakeCommProcess, submitter: Submitter
) -> None:
    group = BarnraiseProcessGroup(OpenedGroup(0, 2, submitter), 60)
    device = torch.device("cpu")
    group._start_coalescing(device)
    group.allreduce([torch.ones(2)])
    group.send([torch.ones(2)], 1)
    whole = group._end_coalescing(device)
    group.allreduce([torch.ones(2)])
    comm_process.finish()
    assert not whole.is_completed()
    comm_process.finish()
    assert whole.wait()
    assert len(whole.result()) == 2


def test_forked_child_gets_error_about_its_parent(
    comm_process: FakeCommProcess, submitter: Submitter
) -> None:
    comm_process.inherited = True
    comm_process.lose()
    with pytest.raises(CommProcessLost):
        submitter.submit_collective(operation.barrier(), 60)
