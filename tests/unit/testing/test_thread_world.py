"""Records of process groups by thread, and torches that cannot have them."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from barnraise.core.errors import UnsupportedOperation
from barnraise.testing.thread_world import own_world, separate_worlds, unknown_attributes


def _in_thread(action: Any) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(action()))
    thread.start()
    thread.join(20)
    return seen[0]


def test_rank_sees_its_own_record_and_other_threads_that_of_the_process() -> None:
    process_world = distributed_c10d._world
    names = process_world.pg_names
    with separate_worlds(), own_world():
        own = distributed_c10d._world
        own.group_count = 7
        assert own.pg_names is not names
        assert _in_thread(lambda: distributed_c10d._world.pg_names) is names
        assert _in_thread(lambda: distributed_c10d._world.group_count) == process_world.group_count
        context = contextvars.copy_context()
        assert _in_thread(lambda: context.run(lambda: distributed_c10d._world.group_count)) == 7
    assert distributed_c10d._world is process_world


def test_record_has_all_that_torch_keeps() -> None:
    assert unknown_attributes(distributed_c10d._World) == []


def test_record_of_a_future_torch_with_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class FutureWorld(distributed_c10d._World):
        @property
        def pg_colors(self) -> dict[str, str]:
            return {}

    monkeypatch.setattr(distributed_c10d, "_World", FutureWorld)
    with (
        pytest.raises(UnsupportedOperation, match=r"keeps more about process groups .*: pg_colors"),
        separate_worlds(),
    ):
        pass


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._C._distributed_c10d, "_set_thread_isolation_mode"), (distributed_c10d, "_World")],
)
def test_torch_without_what_is_needed_is_refused(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = distributed_c10d._world
    monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedOperation, match="has no process groups of threads"), separate_worlds():
        pass
    assert distributed_c10d._world is world


def test_failure_in_a_simulation_restores_torch() -> None:
    world = distributed_c10d._world

    def fail() -> None:
        with separate_worlds():
            assert distributed_c10d._world is not world
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        fail()
    assert distributed_c10d._world is world
    with separate_worlds():
        pass
