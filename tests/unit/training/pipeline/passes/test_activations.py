"""Forms in which activations travel: their size, their error, and what a small Llama loses by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.collectives.torch_patch.torch_version import has_python_backends
from barnraise.training.pipeline.passes.activations import ActivationCodec
from tests.repository import ROOT

SHAPE = (2, 5, 12)


def travelled(codec: ActivationCodec, values: torch.Tensor, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Return values as another machine has them, through memory that it has made for them."""
    buffer = codec.buffer(shape, "cpu")
    packed = codec.pack(values.reshape(-1), shape)
    assert (packed.shape, packed.dtype) == (buffer.shape, buffer.dtype)
    assert codec.size(shape) == packed.nbytes
    buffer.copy_(packed)
    result = torch.full_like(values.reshape(-1), 7.0)
    codec.unpack(buffer, result, shape)
    return result.view(values.shape)


def values_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return (values * torch.logspace(-6, 3, 10).view(2, 5, 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_activations_keep_every_bit(dtype: torch.dtype) -> None:
    codec = ActivationCodec(dtype)
    assert codec.is_exact
    assert torch.equal(travelled(codec, values_of(dtype)), values_of(dtype))


def test_bf16_halves_float32_and_leaves_types_of_two_bytes() -> None:
    codec, values = ActivationCodec(torch.float32, "bf16"), values_of()
    assert torch.equal(travelled(codec, values), values.bfloat16().float())
    assert codec.size(SHAPE) == 2 * values.numel()
    for dtype in (torch.bfloat16, torch.float16):
        assert ActivationCodec(dtype, "bf16").is_exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_error_is_at_most_half_a_step_of_the_row(dtype: torch.dtype) -> None:
    codec, values = ActivationCodec(dtype, "int8"), values_of(dtype)
    received = travelled(codec, values).float()
    step = values.float().abs().amax(-1, keepdim=True) / 127
    rounding = torch.finfo(dtype).eps * values.float().abs()  # of the result in the type of the model
    assert ((received - values.float()).abs() <= 0.5001 * step + rounding).all()
    assert codec.size(SHAPE) == values.numel() + 4 * 10, "a byte for each number and a scale for each row"


def test_rows_of_zeros_stay_zero_and_no_row_hides_a_nan_or_infinity() -> None:
    codec, values = ActivationCodec(torch.float32, "int8"), values_of()
    values[0, 0] = 0.0
    values[0, 1, 3], values[0, 2, 4] = torch.nan, -torch.inf
    received = travelled(codec, values)
    assert (received[0, 0] == 0).all()
    assert received[0, 1].isnan().all()
    assert not received[0, 2].isfinite().any()
    assert received[0, 3:].isfinite().all()


def test_odd_rows_are_packed_too() -> None:
    codec, values = ActivationCodec(torch.float32, "int8"), torch.randn(3, 7)
    assert (travelled(codec, values, (3, 7)) - values).abs().max() < values.abs().max() / 127


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[float]]]:
    """Return the losses of each training of a small Llama, and the bytes that both machines have sent."""
    for library in ("transformers", "peft"):
        pytest.importorskip(library)
    if not hasattr(os, "fork") or has_python_backends(torch.__version__):
        pytest.skip("the members are forked, with a torch that can split models")
    room = tmp_path_factory.mktemp("llama")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    words = [sys.executable, str(Path(__file__).with_name("llama_workers.py")), str(room)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    results: dict[str, tuple[list[float], list[float]]] = {}
    for path in sorted(room.glob("*-?.json")):
        losses, sent = json.loads(path.read_text())
        results.setdefault(path.stem[:-2], (losses, []))[1].append(sent)
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["bf16", "int8", "half-int8"])
def test_small_llama_learns_as_with_exact_activations(name: str, trainings: Any) -> None:
    """The loss differs by less than half as much as with another seed of the adapter, which is luck."""
    is_half = name.startswith("half")
    exact, _ = trainings["half" if is_half else "exact"]
    other, _ = trainings["half-seed" if is_half else "seed"]
    losses, _ = trainings[name]
    assert exact[-1] < 0.8 * exact[0], "the model learns something"
    assert mean_difference(losses, exact) < 0.5 * mean_difference(other, exact)
    assert losses[-1] == pytest.approx(exact[-1], rel=0.01)


def mean_difference(losses: list[float], others: list[float]) -> float:
    return sum(abs(loss - other) for loss, other in zip(losses, others, strict=True)) / len(losses)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bytes_that_are_sent_shrink_in_both_directions(trainings: Any) -> None:
    """A row of 64 numbers takes 256 bytes in float32, 128 in bfloat16, and 68 in int8."""
    forward, backward = trainings["exact"][1]
    assert forward == backward, "activations one way, and their gradients the other way"
    for name, part in (("bf16", 128 / 256), ("int8", 68 / 256), ("half", 128 / 256), ("half-int8", 68 / 256)):
        assert trainings[name][1] == [part * forward, part * backward]
