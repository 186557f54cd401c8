"""Issuing: order, window, deadlines, failures and figures, against a mover in this process."""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import pytest
import torch
import torch.distributed as dist

from barnraise.collectives import announcements, calls, pieces, reducing
from barnraise.collectives.backend import BarnraiseGroup, monitored_barrier
from barnraise.collectives.costs import CostTable
from barnraise.collectives.issue import Issuer
from barnraise.collectives.messages import AbortGroup, Failure, ReceiveFrom, SendTo, Start
from barnraise.collectives.staging import Arena
from barnraise.collectives.torch_version import warn_if_untested
from barnraise.core import metrics
from barnraise.core.config import Collectives, Settings
from barnraise.core.errors import (
    CollectiveError,
    MoverLost,
    OperationTimeout,
    PeerLost,
    UnsupportedOperation,
)
from barnraise.core.torch_range import is_tested
from tests.unit.collectives.fake_mover import FakeMover

SUM = dist.ReduceOp(dist.ReduceOp.SUM)
MB = 1 << 20


@pytest.fixture
def mover() -> FakeMover:
    return FakeMover()


@pytest.fixture
def issuer(mover: FakeMover) -> Issuer:
    return _issuer(mover)


def _issuer(mover: FakeMover) -> Issuer:
    return Issuer(mover, Arena(mover), 77, 2, CostTable.default(), Collectives())


@pytest.mark.parametrize("threshold", [0, 4096, 4097, 1 << 30])
def test_the_plain_rule_of_four_ranks_changes_from_tree_to_ring_where_the_setting_says(
    mover: FakeMover, threshold: int
) -> None:
    settings = Collectives(strategy="plain", tree_below_bytes=threshold)
    issuer = Issuer(mover, Arena(mover), 77, 4, CostTable.default(), settings)
    issuer.collective(reducing.all_reduce(torch.ones(1024), SUM, 4), 60)
    command = mover.pending[0][0]
    assert isinstance(command, Start)
    assert command.specification.strategy == ("tree" if threshold > 4096 else "ring")


def _sequences(mover: FakeMover) -> list[int]:
    return [command.sequence for command, _, _ in mover.pending if isinstance(command, Start)]


def test_sequences_are_taken_in_the_order_of_calls(mover: FakeMover, issuer: Issuer) -> None:
    first = issuer.collective(reducing.all_reduce(torch.ones(5 * MB), SUM, 2), 60)
    second = issuer.collective(calls.barrier(), 60)
    assert _sequences(mover) == [0, 1, 2, 3, 4, 5]
    assert not first.is_completed()
    while mover.pending:
        mover.finish()
    assert first.wait()
    assert second.wait()


