"""Measurement of a block before a split model has any weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from barnraise.training.pipeline import stage
from barnraise.training.pipeline.empty_weights import empty_weights
from barnraise.training.pipeline.outline import find_blocks, trace_outline
from barnraise.training.pipeline.prediction import block_probe
from barnraise.training.pipeline.prediction.block_probe import ProbedModel, probe_blocks
from barnraise.training.pipeline.split_training import loss_of_output
from barnraise.training.pipeline.weights import StageWeights
from tests.unit.training.pipeline.block_model import BLOCKS, WIDTH, BlockModel, loader

MEMORY = 1 << 30


class Clock:
    """Clock that moves only while a module of this test computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock.now = 0.0
    monkeypatch.setattr(block_probe, "time", clock)
    monkeypatch.setattr(stage, "time", clock)


class SlowBlock(nn.Module):
    """A block that takes a known time, and counts its calls."""

    def __init__(self, inner: Any, seconds: float) -> None:
        super().__init__()
        self.inner, self._seconds = inner, seconds
        self.calls = 0

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        if not hidden.is_meta and not isinstance(hidden, torch._subclasses.FakeTensor):
            self.calls += 1
            clock.now += self._seconds
        output = self.inner(hidden, mask=mask)
        if self.calls and output.requires_grad:
            output.register_hook(self._note_backward)
        return output

    def _note_backward(self, gradient: torch.Tensor) -> None:
        clock.now += 2 * self._seconds


class SlowHead(nn.Linear):
    """A head that takes a known time."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not isinstance(hidden, torch._subclasses.FakeTensor):
            clock.now += 0.06
        return super().forward(hidden)


def probed_model(seconds: float = 0.0, head: type[nn.Linear] = nn.Linear, words: int = 17) -> ProbedModel:
    with empty_weights():
        model = BlockModel()
        model.head = head(WIDTH, words)
        model.head.requires_grad_(False)
        for number, layer in enumerate(model.layers):
            model.layers[number] = SlowBlock(layer, seconds)
    inputs = next(iter(loader()))
    outline = trace_outline(model, find_blocks(model), loss_of_output, inputs)
    weights = StageWeights(model, None, 0, torch.device("cpu"))
    return ProbedModel(model, outline, weights, loss_of_output, inputs)


def test_block_and_head_are_measured_apart() -> None:
    speed = probe_blocks(probed_model(0.03, SlowHead), MEMORY)
    assert speed == pytest.approx((0.03, 0.06, 0.0, 0.06, 0.0))
    assert speed.block_s == pytest.approx(0.09)


def test_probe_leaves_no_weights_and_no_random_numbers_behind() -> None:
    probed = probed_model(0.01)
    state = torch.get_rng_state()
    assert probe_blocks(probed, MEMORY).block_s > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in probed.model.parameters())
    assert all(isinstance(layer, SlowBlock) for layer in probed.model.layers)  # type: ignore[union-attr]


def test_only_blocks_at_the_ends_and_in_the_middle_ever_have_weights() -> None:
    probed = probed_model(0.3)
    probe_blocks(probed, MEMORY)
    calls = [layer.calls > 0 for layer in probed.model.layers]  # type: ignore[union-attr]
    assert calls == [True, False, True, False, True]
    assert len(calls) == BLOCKS


def test_head_that_is_larger_than_a_block_is_estimated_by_its_size() -> None:
    probed = probed_model(0.2, words=800)
    speed = probe_blocks(probed, MEMORY)
    parameters = dict(probed.model.named_parameters())
    sizes = [
        sum(parameters[name].numel() for name in names)
        for names in (probed.outline.after, probed.outline.blocks[2])
    ]
    assert speed.after_s == pytest.approx(speed.block_s * sizes[0] / sizes[1])
    assert [layer.calls > 0 for layer in probed.model.layers][-1] is False  # type: ignore[union-attr]


def test_block_that_does_not_fit_is_not_measured() -> None:
    probed = probed_model()
    assert probe_blocks(probed, 100).block_s == 0
    assert all(layer.calls == 0 for layer in probed.model.layers)  # type: ignore[union-attr]


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (0.2, 3), (0.01, 6)])
def test_slow_block_is_measured_less_often(seconds: float, calls: int) -> None:
    probed = probed_model(seconds)
    assert probe_blocks(probed, MEMORY).forward_s == pytest.approx(seconds)
    assert [layer.calls for layer in probed.model.layers] == [calls, 0, calls, 0, calls]  # type: ignore[union-attr]
