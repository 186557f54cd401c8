"""Remote calls between real workers: any rank calls any other one, through deaths and with large tensors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.failure.worker_pool import NOTICE_S, Worker, WorkerPool, answers, ask_all, until


@pytest.fixture
def three(worker_pool: WorkerPool, take: Callable[[int], list[Worker]]) -> list[Worker]:
    """Three workers in one group, which have started remote calls."""
    workers = take(3)
    worker_pool.join(workers)
    ask_all(workers, "rpc_start")
    return workers


def call(worker: Worker, to: int, name: str, *args: Any) -> Any:
    return worker.ask("rpc_call", to=to, name=name, args=list(args))


def stop(workers: Sequence[Worker]) -> list[dict[str, int]]:
    """Stop remote calls on these workers, and return their statistics."""
    return ask_all(workers, "rpc_stop")


def objects(workers: Sequence[Worker]) -> list[int]:
    return [statistics["objects"] for statistics in ask_all(workers, "rpc_statistics")]


def test_any_worker_calls_any_other_one_and_itself(three: list[Worker]) -> None:
    for sender, worker in enumerate(three):
        for to in range(3):
            assert call(worker, to, "square", sender + 2) == (sender + 2) ** 2
    pids = [worker.pid for worker in three]
    assert call(three[0], 1, "relay", [2, 0, 1], 5) == [pids[1], pids[2], pids[0], pids[1]]
    statistics = stop(three)
    assert [each["served"] for each in statistics] == [4, 5, 4]
    assert [each["leaked"] for each in statistics] == [0, 0, 0]


def test_tensors_of_all_sizes_arrive_whole(three: list[Worker]) -> None:
    """Within a frame, just above it, and in many pieces; many at once and in both directions."""
    sizes = [0, 1, 400, 510, 512, 10_000, 600_000, 3_000_000, 5]
    for rank, worker in enumerate(three):
        worker.tell("rpc_squares", to=(rank + 1) % 3, sizes=sizes)
    assert answers(three) == [[True] * len(sizes)] * 3
    stop(three)


def test_all_workers_call_all_others_at_once(three: list[Worker]) -> None:
    for rank, worker in enumerate(three):
        worker.tell("rpc_load", to=[to for to in range(3) if to != rank], seconds=2.0)
    assert min(answers(three)) > 20
    stop(three)


def test_death_in_a_call_fails_it_and_the_others_go_on(
    worker_pool: WorkerPool, three: list[Worker], tmp_path: Path
) -> None:
    begun, never = tmp_path / "begun", tmp_path / "never"
    three[0].tell("rpc_call_outcome", to=1, name="touch_and_wait", args=[str(begun), str(never)])
    assert until(begun.exists, 30.0)
    since = time.monotonic_ns()
    three[1].kill()
    end = three[0].answer()
    assert (end["error"], end["peer"]) == ("PeerLost", 1), end
    assert (end["at_ns"] - since) / 1e9 <= NOTICE_S
    assert call(three[0], 2, "square", 3) == 9
    assert call(three[2], 0, "square", 4) == 16
    later = three[2].ask("rpc_call_outcome", to=1, name="square", args=[1])
    assert (later["error"], later["peer"]) == ("PeerLost", 1), later
    survivors = [three[0], three[2]]
    stop(survivors)
    ask_all(survivors, "leave_all")
    worker_pool.join(survivors)
    ask_all(survivors, "rpc_start")
    assert call(survivors[1], 0, "square", 5) == 25, "they start again without it"
    stop(survivors)


def test_death_of_a_comm_process_is_named_on_both_sides(three: list[Worker], tmp_path: Path) -> None:
    begun, never = tmp_path / "begun", tmp_path / "never"
    three[0].tell("rpc_call_outcome", to=1, name="touch_and_wait", args=[str(begun), str(never)])
    assert until(begun.exists, 30.0)
    os.kill(three[1].comm_process, signal.SIGKILL)
    end = three[0].answer()
    assert (end["error"], end["peer"]) == ("PeerLost", 1), end
    own = three[1].ask("rpc_call_outcome", to=0, name="square", args=[1])
    assert own["error"] == "CommProcessLost", own
    assert call(three[0], 2, "square", 3) == 9
    never.touch()  # ends the function
    stop(three)


def test_call_times_out_and_the_callee_goes_on(three: list[Worker], tmp_path: Path) -> None:
    goes_on = tmp_path / "goes on"
    end = three[0].ask(
        "rpc_call_outcome", to=1, name="wait_for_file", args=[str(goes_on)], timeout_s=0.5
    )
    assert (end["error"], end["late"]) == ("OperationTimeout", [1]), end
    assert 0.5 <= end["seconds"] <= 5.0, end
    assert "wait_for_file on rank 1 did not answer within 0.5 s" in end["text"]
    assert call(three[0], 1, "square", 3) == 9
    goes_on.touch()
    stop(three)


def test_error_of_a_function_comes_back_as_text(three: list[Worker]) -> None:
    end = three[0].ask("rpc_call_outcome", to=1, name="relay", args=["no path", 1])
    assert end["error"] == "RpcError", end
    assert "[rpc] relay failed on rank 1: " in end["text"]
    missing = three[0].ask("rpc_call_outcome", to=1, name="os.system", args=["true"])
    assert missing["error"] == "RpcError", missing
    assert "no function is registered under this name" in missing["text"]
    stop(three)


def test_references_outlive_the_worker_that_handed_them_on(three: list[Worker]) -> None:
    assert three[0].ask("rpc_make", to=1, name="table", size=4) == 1
    assert three[0].ask("rpc_lookup", to=1, name="table", key="2") == [2.0] * 4
    three[0].ask("rpc_hand_on", to=2, name="table", new_name="handed")
    assert objects(three) == [0, 1, 0]
    three[0].kill()
    survivors = three[1:]
    assert until(lambda: survivors[0].ask("rpc_statistics")["leases"] == 1, NOTICE_S), "its lease remains"
    assert survivors[1].ask("rpc_lookup", to=1, name="handed", key="1") == [1.0] * 4
    assert objects(survivors) == [1, 0]
    survivors[1].ask("rpc_release", name="handed")
    assert until(lambda: objects(survivors) == [0, 0], NOTICE_S)
    assert [each["leaked"] for each in stop(survivors)] == [0, 0]


def test_death_of_the_last_holder_frees_the_object(three: list[Worker]) -> None:
    three[0].ask("rpc_make", to=1, name="table", size=4)
    three[2].ask("rpc_make", to=1, name="table", size=4)
    assert objects(three) == [0, 2, 0]
    three[0].kill()
    assert until(lambda: objects(three[1:]) == [1, 0], NOTICE_S)
    three[2].kill()
    assert until(lambda: objects([three[1]]) == [0], NOTICE_S)
    stop([three[1]])


def test_death_of_the_owner_is_named_by_its_references(three: list[Worker]) -> None:
    three[0].ask("rpc_make", to=1, name="table", size=4)
    three[1].kill()
    end = three[0].ask("rpc_fetch_outcome", name="table")
    assert (end["error"], end["peer"]) == ("PeerLost", 1), end
    stop([three[0], three[2]])


def test_references_that_are_held_at_the_end_are_counted(three: list[Worker]) -> None:
    three[0].ask("rpc_make", to=1, name="table", size=4)
    three[0].tell("rpc_stop_holding")
    for worker in three[1:]:
        worker.tell("rpc_stop")
    statistics = answers(three)
    assert [each["leaked"] for each in statistics] == [1, 0, 0]


def test_group_works_beside_remote_calls_and_after_them(three: list[Worker]) -> None:
    assert all(ask_all(three, "checked"))
    assert call(three[1], 2, "square", 3) == 9
    stop(three)
    assert all(ask_all(three, "checked", seed=2))
    ask_all(three, "rpc_start", threads=1)
    assert call(three[2], 0, "square", 3) == 9
    stop(three)
