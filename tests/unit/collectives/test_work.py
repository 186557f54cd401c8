"""Works complete once, equally for wait, futures and listeners, from any thread."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from barnraise.collectives.completion_thread import CompletionThread
from barnraise.collectives.work import BarnraiseWork, join_works
from barnraise.core.errors import CollectiveError, OperationTimeout, PeerLost


def _work(chunks: int = 1) -> BarnraiseWork:
    return BarnraiseWork([torch.ones(2)], chunks, "all_reduce")


def test_work_completes_with_last_chunk() -> None:
    work = _work(2)
    work.complete_chunk(7)
    assert not work.is_completed()
    work.complete_chunk(5, source=3)
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.exception() is None
    assert work.finished_at_ns == 7
    assert work._source_rank() == work.source_rank() == 3
    assert work.result()[0].tolist() == [1, 1]
    assert work.get_future().wait()[0].tolist() == [1, 1]
    assert work.get_future() is work.get_future()


def test_finish_runs_before_work_is_complete() -> None:
    seen: list[bool] = []
    work = BarnraiseWork([], 1, "all_reduce", lambda: seen.append(work.is_completed()))
    work.complete_chunk(1)
    assert seen == [False]


def test_failing_finish_fails_the_work() -> None:
    def finish() -> None:
        raise RuntimeError("device on fire")

    work = BarnraiseWork([], 1, "all_reduce", finish)
    work.complete_chunk(1)
    with pytest.raises(CollectiveError, match="device on fire"):
        work.wait()


def test_failure_is_visible_in_wait_future_and_exception() -> None:
    work = _work(3)
    early = work.get_future()
    chained = early.then(lambda future: future.value())
    lost = PeerLost(2, "its process ended")
    work.fail(lost)
    work.fail(CollectiveError("later"))
    work.complete_chunk(1)
    for _ in range(2):
        with pytest.raises(PeerLost) as caught:
            work.wait()
        assert caught.value is lost
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is lost
    for future in (early, chained, work.get_future()):
        with pytest.raises(RuntimeError, match="rank 2 is lost"):
            future.wait()


def test_repeatedly_raised_error_keeps_short_traceback() -> None:
    work = _work()
    work.fail(CollectiveError("once"))
    for _ in range(50):
        with pytest.raises(CollectiveError):
            work.wait()
    depth, entry = 0, work.exception().__traceback__  # type: ignore[union-attr]
    while entry is not None:
        depth, entry = depth + 1, entry.tb_next
    assert depth < 5


def test_wait_timeout_cancels_work() -> None:
    work = _work()
    work.cancel = lambda: work.fail(OperationTimeout("rank 1 is late", late=(1,)))
    with pytest.raises(OperationTimeout, match="rank 1 is late"):
        work.wait(timedelta(milliseconds=10))
    assert work.is_completed()
    assert work.cancel is None


def test_work_that_completes_while_it_is_cancelled_succeeds() -> None:
    work = _work()
    work.cancel = lambda: work.complete_chunk(1)
    assert work.wait(timedelta(milliseconds=10))
    assert work.wait(timedelta(0))


def test_wait_timeout_is_raised_if_cancelling_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.collectives.work._CANCEL_S", 0.01)
    work, calls = _work(), []
    work.cancel = lambda: calls.append(1)
    with pytest.raises(OperationTimeout, match="was not cancelled"):
        work.wait(timedelta(milliseconds=10))
    assert calls == [1]


def test_listeners_are_called_once_early_or_late() -> None:
    work, heard = _work(), []
    work.add_listener(lambda done: heard.append(("early", done.is_success())))
    work.complete_chunk(1)
    work.add_listener(lambda done: heard.append(("late", done.is_success())))
    assert heard == [("early", True), ("late", True)]


def test_concurrent_completion_completes_once() -> None:
    works = [_work(4) for _ in range(50)]
    results: list[list[float]] = []

    def look(work: BarnraiseWork) -> None:
        results.append(work.get_future().wait()[0].tolist())
        results.append([1.0, 1.0] if work.wait() else [])

    lookers = [threading.Thread(target=look, args=(work,)) for work in works]
    enders = [threading.Thread(target=lambda: [work.complete_chunk(1) for work in works]) for _ in range(4)]
    for thread in lookers + enders:
        thread.start()
    for thread in lookers + enders:
        thread.join(90)
    assert results == [[1.0, 1.0]] * 100


def test_future_callback_may_wait_for_next_work() -> None:
    """The thread that ends works must never run what hangs on them."""
    first, second = _work(), _work()
    chained = first.get_future().then(lambda _: second.get_future().wait()[0].sum().item())
    first.complete_chunk(1)
    second.complete_chunk(1)
    assert chained.wait() == 2


def test_join_works_completes_with_last_or_first_failure() -> None:
    works = [_work(), _work()]
    whole = join_works(works, [torch.zeros(1)])
    works[1].complete_chunk(9)
    assert not whole.is_completed()
    works[0].complete_chunk(3)
    assert whole.wait()
    assert whole.finished_at_ns == 9
    failing = join_works([works[0], broken := _work()], [])
    broken.fail(PeerLost(1, "gone"))
    with pytest.raises(PeerLost):
        failing.wait()
    assert join_works([], []).wait()


def test_wait_timeout_of_joined_works_cancels_open_parts() -> None:
    complete, broken = _work(), _work()
    complete.complete_chunk(1)
    broken.cancel = lambda: broken.fail(OperationTimeout("rank 1 is late", late=(1,)))
    with pytest.raises(OperationTimeout, match="rank 1 is late"):
        join_works([complete, broken], []).wait(timedelta(milliseconds=10))


def test_completion_threads_exit_when_idle_and_survive_failures() -> None:
    completion_threads = CompletionThread(idle_s=0.2)
    before = {thread.ident for thread in threading.enumerate()}
    gate, ran = threading.Event(), []
    for number in range(3):
        completion_threads.submit(lambda number=number: (gate.wait(60), ran.append(number)))
    completion_threads.submit(lambda: 1 / 0)
    gate.set()
    deadline = time.monotonic() + 90
    while len(ran) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(ran) == [0, 1, 2]
    while time.monotonic() < deadline:
        if {thread.ident for thread in threading.enumerate()} <= before:
            break
        time.sleep(0.05)
    assert {thread.ident for thread in threading.enumerate()} <= before
    again = threading.Event()
    completion_threads.submit(again.set)
    assert again.wait(60)


def test_joined_work_polls_direct_reply_of_its_parts() -> None:
    """One of several coalesced operations may have its reply where only its own waiter looks."""
    first, second = BarnraiseWork([], 1, "first"), BarnraiseWork([], 1, "second")
    first.read_reply = lambda ended, seconds: first.complete_chunk(7)
    whole = join_works([first, second], [])
    second.complete_chunk(5)
    assert not whole._is_done
    assert whole.wait()
    assert whole.finished_at_ns == 7
