"""GradientReducer of gradients: what travels early is what would have travelled late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from barnraise.core.errors import PeerLost, RunError
from barnraise.training.gradients.accumulator import GradientAccumulator
from barnraise.training.gradients.reducer import GradientReducer, PendingWork


class Twice:
    """A group of two members with the same gradients; notes what travels."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails = False

    def begin_sum(self, tensor: torch.Tensor) -> PendingWork:
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


def _results(sums: GradientReducer) -> list[torch.Tensor]:
    sums.give(None)
    return [parameter.grad.clone() for parameter in sums.parameters if parameter.grad is not None]


NOTHING = torch.zeros(0)


def _step(early: bool, calls: int = 1) -> tuple[list[torch.Tensor], Twice]:
    model, circle = _model(), Twice()
    sums = GradientReducer(model.parameters(), bucket_bytes=100)
    _backward(model, 1)
    sums.take(3.0)
    if early:
        sums.expect_last(circle, 2.0)
    for _ in range(calls):
        _backward(model, 2)
    travelled = len(circle.sizes)
    assert bool(travelled) == early
    sums.take(2.0)
    sums.reduce(circle, NOTHING)
    return _results(sums), circle


def test_gradients_travel_during_backward_and_the_sum_is_the_same_to_the_last_bit() -> None:
    late, one = _step(early=False)
    early, other = _step(early=True)
    assert one.sizes == other.sizes, "the same buckets in the same order"
    assert len(one.sizes) >= 3
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))


def test_a_second_backward_for_a_batch_is_noticed_and_summed_again() -> None:
    late, _ = _step(early=False, calls=2)
    early, circle = _step(early=True, calls=2)
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))
    assert len(circle.sizes) % 2 == 0, "everything travelled twice"


def test_a_group_that_breaks_during_backward_is_told_at_the_step() -> None:
    model, circle = _model(), Twice()
    sums = GradientReducer(model.parameters())
    circle.fails = True
    sums.expect_last(circle, 1.0)
    _backward(model, 1)
    sums.take(1.0)
    with pytest.raises(PeerLost):
        sums.reduce(circle, NOTHING)
    circle.fails = False
    sums.forget_unit()
    sums.reduce(circle, NOTHING)
    _backward(model, 1)
    expected = [parameter.grad for parameter in model.parameters()]
    found = _results(sums)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True) if b is not None)


def test_what_backward_spends_on_sending_is_told_apart() -> None:
    """It is no computing: machines are not as slow as their lines."""
    model, circle = _model(), Twice()
    sums = GradientReducer(model.parameters(), bucket_bytes=100)
    _backward(model, 1)
    sums.take(1.0)
    assert sums.sending_s() == 0.0, "nothing left"
    begin_sum = circle.begin_sum

    def slowly(tensor: torch.Tensor) -> Any:
        time.sleep(0.02)
        return begin_sum(tensor)

    circle.begin_sum = slowly  # type: ignore[method-assign]
    sums.expect_last(circle, 1.0)
    _backward(model, 2)
    assert sums.sending_s() >= 0.02 * len(circle.sizes) > 0.0
    assert sums.sending_s() == 0.0


def test_parameters_of_several_kinds() -> None:
    model = _model()
    model[0].to(torch.float32)
    sums = GradientReducer(model.parameters())
    circle = Twice()
    sums.expect_last(circle, 1.0)
    inner = model[0](torch.randn(3, 6)).double()
    model[1:](inner).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    sums.take(1.0)
    sums.reduce(circle, NOTHING)
    found = _results(sums)
    assert [one.dtype for one in found] == [torch.float32] * 2 + [torch.float64] * 4
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))
    assert len(circle.sizes) == 3, "a bucket for each kind, and the weight"


def test_a_gradient_that_was_edited_is_refused() -> None:
    model = _model()
    sums = GradientReducer(model.parameters())
    _backward(model, 1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RunError, match="were changed"):
        sums.take(1.0)


def test_the_norm_is_that_of_the_whole() -> None:
    model, circle = _model(), Twice()
    model[0].to(torch.float32)
    sums = GradientReducer(model.parameters())
    model[1:](model[0](torch.randn(3, 6)).double()).square().mean().backward()
    sums.take(1.0)
    sums.reduce(circle, NOTHING)
    sums.give(1e-3)
    norm = torch.nn.utils.get_total_norm([p.grad.double() for p in model.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_units_own_gradients_need_no_sum(clip: float | None) -> None:
    """Of one unit alone they are the mean; of two, the mean is made."""
    given = []
    for halves in (False, True):
        model = _model()
        own = GradientAccumulator(GradientReducer(model.parameters()))
        _backward(model, 1)
        kept = [parameter.grad for parameter in model.parameters()]
        own.take(1.0 if halves else 3.0)
        if halves:
            _backward(model, 1)
            own.take(2.0)
        assert own.give(clip) == 3.0
        assert own.is_empty
        if clip is None and not halves:
            assert all(one.grad is own for one, own in zip(model.parameters(), kept, strict=True))
        given.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*given)


def test_units_of_one_local_step_are_weighed() -> None:
    model = _model()
    own = GradientAccumulator(GradientReducer(model.parameters()))
    came = []
    for seed, weight in ((1, 3.0), (2, 1.0)):
        _backward(model, seed)
        came.append(
            [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        )
        own.take(weight)
    assert own.give(None) == 4.0
    wanted = [(3 * first + second) / 4 for first, second in zip(*came, strict=True)]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)


def test_a_unit_of_weight_zero_adds_nothing_even_if_its_gradients_are_not_numbers() -> None:
    found = []
    for weights in ((2.0,), (2.0, 0.0)):
        model, circle = _model(), Twice()
        sums = GradientReducer(model.parameters())
        for seed, weight in enumerate(weights):
            _backward(model, seed)
            for parameter in model.parameters() if not weight else ():
                parameter.grad = torch.full_like(parameter, float("nan"))
            sums.take(weight)
        sums.reduce(circle, NOTHING)
        found.append(_results(sums))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_one_number_that_is_none_is_found(value: float) -> None:
    sums = GradientReducer(_model(torch.float32).parameters())
    (flat,) = sums.total.values()
    assert sums.is_finite()
    flat[7] = value
    assert sums.is_finite() == (value == 1e30)


@pytest.mark.parametrize("place", [0, 1 << 18, (1 << 19) + 5])
def test_a_digest_of_a_model_larger_than_its_window_sees_each_part_in_some_step(place: int) -> None:
    """A window has 2**18 numbers of four bytes; this model has a bit more than two windows."""
    sums = GradientReducer([nn.Parameter(torch.zeros((1 << 19) + 9))])
    (flat,) = sums.total.values()
    before = [sums.digest(step) for step in range(6)]
    flat[place] = 1.0
    after = [sums.digest(step) for step in range(6)]
    window = place >> 18
    assert [step for step in range(6) if before[step] != after[step]] == [window, window + 3]
