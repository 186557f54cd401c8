"""Error feedback: nothing is lost for good, nothing is remembered twice, and it survives being saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from barnraise.compression import Codec, CodecRound, ErrorFeedback, FeedbackPart, PowerSGD, codec_named
from barnraise.core.errors import ConfigError, RunError

LOSSY = ("fp16", "bf16", "int8", "int4", "topk:k=32,block=512", "randomk:every=16", "int4+zlib")


def codec_of(name: str) -> Codec:
    codec = codec_named(name)
    assert not isinstance(codec, PowerSGD)
    return codec


def gradient(step: int = 0) -> torch.Tensor:
    return torch.randn(40, 50, generator=torch.Generator().manual_seed(step))


def one_step(codec: Codec, feedback: ErrorFeedback, step: int, values: torch.Tensor) -> torch.Tensor:
    codec_round = CodecRound("w", step)
    encoded = feedback.encode(codec, values, codec_round)
    feedback.keep(encoded.residual, [FeedbackPart("w", tuple(values.shape))])
    return codec.decode(encoded.payload, values.numel(), codec_round)


@pytest.mark.parametrize("name", LOSSY)
def test_mean_over_many_steps_converges_to_input(name: str) -> None:
    codec, feedback, right = codec_of(name), ErrorFeedback(), gradient().reshape(-1).double()
    total, uncorrected_total, gaps = torch.zeros_like(right), torch.zeros_like(right), []
    for step in range(200):
        total += one_step(codec, feedback, step, gradient())
        uncorrected_total += codec.decode(
            codec.encode(gradient(), CodecRound("w", step)), 2000, CodecRound("w", step)
        )
        if step + 1 in (50, 200):
            gaps.append(float((total / (step + 1) - right).norm() / right.norm()))
    uncorrected_gap = float((uncorrected_total / 200 - right).norm() / right.norm())
    assert gaps[1] < gaps[0] / 2.5  # it falls as one over the number of steps
    assert gaps[1] < uncorrected_gap / 5


def test_payload_plus_residual_equals_input() -> None:
    codec, feedback = codec_of("topk:k=8,block=512"), ErrorFeedback()
    given, sent = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000, dtype=torch.float64)
    for step in range(30):
        given += gradient(step).reshape(-1)
        sent += one_step(codec, feedback, step, gradient(step))
    left = feedback.state_dict()["residuals"]["w"]
    assert float((given - sent - left).abs().max()) < 1e-4


def test_lossless_codec_leaves_zero_residual() -> None:
    for name in ("fp32", "fp32+zlib"):
        feedback = ErrorFeedback()
        for step in range(2):
            assert torch.equal(one_step(codec_of(name), feedback, step, gradient()), gradient().reshape(-1))
        assert not feedback.state_dict()["residuals"]["w"].any()


def test_residuals_change_only_on_keep() -> None:
    codec, feedback = codec_of("int4"), ErrorFeedback()
    first = feedback.encode(codec, gradient(), CodecRound("w"))
    assert torch.equal(feedback.encode(codec, gradient(), CodecRound("w")).payload, first.payload)
    feedback.keep(first.residual, [FeedbackPart("w", (40, 50))])
    assert not torch.equal(feedback.encode(codec, gradient(), CodecRound("w")).payload, first.payload)


@pytest.mark.parametrize("name", ["int4", "topk:k=8,block=512"])
def test_loaded_state_continues_identically(name: str) -> None:
    codec, whole = codec_of(name), ErrorFeedback(decay=0.95)
    for step in range(5):
        one_step(codec, whole, step, gradient(step))
    saved = whole.state_dict()
    before = saved["residuals"]["w"].clone()
    again = ErrorFeedback()
    again.load_state_dict(saved)
    for step in range(5, 8):
        assert torch.equal(
            one_step(codec, again, step, gradient(step)), one_step(codec, whole, step, gradient(step))
        )
    assert torch.equal(saved["residuals"]["w"], before)  # a copy
    assert again.decay == 0.95


def test_decay_reduces_old_residuals() -> None:
    codec = codec_of("topk:k=1,block=2000")
    left = {}
    for decay in (1.0, 0.5):
        feedback = ErrorFeedback(decay)
        for step in range(40):
            one_step(codec, feedback, step, torch.ones(2000))
        left[decay] = float(feedback.state_dict()["residuals"]["w"].mean())
    assert left[1.0] > 35
    assert 1.9 < left[0.5] <= 2.0


def test_residuals_follow_names_in_other_flat_tensors() -> None:
    feedback = ErrorFeedback()
    feedback.keep(torch.tensor([1.0, 2, 3]), [FeedbackPart("a", (2,)), FeedbackPart("b", ())])
    parts = [
        FeedbackPart("b", ()),
        FeedbackPart("new", (1,)),
        FeedbackPart("a", (2,)),
        FeedbackPart("empty", (0,)),
    ]
    assert feedback.compensated(torch.zeros(4), parts).tolist() == [3.0, 0.0, 1.0, 2.0]
    with pytest.raises(RunError, match="'a' has 2 numbers, the tensor 5"):
        feedback.compensated(torch.zeros(5), [FeedbackPart("a", (5,))])
    feedback.forget()
    assert feedback.state_dict()["residuals"] == {}


BROKEN: list[Any] = [
    {},
    {"residuals": [1]},
    {"residuals": {"w": 3}},
    {"residuals": {1: torch.zeros(2)}},
    {"residuals": {"w": torch.zeros(2, dtype=torch.float64)}},
    {"residuals": {"w": torch.zeros(2, 2)}},
    {"residuals": {"w": torch.tensor([float("nan")])}},
]


@pytest.mark.parametrize("state", BROKEN)
def test_invalid_state_is_rejected(state: dict[str, Any]) -> None:
    feedback = ErrorFeedback()
    feedback.keep(torch.ones(1), [FeedbackPart("w", (1,))])
    with pytest.raises(RunError, match="does not belong to error feedback"):
        feedback.load_state_dict(state)
    assert feedback.state_dict()["residuals"]["w"].tolist() == [1.0]


def test_decay_out_of_range_is_rejected() -> None:
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError):
            ErrorFeedback(decay)
