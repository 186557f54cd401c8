"""Packets between ranks that are threads: over the engine of the communication process, without sockets."""

from __future__ import annotations

import pytest
import torch

from barnraise.rpc import connect as module
from barnraise.rpc.connect import connect
from barnraise.rpc.messages import FRAME_BYTES
from barnraise.rpc.registry import FunctionRegistry
from barnraise.testing import spawn


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_roles", lambda settings, run, launched: None)


@pytest.mark.parametrize("size", [0, 10, FRAME_BYTES // 4, 2_500_000])
def test_packets_of_any_size_arrive_whole(size: int) -> None:
    """Within a frame, a little more than one, and in several pieces."""
    registry = FunctionRegistry()
    registry.add("double", lambda values: 2 * values)

    def body(rank: int) -> list[bool]:
        endpoint = connect(registry, None, 2, 10.0)
        try:
            values = torch.arange(size, dtype=torch.float32) + rank
            futures = [endpoint.call(to, "double", (values,), {}, 15.0) for to in range(3)]
            equal = [torch.equal(future.result(15.0), 2 * values) for future in futures]
            assert endpoint.stop(15.0) == ()
        finally:
            endpoint.close(0.0)
        return equal

    assert spawn(body, world=3, timeout_s=20) == dict.fromkeys(range(3), [True] * 3)
