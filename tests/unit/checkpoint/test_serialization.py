"""Serialization of a nested state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from barnraise.checkpoint.serialization import digest, flatten, shapes, unflatten
from barnraise.core.errors import ProtocolError, RunError

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)
states = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(states)
def test_plain_values_round_trip(state: Any) -> None:
    parts = flatten(state)
    assert unflatten(parts.skeleton, parts.tensors) == state


def test_optimizer_state_round_trips_bitwise() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    parts = flatten(optimizer.state_dict())
    copies = [tensor.clone() for tensor in parts.tensors]
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in copies] == shapes(parts.skeleton)
    again = unflatten(parts.skeleton, copies)
    other = torch.optim.AdamW(net.parameters())
    other.load_state_dict(again)
    assert digest(flatten(other.state_dict())) == digest(parts)
    copies[0].reshape(-1).view(torch.uint8)[0] ^= 1
    assert digest(flatten(unflatten(parts.skeleton, copies))) != digest(parts)


def test_unserializable_value_is_named() -> None:
    with pytest.raises(RunError, match=r"state\['a'\]\[1\] is a function"):
        flatten({"a": [1, lambda: None]})
    with pytest.raises(RunError, match="cannot be saved"):
        flatten(torch.ones(2, 2).to_sparse())


@given(st.binary(max_size=60))
def test_invalid_skeleton_is_rejected(data: bytes) -> None:
    try:
        shapes(data)
    except ProtocolError:
        pass


def test_tensor_of_other_shape_is_rejected() -> None:
    parts = flatten({"w": torch.ones(2, 3)})
    with pytest.raises(ProtocolError, match="does not match its skeleton"):
        unflatten(parts.skeleton, [torch.ones(3, 2)])
