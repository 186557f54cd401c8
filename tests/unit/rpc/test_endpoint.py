"""Endpoints call each other, and no lease is lost or left over: with threads, and queues as links."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from barnraise.core.errors import OperationTimeout, PeerLost, ProtocolError, RpcError, RunError
from barnraise.rpc.messages import (
    CallMessage,
    GoodbyeMessage,
    LeaseMessage,
    ReferenceId,
    ReleaseMessage,
    ResultMessage,
)
from barnraise.rpc.references import RemoteReference
from tests.unit.rpc.wired_endpoints import Cluster, wired

PATIENCE_S = 30.0


@pytest.fixture
def three() -> Iterator[Cluster]:
    with wired(3) as cluster:
        yield cluster


def until(truth: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def call(cluster: Cluster, sender: int, to: int, name: str, *args: Any, **kwargs: Any) -> Any:
    return cluster.ranks[sender].call(to, name, args, kwargs, PATIENCE_S).result(PATIENCE_S)


def remote(cluster: Cluster, sender: int, to: int, name: str, *args: Any) -> RemoteReference:
    future = cluster.ranks[sender].call(to, name, args, {}, PATIENCE_S, keeps=True)
    reference: RemoteReference = future.result(PATIENCE_S)
    return reference


def objects(cluster: Cluster) -> list[int]:
    return [endpoint.statistics()["objects"] for endpoint in cluster.ranks]


def encoded(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


# calls


def test_every_rank_calls_every_rank_and_itself(three: Cluster) -> None:
    three.registry.add("add", lambda x, y=0: x + y)
    for sender in range(3):
        for to in range(3):
            assert call(three, sender, to, "add", sender, y=10 * to) == sender + 10 * to
    assert torch.equal(call(three, 0, 1, "add", torch.ones(3), y=1), torch.full((3,), 2.0))
    assert [endpoint.statistics()["served"] for endpoint in three.ranks] == [3, 4, 3]


def test_function_may_call_back(three: Cluster) -> None:
    def forward(path: list[int], here: int) -> list[int]:
        if not path:
            return [here]
        later: list[int] = call(three, here, path[0], "forward", path[1:], path[0])
        return [here, *later]

    three.registry.add("forward", forward)
    assert call(three, 0, 1, "forward", [2, 0, 1, 2], 1) == [1, 2, 0, 1, 2]


def test_error_of_function_names_rank_function_and_type(three: Cluster) -> None:
    def fail(text: str) -> None:
        raise ZeroDivisionError(text)

    three.registry.add("fail", fail)
    with pytest.raises(RpcError, match=r"fail failed on rank 1: ZeroDivisionError: by zero \[31m") as caught:
        call(three, 0, 1, "fail", "by\nzero\x1b[31m")
    error = caught.value
    assert (error.rank, error.function, error.kind) == (1, "fail", "ZeroDivisionError")
    assert three.ranks[1].statistics()["failed"] == 1


def test_exit_of_function_is_an_error_of_its_caller(three: Cluster) -> None:
    def leave() -> None:
        raise SystemExit(3)

    three.registry.add("leave", leave)
    with pytest.raises(RpcError, match="leave failed on rank 1: SystemExit: 3"):
        call(three, 0, 1, "leave")
    three.registry.add("one", lambda: 1)
    assert call(three, 0, 1, "one") == 1


def test_unregistered_name_runs_nothing(three: Cluster) -> None:
    three.registry.add("one", lambda: 1)
    with pytest.raises(RpcError, match="LookupError: no function is registered .*; registered: one"):
        call(three, 0, 1, "os.system", "touch /tmp/x")


def test_result_that_cannot_be_sent_is_an_error(three: Cluster) -> None:
    three.registry.add("model", lambda: torch.nn.Linear(1, 1))
    with pytest.raises(RpcError, match="RunError: the result of model is a Linear, which does not travel"):
        call(three, 0, 1, "model")


def test_wrong_arguments_are_an_error_of_the_function(three: Cluster) -> None:
    three.registry.add("one", lambda: 1)
    with pytest.raises(RpcError, match="TypeError"):
        call(three, 0, 1, "one", 5)


def test_call_times_out_and_its_late_result_is_ignored(three: Cluster) -> None:
    goes_on = threading.Event()
    three.registry.add("wait", lambda: goes_on.wait(PATIENCE_S))
    future = three.ranks[0].call(1, "wait", (), {}, 0.2)
    with pytest.raises(OperationTimeout, match=r"wait on rank 1 did not answer within 0\.2 s") as caught:
        future.result(PATIENCE_S)
    assert caught.value.late == (1,)
    goes_on.set()
    assert until(lambda: three.ranks[1].statistics()["served"] == 1)
    assert three.ranks[0].statistics()["pending"] == 0


def test_call_whose_caller_gave_up_is_not_run() -> None:
    with wired(2, threads=1) as two:
        goes_on = threading.Event()
        ran: list[int] = []
        two.registry.add("wait", lambda: goes_on.wait(PATIENCE_S))
        two.registry.add("note", ran.append)
        first = two.ranks[0].call(1, "wait", (), {}, PATIENCE_S)
        second = two.ranks[0].call(1, "note", (1,), {}, 0.2)
        assert isinstance(second.exception(PATIENCE_S), OperationTimeout)
        goes_on.set()
        assert first.result(PATIENCE_S)
        assert until(lambda: two.ranks[1].statistics()["expired"] == 1)
        assert ran == []


def test_limited_threads_run_all_calls_in_order() -> None:
    with wired(2, threads=1) as two:
        ran: list[int] = []
        two.registry.add("note", ran.append)
        futures = [two.ranks[0].call(1, "note", (number,), {}, PATIENCE_S) for number in range(200)]
        assert [future.result(PATIENCE_S) for future in futures] == [None] * 200
        assert ran == list(range(200))


def test_overloaded_callee_refuses_further_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.rpc.call_pool.MAX_WAITING", 2)
    with wired(2, threads=1) as two:
        goes_on = threading.Event()
        two.registry.add("wait", lambda: goes_on.wait(PATIENCE_S))
        running = two.ranks[0].call(1, "wait", (), {}, PATIENCE_S)
        time.sleep(0.3)  # it leaves the queue
        waiting = [two.ranks[0].call(1, "wait", (), {}, PATIENCE_S) for _ in range(2)]
        refused = two.ranks[0].call(1, "wait", (), {}, PATIENCE_S)
        assert "RunError: rank 1 is overloaded: 2 calls wait there" in str(refused.exception(PATIENCE_S))
        goes_on.set()
        assert all(future.result(PATIENCE_S) for future in [running, *waiting])


def test_full_channel_refuses_calls_but_not_releases(three: Cluster) -> None:
    three.registry.add("table", dict)
    reference = remote(three, 0, 1, "table")
    three.wires[0, 1].is_full = True
    with pytest.raises(RunError, match="too many bytes wait to be sent to rank 1"):
        call(three, 0, 1, "table")
    reference.release()
    assert until(lambda: objects(three) == [0, 0, 0])


@pytest.mark.parametrize(
    ("to", "timeout_s", "words"),
    [(3, 1.0, "no rank 3"), (-1, 1.0, "no rank -1"), (1, 0.0, "timeout"), (1, 1e9, "timeout")],
)
def test_impossible_call_is_refused_at_once(three: Cluster, to: int, timeout_s: float, words: str) -> None:
    with pytest.raises(RunError, match=words):
        three.ranks[0].call(to, "f", (), {}, timeout_s)


def test_many_threads_call_at_once(three: Cluster) -> None:
    three.registry.add("square", lambda x: x * x)
    with ThreadPoolExecutor(8) as threads:
        results = threads.map(lambda number: call(three, 0, 1 + number % 2, "square", number), range(300))
        assert list(results) == [number * number for number in range(300)]


# deaths


def test_death_of_callee_fails_its_calls_and_no_others(three: Cluster) -> None:
    goes_on = threading.Event()
    three.registry.add("wait", lambda: goes_on.wait(PATIENCE_S))
    doomed = three.ranks[0].call(1, "wait", (), {}, PATIENCE_S)
    healthy = three.ranks[0].call(2, "wait", (), {}, PATIENCE_S)
    three.kill(1)
    error = doomed.exception(PATIENCE_S)
    assert isinstance(error, PeerLost)
    assert (error.peer, error.why) == (1, "it was killed")
    goes_on.set()
    assert healthy.result(PATIENCE_S)
    assert isinstance(three.ranks[0].call(1, "wait", (), {}, 1.0).exception(PATIENCE_S), PeerLost)


def test_death_of_holder_releases_its_leases(three: Cluster) -> None:
    three.registry.add("table", dict)
    first, second = remote(three, 0, 2, "table"), remote(three, 1, 2, "table")
    assert objects(three) == [0, 0, 2]
    three.kill(0)
    assert objects(three) == [0, 0, 1]
    assert second.fetch() == {}
    del first


def test_death_of_owner_is_named_by_its_references(three: Cluster) -> None:
    three.registry.add("table", dict)
    reference = remote(three, 0, 1, "table")
    three.kill(1)
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        reference.fetch()
    reference.release()


# references


def test_value_stays_with_its_owner_until_it_is_released(three: Cluster) -> None:
    three.registry.add("table", lambda size: {"a": size})
    three.registry.add("lookup", lambda table, key: table.fetch()[key])
    with remote(three, 0, 1, "table", 7) as table:
        assert table.owner == 1
        assert objects(three) == [0, 1, 0]
        assert call(three, 0, 1, "lookup", table, "a") == 7
        assert table.fetch() == {"a": 7}
        assert call(three, 0, 2, "lookup", table, "a") == 7, "another rank fetches it"
    assert until(lambda: objects(three) == [0, 0, 0])
    with pytest.raises(RunError, match="was released here"):
        table.fetch()
    with pytest.raises(RunError, match="was released here"):
        call(three, 0, 1, "lookup", table, "a")


def test_owner_gets_the_object_itself(three: Cluster) -> None:
    three.registry.add("put", lambda table, key: table.fetch().update({key: 1}))
    own: dict[str, int] = {}
    reference = three.ranks[0].reference(own)
    three.registry.add("relay", lambda table, key: call(three, 1, 0, "put", table, key))
    call(three, 0, 0, "put", reference, "a")
    call(three, 0, 1, "relay", reference, "b")
    assert own == {"a": 1, "b": 1}
    assert reference.fetch() is own


def test_reference_that_was_handed_on_keeps_the_object_alive(three: Cluster) -> None:
    kept: list[RemoteReference] = []
    three.registry.add("table", lambda: {"a": 7})
    three.registry.add("keep", kept.append)
    table = remote(three, 0, 1, "table")
    call(three, 0, 2, "keep", table)
    table.release()
    assert until(lambda: three.ranks[0].statistics()["references"] == 0)
    assert kept[0].owner == 1
    assert kept[0].fetch() == {"a": 7}
    assert objects(three) == [0, 1, 0]
    kept.pop().release()
    assert until(lambda: objects(three) == [0, 0, 0])


def test_release_right_after_a_call_does_not_overtake_it(three: Cluster) -> None:
    """With a reference of the callee and one of another rank, the call waits for a lease of the latter."""
    three.registry.add("table", lambda: {"a": 7})
    three.registry.add("both", lambda *tables: [table.fetch()["a"] for table in tables])
    own = three.ranks[0].reference({"a": 1})
    tables = [remote(three, 0, 1, "table"), remote(three, 0, 2, "table"), own]
    three.wires[2, 0].passes.clear()  # the answer of rank 2 about the lease waits
    future = three.ranks[0].call(1, "both", tables, {}, PATIENCE_S)
    for table in tables:
        table.release()
    time.sleep(0.2)
    three.wires[2, 0].passes.set()
    assert future.result(PATIENCE_S) == [7, 7, 1]
    del own, tables, table
    assert until(lambda: objects(three) == [0, 0, 0])


def test_function_may_return_references_of_any_owner(three: Cluster) -> None:
    held: dict[int, RemoteReference] = {}
    three.registry.add("table", lambda: {"a": 7})
    three.registry.add("own", lambda: three.ranks[1].reference([1]))
    three.registry.add("of_third", lambda: held.pop(2))
    three.registry.add("back", lambda reference: reference)
    own = call(three, 0, 1, "own")
    assert (own.owner, own.fetch()) == (1, [1])
    held[2] = remote(three, 1, 2, "table")
    third = call(three, 0, 1, "of_third")
    assert (third.owner, third.fetch()) == (2, {"a": 7})
    home = three.ranks[0].reference([3])
    back = call(three, 0, 1, "back", home)
    assert back.owner == 0
    assert back.fetch() == [3]
    nested = remote(three, 0, 1, "own")
    assert nested.fetch() == [1], "a reference is not kept in another one"
    for reference in (own, third, home, back, nested):
        reference.release()
    assert until(lambda: objects(three) == [0, 0, 0])


def test_released_reference_cannot_be_returned(three: Cluster) -> None:
    def released() -> RemoteReference:
        reference = three.ranks[1].reference([1])
        reference.release()
        return reference

    three.registry.add("released", released)
    with pytest.raises(RpcError, match="RunError: the reference to an object of rank 1 was released here"):
        call(three, 0, 1, "released")


def test_collected_reference_is_released(three: Cluster) -> None:
    three.registry.add("table", dict)
    reference = remote(three, 0, 1, "table")
    assert objects(three) == [0, 1, 0]
    del reference
    assert until(lambda: objects(three) == [0, 0, 0])


def test_reference_of_a_late_result_is_released(three: Cluster) -> None:
    goes_on = threading.Event()
    three.registry.add("table", lambda: goes_on.wait(PATIENCE_S) and {})
    future = three.ranks[0].call(1, "table", (), {}, 0.2, keeps=True)
    assert isinstance(future.exception(PATIENCE_S), OperationTimeout)
    goes_on.set()
    assert until(lambda: three.ranks[1].statistics()["served"] == 1)
    assert until(lambda: objects(three) == [0, 0, 0])


def test_late_lease_is_returned_to_its_owner(three: Cluster) -> None:
    """The owner of a reference answers after the call that hands it on has timed out."""
    three.registry.add("table", dict)
    three.registry.add("keep", lambda reference: None)
    table = remote(three, 0, 1, "table")
    three.wires[1, 0].passes.clear()
    future = three.ranks[0].call(2, "keep", (table,), {}, 0.2)
    assert isinstance(future.exception(PATIENCE_S), OperationTimeout)
    assert until(lambda: three.ranks[1].statistics()["leases"] == 2)
    three.wires[1, 0].passes.set()
    assert until(lambda: three.ranks[1].statistics()["leases"] == 1)
    table.release()
    assert until(lambda: objects(three) == [0, 0, 0])


def test_lease_for_a_dead_rank_is_refused_and_the_call_fails(three: Cluster) -> None:
    three.registry.add("table", dict)
    table = remote(three, 0, 1, "table")
    three.ranks[1].lose(2, PeerLost(2, "it was killed"))  # rank 0 does not know yet
    error = three.ranks[0].call(2, "keep", (table,), {}, PATIENCE_S).exception(PATIENCE_S)
    assert isinstance(error, RpcError)
    assert "rank 2 is lost" in str(error)
    table.release()
    assert until(lambda: objects(three) == [0, 0, 0])


def test_leases_of_a_call_that_cannot_be_sent_are_returned(three: Cluster) -> None:
    three.registry.add("table", dict)
    table, own = remote(three, 0, 1, "table"), three.ranks[0].reference([1])
    three.wires[0, 2].is_full = True
    error = three.ranks[0].call(2, "keep", (table, own), {}, PATIENCE_S).exception(PATIENCE_S)
    assert isinstance(error, RunError)
    table.release()
    own.release()
    assert until(lambda: objects(three) == [0, 0, 0])


def test_reference_is_neither_copied_nor_pickled(three: Cluster) -> None:
    with pytest.raises(RunError, match="neither copied nor pickled"):
        copy.copy(three.ranks[0].reference(1))


def test_random_handing_on_leaves_nothing_behind() -> None:
    with wired(3, threads=32) as three:
        _hand_on(three)


def _hand_on(three: Cluster) -> None:
    kept: list[RemoteReference] = []
    lock = threading.Lock()

    def keep(reference: RemoteReference, here: int, *path: int) -> Any:
        if path:
            return call(three, here, path[0], "keep", reference, *path)
        with lock:
            kept.append(reference)
        return reference

    three.registry.add("keep", keep)
    three.registry.add("table", lambda number: [number])
    tables = [remote(three, number % 3, (number + 1) % 3, "table", number) for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        paths = [((number * 7) % 3, (number * 5) % 3, number % 3) for number in range(12)]
        senders = [number % 3 for number in range(12)]
        results = list(
            threads.map(
                lambda sender, path, table: call(three, sender, path[0], "keep", table, *path),
                senders,
                paths,
                tables,
            )
        )
    assert [result.fetch() for result in results] == [[number] for number in range(12)]
    for reference in [*tables, *results, *kept]:
        reference.release()
    assert until(lambda: objects(three) == [0, 0, 0])
    assert [endpoint.statistics()["references"] for endpoint in three.ranks] == [0, 0, 0]


# the end


def stop_all(cluster: Cluster, timeout_s: float = PATIENCE_S) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(cluster.ranks)) as threads:
        return list(threads.map(lambda endpoint: endpoint.stop(timeout_s), cluster.ranks))


def test_stop_releases_and_counts_what_is_held(three: Cluster) -> None:
    three.registry.add("table", dict)
    tables = [remote(three, 0, 1, "table"), remote(three, 2, 1, "table")]
    assert stop_all(three) == [(), (), ()]
    assert [endpoint.statistics()["leaked"] for endpoint in three.ranks] == [1, 0, 1]
    with pytest.raises(RunError, match="were stopped on this worker"):
        tables[0].fetch()


def test_stop_answers_calls_until_all_have_stopped(three: Cluster) -> None:
    three.registry.add("one", lambda: 1)
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(three.ranks[rank].stop, PATIENCE_S) for rank in (1, 2)]
        time.sleep(0.3)
        assert call(three, 0, 1, "one") == 1
        assert three.ranks[0].stop(PATIENCE_S) == ()
        assert [future.result(PATIENCE_S) for future in early] == [(), ()]


def test_stop_names_the_ranks_that_are_late(three: Cluster) -> None:
    with ThreadPoolExecutor(2) as threads:
        stops = [threads.submit(three.ranks[rank].stop, 0.5) for rank in (0, 2)]
        assert [future.result(PATIENCE_S) for future in stops] == [(1,), (1,)]


def test_stop_does_not_wait_for_a_dead_rank(three: Cluster) -> None:
    three.kill(1)
    with ThreadPoolExecutor(2) as threads:
        stops = [threads.submit(three.ranks[rank].stop, PATIENCE_S) for rank in (0, 2)]
        assert [future.result(PATIENCE_S) for future in stops] == [(), ()]


# hostile messages


@pytest.mark.parametrize(
    "message",
    [
        CallMessage(1, "f", 1, (), ((0, ReferenceId(9, 1)),)),
        LeaseMessage(1, 0, 9),
        LeaseMessage(1, 0, 1),  # for the owner itself
    ],
)
def test_message_about_impossible_ranks_breaks_the_protocol(three: Cluster, message: Any) -> None:
    with pytest.raises(ProtocolError):
        three.ranks[1].receive(0, encoded(message), b"")


def test_result_of_another_rank_is_not_taken_for_the_callees(three: Cluster) -> None:
    goes_on = threading.Event()
    three.registry.add("wait", lambda: goes_on.wait(PATIENCE_S) and 7)
    future = three.ranks[0].call(1, "wait", (), {}, PATIENCE_S)
    for number in range(5):
        three.ranks[0].receive(2, encoded(ResultMessage(number)), b"")
    assert not future.done()
    goes_on.set()
    assert future.result(PATIENCE_S) == 7


def test_object_is_given_and_lent_only_to_holders(three: Cluster) -> None:
    three.registry.add("table", lambda: {"a": 7})
    table = remote(three, 0, 1, "table")
    stranger = RemoteReference(three.ranks[2], table.identity)
    with pytest.raises(RpcError, match="LookupError: rank 2 holds no reference"):
        stranger.fetch()
    with pytest.raises(RpcError, match="rank 2 holds no reference"):
        call(three, 2, 0, "keep", stranger)
    assert table.fetch() == {"a": 7}


def test_stray_releases_and_results_change_nothing(three: Cluster) -> None:
    three.registry.add("table", dict)
    table = remote(three, 0, 1, "table")
    for message in (ReleaseMessage(table.identity.serial, 2), ReleaseMessage(99, 0), ResultMessage(12345)):
        three.ranks[1].receive(2, encoded(message), b"")
    assert objects(three) == [0, 1, 0]
    three.ranks[0].receive(2, encoded(ResultMessage(12345, ReferenceId(0, 77))), b"")
    assert table.fetch() == {}


def test_malformed_values_of_a_call_are_an_error_of_the_caller(three: Cluster) -> None:
    three.registry.add("one", lambda: 1)
    three.ranks[1].receive(0, encoded(CallMessage(0, "one", 0, timeout_s=9.0)), b"no document")
    assert until(lambda: three.ranks[1].statistics()["failed"] == 1)
    three.ranks[1].receive(0, encoded(GoodbyeMessage()), b"")
