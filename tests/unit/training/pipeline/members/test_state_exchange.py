"""Trained state of other machines, which is checked before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from barnraise.checkpoint.serialization import FlatState, flatten
from barnraise.core.errors import ProtocolError
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.members.state_exchange import StateExchange

NAMES = {1: ["a"], 2: ["b"]}
STATE = {"value": torch.ones(2), "memory": {}}


class Received:
    """Group of two, in which the other member sends this state for unit 1."""

    rank, world = 0, 2

    def __init__(self, states: Any, schedule: Any) -> None:
        self._parts, self._schedule = flatten(states), schedule

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        import msgspec

        return [message, msgspec.msgpack.encode([flatten(self._schedule).skeleton, self._parts.skeleton])]

    def receive_async(self, tensor: torch.Tensor, sender: int) -> Any:
        tensor.copy_(self._next())
        return self

    def _next(self) -> torch.Tensor:
        first, *rest = self._parts.tensors
        self._parts = FlatState(self._parts.skeleton, rest)
        return first

    def wait(self) -> None:
        return


def receive(states: Any, schedule: Any = None) -> tuple[Any, Any]:
    exchange = StateExchange(NAMES.__getitem__, {"a": torch.nn.Parameter(torch.zeros(2))})
    group: Any = Received(states, schedule or {})
    return exchange.run(group, [Transfer(1, 1, 0)], {}, {}, {1})


def test_state_that_was_asked_for_is_taken() -> None:
    states, schedule = receive({"a": STATE}, {"groups": [{"lr": 0.1}], "scheduler": {}})
    assert torch.equal(states["a"]["value"], torch.ones(2))
    assert schedule["groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    "states", [{}, {"b": STATE}, {"a": STATE, "b": STATE}, [1], {"a": {"value": 1, "memory": {}}}, {"a": 3}]
)
def test_other_state_is_rejected(states: Any) -> None:
    with pytest.raises(ProtocolError, match="other trained state"):
        receive(states)


@pytest.mark.parametrize("schedule", [[1], {"groups": 3, "scheduler": {}}, {"groups": [2], "scheduler": {}}])
def test_schedule_of_another_form_is_rejected(schedule: Any) -> None:
    with pytest.raises(ProtocolError, match="learning rates"):
        receive({"a": STATE}, schedule)
