"""Hashes of a frozen base, for tensors of all kinds, and the changes that are noticed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from barnraise.checkpoint import tensor_hash
from barnraise.checkpoint.tensor_hash import hash_tensor
from barnraise.training.state import frozen_base
from barnraise.training.state.frozen_base import FrozenBase
from barnraise.training.state.trained_set import UNCOMPARED

NUMBERS = 5000


class Model(torch.nn.Module):
    """Model with a trained and a frozen parameter, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.ones(4))
        self.frozen = torch.nn.Parameter(torch.arange(float(NUMBERS)), requires_grad=False)
        self.register_buffer("packed", torch.arange(NUMBERS * 4, dtype=torch.int32).to(torch.uint8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.arange(float(NUMBERS)).reshape(50, 100).t())
        self.register_buffer("nothing", torch.zeros(0))
        self.count: torch.Tensor
        self.turned: torch.Tensor


def _base(model: Model) -> FrozenBase:
    base = FrozenBase(model, [model.trained])
    base.start_hashing()
    return base


def test_base_of_model_is_hashed_once() -> None:
    first, second = _base(Model()), _base(Model())
    assert set(first.hashes()) == {"frozen", "packed", "count", "turned", "nothing"}
    assert first.hashes() == second.hashes()
    assert first.hashes() is first.hashes()
    assert first.refresh().keys() == {"trained"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("frozen", lambda model: model.frozen.data.mul_(1.5)),
        ("frozen", lambda model: setattr(model, "frozen", torch.nn.Parameter(model.frozen + 1, False))),
        ("count", lambda model: model.count.add_(1)),
        ("count", lambda model: model.count.data.add_(1)),
        ("turned", lambda model: model.turned[-1, -1].fill_(-1.0)),
        ("packed", lambda model: model.packed[3].fill_(9)),
    ],
)
def test_change_makes_tensor_state(name: str, change: Any) -> None:
    model = Model()
    base = _base(model)
    base.hashes()
    with torch.no_grad():
        change(model)
    assert base.refresh().keys() == {"trained", name}
    assert base.moved == {name}
    described = base.describe()
    assert described is not None
    assert name not in described["hashes"]  # type: ignore[operator]


def test_same_contents_in_other_memory_stay_base() -> None:
    model = Model()
    base = _base(model)
    base.hashes()
    model.frozen.data = model.frozen.data.clone()
    model.turned.copy_(model.turned.clone())
    assert base.refresh().keys() == {"trained"}


def test_uncounted_change_of_one_tensor_leads_to_others() -> None:
    """Only the first of them has changed where the sample is."""
    model = Model()
    base = _base(model)
    base.hashes()
    model.frozen.data.mul_(2.0)
    model.packed.data[-1] = 7  # type: ignore[index]
    assert base.refresh().keys() == {"trained", "frozen", "packed"}


def test_change_while_base_is_hashed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, go = Model(), threading.Event()
    right = tensor_hash.hash_tensor

    def slow(tensor: torch.Tensor, *more: Any) -> str:
        go.wait(30)
        return right(tensor, *more)

    monkeypatch.setattr(frozen_base, "hash_tensor", slow)
    base = _base(model)
    with torch.no_grad():
        model.frozen.add_(1)
    go.set()
    assert base.refresh().keys() == {"trained", "frozen"}


def test_long_hash_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_REPORT_S", 0.0)
    _base(Model()).hashes()
    assert "hashing the frozen base (" in caplog.text


def test_hash_depends_on_dtype_shape_and_bytes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(600.0).reshape(20, 30)
    whole = hash_tensor(numbers)
    assert whole != hash_tensor(numbers.reshape(30, 20))
    assert whole != hash_tensor(numbers.view(torch.int32))
    monkeypatch.setattr(tensor_hash, "_PIECE_BYTES", 256)
    assert hash_tensor(numbers) == whole, "in pieces"
    assert hash_tensor(numbers.t().contiguous().t()) == whole, "in another layout"
    assert hash_tensor(torch.nn.Parameter(numbers)) == whole


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.bool])
def test_every_dtype_is_hashed(dtype: torch.dtype) -> None:
    numbers = torch.ones(3).to(dtype)
    assert hash_tensor(numbers) == hash_tensor(numbers.clone()) != hash_tensor(torch.zeros(3).to(dtype))


def test_tensor_without_bytes_is_not_compared() -> None:
    assert hash_tensor(torch.empty(3, device="meta")) == UNCOMPARED
    assert hash_tensor(torch.eye(3).to_sparse()) == UNCOMPARED


def test_parts_of_one_file_are_told_apart() -> None:
    """All tensors of a file that was mapped into memory have one storage."""
    model, file = Model(), torch.zeros(2 * NUMBERS)
    model.trained = torch.nn.Parameter(file[:NUMBERS])
    model.frozen = torch.nn.Parameter(file[NUMBERS:], requires_grad=False)
    assert "frozen" in _base(model).names
    model.frozen = torch.nn.Parameter(file[NUMBERS - 1 :], requires_grad=False)
    assert "frozen" not in _base(model).names


def test_buffers_of_model_on_meta_device_are_base() -> None:
    with torch.device("meta"):
        model = Model()
    model.trained = torch.nn.Parameter(torch.ones(4))
    base = _base(model)
    assert set(base.hashes().values()) == {UNCOMPARED}
    assert base.refresh().keys() == {"trained"}
