"""Failures of a worker, and what they must not keep alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from barnraise.core.errors import PeerLost
from barnraise.training.recovery.failures import forget_frames


def fail(seen: list[weakref.ref[torch.Tensor]]) -> None:
    weight = torch.zeros(8)
    seen.append(weakref.ref(weight))
    try:
        raise RuntimeError("the link is broken")
    except RuntimeError as error:
        raise PeerLost(1, "it has left") from error


def test_tensors_of_a_failed_step_are_freed_while_its_error_is_handled() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises(PeerLost) as caught:
        fail(seen)
    error = caught.value
    del caught
    gc.collect()
    assert seen[0]() is not None
    forget_frames(error)
    gc.collect()
    assert seen[0]() is None
    assert error.__cause__ is not None
