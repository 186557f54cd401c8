"""Simulated ranks: results, errors, deaths, delays and deadlines. They leave torch as it was."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from barnraise.collectives import create_group, statistics
from barnraise.core.errors import (
    CollectiveError,
    ConfigError,
    OperationMismatch,
    OperationTimeout,
    PeerLost,
    UnsupportedOperation,
)
from barnraise.testing import spawn


def _summed(rank: int) -> float:
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    return float(tensor[0])


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """Check after every test of this file that nothing of torch stays replaced."""
    before = _state_of_torch()
    yield
    assert _state_of_torch() == before
    assert statistics()["pid"] is None, "a communication process was started"


def _state_of_torch() -> list[object]:
    return [
        distributed_c10d._world,
        distributed_c10d._backend,
        distributed_c10d._default_pg_init_method,
        DeviceMesh.__init__,
        sys.excepthook,
        dist.is_initialized(),
        torch.is_grad_enabled(),
    ]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_results_come_back_by_rank(world: int) -> None:
    total = float(sum(range(world)))
    assert spawn(_summed, world=world) == dict.fromkeys(range(world), total)


def test_body_sees_default_group_of_our_backend() -> None:
    def body(rank: int) -> tuple[int, int, str, int]:
        (described,) = distributed_c10d._world.pg_config_info
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), described["group_size"]

    assert spawn(body, world=3) == {rank: (rank, 3, "barnraise", 3) for rank in range(3)}


# errors


def test_first_error_is_raised_with_its_rank() -> None:
    def body(rank: int) -> float:
        if rank == 1:
            raise ValueError("no data")
        return _summed(rank)

    with pytest.raises(ValueError, match="no data") as caught:
        spawn(body, world=3)
    assert caught.value.__notes__[0] == "raised by rank 1 of 3"
    # The others were in the operation, and their errors name a rank that ended.
    assert any("rank 1 is lost: it closed the group" in note for note in caught.value.__notes__[1:])


def test_exit_of_a_rank_reaches_the_test() -> None:
    with pytest.raises(SystemExit, match="7"):
        spawn(lambda rank: sys.exit(7), world=2)


def test_different_operations_raise_mismatch() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(3))

    with pytest.raises(OperationMismatch, match="rank 0 called barrier"):
        spawn(body, world=2)


def test_late_rank_is_named_by_timeout() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            time.sleep(1.5)
        dist.barrier()

    with pytest.raises(OperationTimeout, match="rank 1 alive but late") as caught:
        spawn(body, world=3, timeout_s=0.5)
    assert caught.value.late == (1,)


def test_rank_that_does_not_end_is_named_with_its_line_and_ended() -> None:
    entered: list[threading.Thread] = []

    def body(rank: int) -> None:
        entered.append(threading.current_thread())
        while rank == 1:
            time.sleep(0.01)  # here

    started = time.monotonic()
    with pytest.raises(OperationTimeout, match=rf"rank 1 did not end: {__file__}:\d+ in body") as caught:
        spawn(body, world=2, timeout_s=0.3)
    assert caught.value.late == (1,)
    assert time.monotonic() - started < 20
    for thread in entered:
        thread.join(20)
        assert not thread.is_alive(), "the rank runs on"


def test_error_is_raised_though_another_rank_runs_on() -> None:
    over = threading.Event()

    def body(rank: int) -> None:
        if rank == 0:
            raise ValueError("no data")
        over.wait(60)

    started = time.monotonic()
    with pytest.raises(ValueError, match="no data") as caught:
        spawn(body, world=2)
    assert time.monotonic() - started < 25
    assert "rank 1 did not end" in caught.value.__notes__[-1]
    over.set()


def test_group_without_one_of_its_ranks_times_out() -> None:
    def body(rank: int) -> None:
        if rank != 1:
            dist.new_group([0, 1])
        else:
            time.sleep(1.5)

    with pytest.raises(OperationTimeout, match="rank 1 did not call init_process_group within 0.5 s"):
        spawn(body, world=2, timeout_s=0.5)


# deaths


def test_killed_rank_is_lost_to_all_others() -> None:
    def body(rank: int) -> tuple[int, int]:
        steps = 0
        try:
            while True:
                _summed(rank)
                steps += 1
        except PeerLost as error:
            return error.peer, steps

    assert spawn(body, world=4, kills={2: 3}) == dict.fromkeys((0, 1, 3), (2, 2))


def test_error_of_survivors_names_the_killed_rank() -> None:
    with pytest.raises(PeerLost, match="rank 2 is lost: its process exited") as caught:
        spawn(_summed, world=4, kills={2: 1})
    assert caught.value.peer == 2


def test_killed_rank_does_not_go_on() -> None:
    def body(rank: int) -> str:
        try:
            dist.barrier()
        except Exception:
            return "went on"
        return "was not killed"

    assert spawn(body, world=2, kills={0: 1}) == {1: "went on"}


def test_all_ranks_may_be_killed() -> None:
    assert spawn(_summed, world=2, kills={0: 1, 1: 1}) == {}


def test_kill_that_never_happens_is_an_error() -> None:
    with pytest.raises(CollectiveError, match="rank 1 was to die before its operation 2, but ended after 1"):
        spawn(_summed, world=2, kills={1: 2})


def test_survivors_form_a_new_group() -> None:
    store = dist.HashStore()

    def body(rank: int) -> float:
        try:
            while True:
                _summed(rank)
        except PeerLost as error:
            left = [other for other in range(4) if other != error.peer]
        dist.destroy_process_group()
        place = dist.PrefixStore("attempt-1", store)
        dist.init_process_group("barnraise", store=place, rank=left.index(rank), world_size=len(left))
        return _summed(rank)

    assert spawn(body, world=4, kills={1: 2}) == dict.fromkeys((0, 2, 3), 5.0)


def test_death_in_a_sub_group_leaves_other_groups_alone() -> None:
    def body(rank: int) -> float:
        members = [0, 1] if rank < 2 else [2, 3]
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        own = groups[members[0] // 2]
        total = torch.ones(1)
        for _ in range(3):
            dist.all_reduce(total, group=own)
        return float(total)

    def survive(rank: int) -> float:
        try:
            return body(rank)
        except PeerLost as error:
            return -1.0 - error.peer  # a rank of the sub-group

    assert spawn(survive, world=4, kills={1: 2}) == {0: -2.0, 2: 8.0, 3: 8.0}


def test_kill_during_backward_reaches_ddp_as_an_error_with_our_text() -> None:
    model = nn.Linear(4, 4)

    def count(rank: int) -> None:
        DistributedDataParallel(copy.deepcopy(model))

    with pytest.raises(CollectiveError, match=r"ended after \d+") as caught:
        spawn(count, world=2, kills={1: 99})
    wrapping = int(caught.value.message.rsplit(" ", 1)[1])

    def train(rank: int) -> str:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        try:
            wrapped(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    results = spawn(train, world=2, kills={1: wrapping + 1})
    assert list(results) == [0]
    assert "[peer-lost] rank 1 is lost" in results[0]


# delays


def test_delay_holds_in_its_direction_only() -> None:
    def body(rank: int) -> float:
        tensor = torch.zeros(1)
        if rank == 0:
            sent_at = time.monotonic()
            dist.send(tensor, 1)
            return sent_at
        dist.recv(tensor, 0)
        return time.monotonic()

    there = spawn(body, world=2, delays={(0, 1): 0.4})
    assert there[1] - there[0] >= 0.4
    back = spawn(body, world=2, delays={(1, 0): 0.4})
    assert back[1] - back[0] < 0.4


def test_delayed_messages_change_no_bits() -> None:
    parts = [torch.randn(10_000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]

    def body(rank: int) -> torch.Tensor:
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        return tensor

    quick = spawn(body, world=4)
    slow = spawn(body, world=4, delay_s=0.002, delays={(0, 1): 0.05, (3, 2): 0.02})
    assert all(torch.equal(quick[rank], slow[rank]) for rank in range(4))


def test_delay_beyond_timeout_times_out() -> None:
    with pytest.raises(OperationTimeout, match="rank"):
        spawn(lambda rank: dist.barrier(), world=2, timeout_s=0.4, delay_s=3.0)


# groups and works


def test_work_of_an_asynchronous_operation_completes_and_its_callback_is_of_the_rank() -> None:
    def body(rank: int) -> tuple[bool, float, int]:
        tensor = torch.full((3,), 1.0 + rank)
        work = dist.all_reduce(tensor, async_op=True)
        seen: list[int] = []
        future = work.get_future().then(lambda done: seen.append(dist.get_rank()))
        work.wait()
        future.wait()
        return work.is_completed(), float(tensor[0]), seen[0]

    assert spawn(body, world=3) == {rank: (True, 6.0, rank) for rank in range(3)}


def test_group_of_ours_outside_of_torch_works_and_ends_with_its_rank() -> None:
    store = dist.HashStore()

    def body(rank: int) -> float:
        group = create_group(store, rank, 2, timeout=5)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return float(tensor)

    assert spawn(body, world=2) == {0: 2.0, 1: 2.0}


def test_monitored_barrier_names_every_missing_rank() -> None:
    def body(rank: int) -> tuple[int, ...]:
        try:
            if rank == 0:
                dist.monitored_barrier(timeout=timedelta(seconds=0.5))
            else:
                time.sleep(1.5)
        except OperationTimeout as error:
            return error.late
        return ()

    assert spawn(body, world=3, timeout_s=10) == {0: (1, 2), 1: (), 2: ()}


def test_longer_timeouts_are_cut_to_the_limit() -> None:
    def body(rank: int) -> float:
        started = time.monotonic()
        try:
            if rank == 0:
                dist.monitored_barrier(timeout=timedelta(minutes=5))
            else:
                time.sleep(1.5)
        except OperationTimeout:
            pass
        return time.monotonic() - started

    assert spawn(body, world=2, timeout_s=0.5)[0] < 1.5


def test_wait_with_a_timeout_cancels_the_operation() -> None:
    def body(rank: int) -> tuple[tuple[int, ...], bool]:
        started = time.monotonic()
        try:
            if rank == 0:
                dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=0.3))
            else:
                time.sleep(1.5)
        except OperationTimeout as error:
            return error.late, time.monotonic() - started < 1.5
        return (), False

    assert spawn(body, world=2, timeout_s=10) == {0: ((1,), True), 1: ((), False)}


def test_receive_that_is_waited_for_in_vain_leaves_the_group_usable() -> None:
    def body(rank: int) -> float:
        if rank == 0:
            with pytest.raises(OperationTimeout, match="the group continues"):
                dist.irecv(torch.zeros(1), src=1).wait(timedelta(seconds=0.2))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return float(tensor)

    assert spawn(body, world=2) == {0: 2.0, 1: 2.0}


def test_ddp_replicas_stay_equal() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    batches = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))

    def train(rank: int) -> torch.Tensor:
        replica = DistributedDataParallel(copy.deepcopy(model))
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            replica(batches[rank]).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(replica.parameters()).detach()

    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        alone(batches.flatten(0, 1)).square().mean().backward()
        optimizer.step()
    results = spawn(train, world=3)
    assert all(torch.equal(results[rank], results[0]) for rank in range(3))
    wanted = nn.utils.parameters_to_vector(alone.parameters())
    assert torch.allclose(results[0], wanted, atol=1e-6)


def test_dtensor_of_uneven_shards_is_whole_on_every_rank() -> None:
    whole = torch.arange(10.0).reshape(5, 2)

    def body(rank: int) -> tuple[int, torch.Tensor]:
        mesh = init_device_mesh("cpu", (3,))
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        return sharded.to_local().shape[0], (sharded * 2).full_tensor()

    for _ in range(2):  # torch remembers by mesh: a second simulation has meshes of its own
        results = spawn(body, world=3)
        assert [rows for rows, _ in results.values()] == [2, 2, 1]
        assert all(torch.equal(full, whole * 2) for _, full in results.values())


def test_mesh_of_two_dimensions_has_groups_along_both() -> None:
    def body(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "device"))
        sums = []
        for name in ("machine", "device"):
            tensor = torch.full((1,), float(rank))
            dist.all_reduce(tensor, group=mesh.get_group(name))
            sums.append(float(tensor))
        return sums[0], sums[1]

    assert spawn(body, world=4) == {0: (2.0, 1.0), 1: (4.0, 1.0), 2: (2.0, 5.0), 3: (4.0, 5.0)}


# the process


def test_group_of_the_process_is_there_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((sys, "excepthook"), (distributed_c10d, "_backend")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # init_process_group changes both for good
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hook = sys.excepthook
        assert spawn(_summed, world=2) == {0: 1.0, 1: 1.0}
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
        assert sys.excepthook is hook
    finally:
        dist.destroy_process_group()


def test_second_simulation_at_the_same_time_is_refused() -> None:
    def body(rank: int) -> str:
        try:
            spawn(_summed, world=2)
        except CollectiveError as error:
            return error.message
        return "both ran"

    assert spawn(body, world=1) == {0: "a simulation runs already in this process"}
    assert spawn(_summed, world=1) == {0: 0.0}


def test_worker_of_a_run_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "BARNRAISE_LAUNCHED", "1")
    with pytest.raises(UnsupportedOperation, match="a worker of a run"):
        spawn(_summed, world=2)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="no limit"):
        spawn(_summed, world=2, timeout_s=timeout_s)


def test_twenty_simulations_leave_no_threads_and_no_descriptors() -> None:
    spawn(_summed, world=4)
    threads, descriptors = threading.active_count(), _descriptors()
    for _ in range(20):
        spawn(_summed, world=4)
    assert threading.active_count() <= threads
    assert _descriptors() <= descriptors


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