def test_the_window_bounds_what_is_staged(
    mover: FakeMover, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.issue._WINDOW_BYTES", 12 * MB)
    work = issuer.collective(reducing.all_reduce(torch.ones(10 * MB), SUM, 2), 60)
    assert _sequences(mover) == [0, 1, 2]
    mover.finish()
    assert _sequences(mover) == [1, 2, 3]
    while mover.pending:
        mover.finish()
    assert work.wait()


def test_a_full_arena_lets_every_operation_have_one_piece() -> None:
    mover = FakeMover(msgspec.structs.replace(Settings(), collectives=Collectives(arena_bytes=8 * MB)))
    issuer = _issuer(mover)
    works = [issuer.collective(reducing.all_reduce(torch.ones(4 * MB), SUM, 2), 60) for _ in range(3)]
    assert _sequences(mover) == [0, 1, 4, 8]
    while mover.pending:
        mover.finish()
    assert all(work.wait() for work in works)


def test_later_pieces_get_what_is_left_of_the_time(
    mover: FakeMover, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.issue._WINDOW_BYTES", 0)
    issuer.collective(reducing.all_reduce(torch.ones(4 * MB), SUM, 2), 60)
    first = mover.pending[0][0]
    time.sleep(0.1)
    mover.finish()
    last = mover.pending[-1][0]
    assert isinstance(first, Start)
    assert isinstance(last, Start)
    assert first.timeout_s <= 60
    assert last.timeout_s <= first.timeout_s - 0.09


def test_pieces_start_in_order_whoever_launches_them(
    mover: FakeMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are handled by another thread while the caller still starts pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    monkeypatch.setattr("barnraise.collectives.issue._WINDOW_BYTES", 3 * 4096)
    issuer, order, lock = _issuer(mover), [], threading.Lock()

    def note() -> None:
        with lock:
            command = mover.pending[-1][0]
            assert isinstance(command, Start)
            order.append(command.sequence)
        time.sleep(0.0002)

    mover.on_submit = note
    over = threading.Event()

    def answer() -> None:
        while not over.is_set() or mover.pending:
            if mover.pending:
                mover.finish()
            else:
                time.sleep(0)  # a loop that never rests keeps the interpreter's lock

    thread = threading.Thread(target=answer)
    thread.start()
    tensor = torch.ones(300 * 1024)
    work = issuer.collective(reducing.all_reduce(tensor, SUM, 2), 60)
    assert work.wait()
    over.set()
    thread.join(90)
    assert order == sorted(order)
    assert len(order) == 300


def test_a_lost_mover_fails_the_work_without_a_lock_on_itself(mover: FakeMover, issuer: Issuer) -> None:
    mover.lose()
    work = issuer.collective(reducing.all_reduce(torch.ones(20 * MB), SUM, 2), 60)
    with pytest.raises(MoverLost):
        work.wait()


def test_a_failure_ends_the_work_and_starts_no_more(
    mover: FakeMover, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.collectives.issue._WINDOW_BYTES", 0)
    tensor = torch.ones(5 * MB)
    work = issuer.collective(reducing.all_reduce(tensor, SUM, 2), 60)
    assert len(mover.pending) == 2
    mover.fail(Failure("peer-lost", "its process ended", peer=1))
    with pytest.raises(PeerLost) as caught:
        work.wait()
    assert caught.value.peer == 1
    command = mover.pending[0][0]
    assert isinstance(command, Start)
    issuer.arena.view(issuer.arena.take(1), 1).fill_(9)
    mover.finish()
    assert tensor.eq(1).all(), "a failed operation writes no more"
    assert mover.pending == []
    assert issuer.arena.has_room(issuer.arena._limit - 256)


def test_a_time_out_names_the_late(mover: FakeMover, issuer: Issuer) -> None:
    work = issuer.collective(calls.barrier(), 60)
    mover.fail(Failure("operation-timeout", "rank 1 is late", late=(1,)))
    with pytest.raises(OperationTimeout) as caught:
        work.wait()
    assert caught.value.late == (1,)


def _broken_call(where: str) -> calls.Call:
    def copy(_: torch.Tensor) -> None:
        raise RuntimeError("device on fire")

    call = calls.send(torch.ones(1))
    piece = call.pieces[0]
    broken = pieces.Piece(
        piece.sizes,
        piece.nbytes,
        copy if where == "in" else pieces.nothing,
        copy if where == "out" else pieces.nothing,
    )
    return calls.Call("broadcast", call.element, [broken], [], call.device)


@pytest.mark.parametrize("where", ["in", "out"])
def test_a_copy_that_fails_ends_the_work_and_the_group(mover: FakeMover, issuer: Issuer, where: str) -> None:
    """The others must not wait for pieces that this rank will never start."""
    work = issuer.collective(_broken_call(where), 60)
    if where == "out":
        mover.finish()
    with pytest.raises(CollectiveError, match="device on fire"):
        work.wait()
    assert isinstance(mover.sent[0], AbortGroup)
    assert issuer.arena.has_room(issuer.arena._limit)


def test_an_interrupt_reaches_the_program(issuer: Issuer) -> None:
    def fill(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    call = calls.barrier()
    interrupted = calls.Call(
        "barrier", call.element, [pieces.Piece((), 0, fill, pieces.nothing)], [], call.device
    )
    with pytest.raises(KeyboardInterrupt):
        issuer.collective(interrupted, 60)


def test_point_to_point_tells_the_source(mover: FakeMover, issuer: Issuer) -> None:
    issuer.point_to_point(calls.send(torch.ones(3)), 1, 5, 60)
    work = issuer.point_to_point(calls.receive(torch.zeros(3)), -1, 5, 60)
    sent = mover.finish()
    received = mover.finish(peer=1)
    assert isinstance(sent, SendTo)
    assert (sent.peer, sent.tag, sent.size) == (1, 5, 12)
    assert isinstance(received, ReceiveFrom)
    assert received.peer == -1
    assert work.wait()
    assert work._source_rank() == 1


def test_figures_are_kept(mover: FakeMover, issuer: Issuer) -> None:
    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, labels) or 0.0

    def figures() -> list[float]:
        return [
            value("barnraise_collective_bytes_total", kind="broadcast", direction="both"),
            value("barnraise_collective_failures_total", kind="broadcast", code="peer-lost"),
            sum(
                value("barnraise_collective_duration_seconds_count", kind="broadcast", strategy=strategy)
                for strategy in ("ring", "tree", "star", "doubling", "direct", "exchange")
            ),
        ]

    before = figures()
    call = calls.send(torch.ones(8))
    call = calls.Call("broadcast", call.element, call.pieces, [], call.device, root=0)
    for _ in range(2):
        issuer.collective(call, 60)
    mover.finish(time.monotonic_ns())
    mover.fail(Failure("peer-lost", "gone", peer=1))
    assert [after - old for after, old in zip(figures(), before, strict=True)] == [32, 1, 1]


def test_choices_are_explained_once(
    issuer: Issuer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "_said", set())
    with caplog.at_level(logging.INFO, "barnraise.collectives"):
        for _ in range(3):
            issuer.collective(reducing.all_reduce(torch.ones(1000), SUM, 2), 60)
        issuer.collective(reducing.all_reduce(torch.ones(1 * MB), SUM, 2), 60)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all(message.startswith("all_reduce by ") and "2 ranks" in message for message in messages)


def test_an_untested_torch_is_mentioned_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "_said", set())
    assert is_tested("2.13.1+cu130")
    assert not is_tested("2.14.0")
    assert not is_tested("2.12.9")
    assert not is_tested("main")
    for version in ("2.13.0+cpu", "2.14.0", "2.14.0"):
        warn_if_untested(version)
    assert [record.args[0] for record in caplog.records if record.args] == ["2.14.0"]  # type: ignore[index]


def test_the_command_line_and_the_backend_know_one_range() -> None:
    from barnraise.cli import torch_install
    from barnraise.collectives import torch_version
    from barnraise.core import torch_range

    assert torch_version.is_tested is torch_install.is_tested is torch_range.is_tested
    assert torch_version.TESTED_FIRST == torch_range.TESTED_FIRST


def test_a_group_is_left_once_and_forgotten_without_locks(mover: FakeMover, issuer: Issuer) -> None:
    left: list[int] = []
    forgotten: list[int] = []
    mover.close_group = left.append  # type: ignore[method-assign]
    mover.forget_group = forgotten.append  # type: ignore[method-assign]
    closed = BarnraiseGroup(0, 2, 60, issuer, ())
    closed.shutdown()
    del closed
    dropped = BarnraiseGroup(0, 2, 60, issuer, ())
    del dropped
    assert left == [77]
    assert forgotten == [77]


def test_bare_tensors_and_operations_are_taken_too(mover: FakeMover, issuer: Issuer) -> None:
    """As DDP's join gives them."""
    group = BarnraiseGroup(0, 2, 60, issuer, ())
    group.allreduce(torch.ones(2))  # type: ignore[arg-type]
    group.allreduce([torch.ones(2)], dist.ReduceOp(dist.ReduceOp.MAX))
    reductions = [c.specification.reduction for c, _, _ in mover.pending if isinstance(c, Start)]
    assert reductions == ["sum", "max"]
    assert group.allreduce_coalesced([]).wait()


def test_coalesced_operations_are_waited_for_as_one(mover: FakeMover, issuer: Issuer) -> None:
    group = BarnraiseGroup(0, 2, 60, issuer, ())
    device = torch.device("cpu")
    group._start_coalescing(device)
    group.allreduce([torch.ones(2)])
    group.send([torch.ones(2)], 1)
    whole = group._end_coalescing(device)
    group.allreduce([torch.ones(2)])
    mover.finish()
    assert not whole.is_completed()
    mover.finish()
    assert whole.wait()
    assert len(whole.result()) == 2


def test_a_monitored_barrier_wants_one_of_our_groups() -> None:
    with pytest.raises(UnsupportedOperation, match="barnraise"):
        monitored_barrier()


def test_a_forked_child_is_told_whose_mover_it_is(mover: FakeMover, issuer: Issuer) -> None:
    mover.inherited = True
    mover.lose()
    with pytest.raises(MoverLost):
        issuer.collective(calls.barrier(), 60)
