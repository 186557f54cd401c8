"""torch's monitored barrier is unchanged for other backends; `tests/numerics` has that of our groups."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from barnraise.collectives.torch_patch.autoload import register


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def test_both_names_of_the_function_are_wrapped_once() -> None:
    assert dist.monitored_barrier is distributed_c10d.monitored_barrier
    original = inspect.unwrap(dist.monitored_barrier)
    assert original is not dist.monitored_barrier
    assert inspect.signature(original) == inspect.signature(dist.monitored_barrier)
    register()
    assert inspect.unwrap(dist.monitored_barrier) is original


def test_wrong_calls_get_the_error_of_torch() -> None:
    with pytest.raises(ValueError, match="process group has not been initialized"):
        dist.monitored_barrier()
    with pytest.raises(TypeError, match="timout"):
        dist.monitored_barrier(timout=1)  # type: ignore[call-arg]


def test_group_of_gloo_uses_the_function_of_torch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        with pytest.raises(TypeError, match="datetime.timedelta"):
            dist.monitored_barrier(timeout="60")
    finally:
        dist.destroy_process_group()
