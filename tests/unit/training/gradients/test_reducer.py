"""Gradient reducer: buckets sent during backward give the same result as buckets sent afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from barnraise.core.errors import PeerLost, RunError
from barnraise.training.gradients.accumulator import GradientAccumulator
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.group.interface import PendingWork


class Twice:
    """Group of two workers with the same gradients; records what is sent."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails = False

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingWork:
        if self.fails:
            raise PeerLost(1, "it is gone")
        self.sizes.append(tensor.numel())
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        return


def _model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def _backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(3, 6, dtype=torch.float64)).square().mean().backward()


def _results(reducer: GradientReducer) -> list[torch.Tensor]:
    reducer.write_grads(None)
    return [parameter.grad.clone() for parameter in reducer.parameters if parameter.grad is not None]


NOTHING = torch.zeros(0)


def _step(early: bool, calls: int = 1) -> tuple[list[torch.Tensor], Twice]:
    model, group = _model(), Twice()
    reducer = GradientReducer(model.parameters(), bucket_bytes=100)
    _backward(model, 1)
    reducer.add_microbatch(3.0)
    if early:
        reducer.start_last_microbatch(group, 2.0)
    for _ in range(calls):
        _backward(model, 2)
    travelled = len(group.sizes)
    assert bool(travelled) == early
    reducer.add_microbatch(2.0)
    reducer.all_reduce(group, NOTHING)
    return _results(reducer), group


def test_overlap_with_backward_gives_same_bits() -> None:
    late, late_group = _step(early=False)
    early, early_group = _step(early=True)
    assert late_group.sizes == early_group.sizes, "the same buckets in the same order"
    assert len(late_group.sizes) >= 3
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))


def test_second_backward_is_detected_and_reduced_again() -> None:
    late, _ = _step(early=False, calls=2)
    early, group = _step(early=True, calls=2)
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))
    assert len(group.sizes) % 2 == 0, "everything travelled twice"


def test_failure_during_backward_is_raised_at_step() -> None:
    model, group = _model(), Twice()
    reducer = GradientReducer(model.parameters())
    group.fails = True
    reducer.start_last_microbatch(group, 1.0)
    _backward(model, 1)
    reducer.add_microbatch(1.0)
    with pytest.raises(PeerLost):
        reducer.all_reduce(group, NOTHING)
    group.fails = False
    reducer.discard_microbatch()
    reducer.all_reduce(group, NOTHING)
    _backward(model, 1)
    expected = [parameter.grad for parameter in model.parameters()]
    reduced = _results(reducer)
    assert all(torch.allclose(a, b) for a, b in zip(reduced, expected, strict=True) if b is not None)


def test_sending_time_within_backward_is_measured() -> None:
    """Sending is not computation: a slow link does not make a machine slow."""
    model, group = _model(), Twice()
    reducer = GradientReducer(model.parameters(), bucket_bytes=100)
    _backward(model, 1)
    reducer.add_microbatch(1.0)
    assert reducer.pop_sending_s() == 0.0, "nothing left"
    all_reduce_async = group.all_reduce_async

    def slowly(tensor: torch.Tensor) -> Any:
        time.sleep(0.02)
        return all_reduce_async(tensor)

    group.all_reduce_async = slowly  # type: ignore[method-assign]
    reducer.start_last_microbatch(group, 1.0)
    _backward(model, 2)
    assert reducer.pop_sending_s() >= 0.02 * len(group.sizes) > 0.0
    assert reducer.pop_sending_s() == 0.0


def test_parameters_of_several_dtypes_are_reduced() -> None:
    model = _model()
    model[0].to(torch.float32)
    reducer = GradientReducer(model.parameters())
    group = Twice()
    reducer.start_last_microbatch(group, 1.0)
    inner = model[0](torch.randn(3, 6)).double()
    model[1:](inner).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    reducer.add_microbatch(1.0)
    reducer.all_reduce(group, NOTHING)
    reduced = _results(reducer)
    assert [gradient.dtype for gradient in reduced] == [torch.float32] * 2 + [torch.float64] * 4
    assert all(torch.equal(a, b) for a, b in zip(reduced, gradients, strict=True))
    assert len(group.sizes) == 3, "a bucket for each kind, and the weight"


def test_gradient_changed_after_backward_is_rejected() -> None:
    model = _model()
    reducer = GradientReducer(model.parameters())
    _backward(model, 1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RunError, match="were changed"):
        reducer.add_microbatch(1.0)


def test_clipping_uses_norm_of_whole_gradient() -> None:
    model, group = _model(), Twice()
    model[0].to(torch.float32)
    reducer = GradientReducer(model.parameters())
    model[1:](model[0](torch.randn(3, 6)).double()).square().mean().backward()
    reducer.add_microbatch(1.0)
    reducer.all_reduce(group, NOTHING)
    reducer.write_grads(1e-3)
    norm = torch.nn.utils.get_total_norm([p.grad.double() for p in model.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_accumulator_with_one_microbatch_makes_no_copy(clip: float | None) -> None:
    """One micro-batch is used as it is; two are averaged."""
    given = []
    for halves in (False, True):
        model = _model()
        own = GradientAccumulator(GradientReducer(model.parameters()))
        _backward(model, 1)
        kept = [parameter.grad for parameter in model.parameters()]
        own.add_microbatch(1.0 if halves else 3.0)
        if halves:
            _backward(model, 1)
            own.add_microbatch(2.0)
        assert own.write_grads(clip) == 3.0
        assert own.is_empty
        if clip is None and not halves:
            assert all(
                parameter.grad is gradient
                for parameter, gradient in zip(model.parameters(), kept, strict=True)
            )
        given.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*given)


def test_accumulator_weighs_microbatches() -> None:
    model = _model()
    own = GradientAccumulator(GradientReducer(model.parameters()))
    gradients = []
    for seed, weight in ((1, 3.0), (2, 1.0)):
        _backward(model, seed)
        gradients.append(
            [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        )
        own.add_microbatch(weight)
    assert own.write_grads(None) == 4.0
    wanted = [(3 * first + second) / 4 for first, second in zip(*gradients, strict=True)]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)


def test_nan_gradients_without_weight_add_nothing() -> None:
    runs = []
    for weights in ((2.0,), (2.0, 0.0)):
        model, group = _model(), Twice()
        reducer = GradientReducer(model.parameters())
        for seed, weight in enumerate(weights):
            _backward(model, seed)
            for parameter in model.parameters() if not weight else ():
                parameter.grad = torch.full_like(parameter, float("nan"))
            reducer.add_microbatch(weight)
        reducer.all_reduce(group, NOTHING)
        runs.append(_results(reducer))
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_single_non_finite_number_is_found(value: float) -> None:
    reducer = GradientReducer(_model(torch.float32).parameters())
    (flat,) = reducer.total.values()
    assert reducer.is_finite()
    flat[7] = value
    assert reducer.is_finite() == (value == 1e30)


@pytest.mark.parametrize("place", [0, 1 << 18, (1 << 19) + 5])
def test_digest_of_large_model_covers_each_part_in_some_step(place: int) -> None:
    """A window has 2**18 numbers of four bytes; this model has a bit more than two windows."""
    reducer = GradientReducer([nn.Parameter(torch.zeros((1 << 19) + 9))])
    (flat,) = reducer.total.values()
    before = [reducer.digest(step) for step in range(6)]
    flat[place] = 1.0
    after = [reducer.digest(step) for step in range(6)]
    window = place >> 18
    assert [step for step in range(6) if before[step] != after[step]] == [window, window + 3]
