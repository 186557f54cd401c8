"""Merge rules against Flower's, the outer step against torch's, and bounded memory."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

from barnraise.hub.aggregation.aggregate import (
    MergeInput,
    OuterState,
    cap_invites,
    cap_weights,
    map_in_order,
    merge_chunk,
    take_outer_step,
    trimmed_mean,
    weighted_mean,
)
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm, add_vector, encode_vector
from barnraise.hub.storage.blobs import BlobStore

REFERENCE = json.loads((Path(__file__).parent / "reference" / "flower_merges.json").read_text())
CASES = REFERENCE["cases"] if isinstance(REFERENCE, dict) else REFERENCE


def _files(folder: Path, vectors: Sequence[torch.Tensor], form: VectorForm) -> list[VectorFile]:
    files = []
    for number, vector in enumerate(vectors):
        sink = io.BytesIO()
        encode_vector(sink, vector, form)
        path = folder / f"update-{number}"
        path.write_bytes(sink.getvalue())
        files.append(VectorFile(path, form))
    return files


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_means_equal_flowers(case: dict[str, object], tmp_path: Path) -> None:
    updates = torch.tensor(case["updates"], dtype=torch.float32)
    samples = [float(count) for count in case["samples"]]  # type: ignore[attr-defined]
    mean = weighted_mean(iter(zip(updates, samples, strict=True)), updates.shape[1])
    numpy.testing.assert_allclose(mean, case["weighted_mean"], rtol=1e-5, atol=1e-8)
    trimmed = case["trimmed_mean"]
    assert isinstance(trimmed, dict)
    for trim, expected in trimmed.items():
        mean_without_extremes = trimmed_mean(updates, [1.0] * len(updates), float(trim))
        numpy.testing.assert_allclose(mean_without_extremes, expected, rtol=1e-5, atol=1e-8)
    form = VectorForm(updates.shape[1], 1024, "fp32", 0)
    files = _files(tmp_path, list(updates), form)
    inputs = [MergeInput(file, weight) for file, weight in zip(files, samples, strict=True)]
    numpy.testing.assert_allclose(merge_chunk(inputs, 0, None), case["weighted_mean"], rtol=1e-5, atol=1e-8)


def test_trimmed_mean_weighs_remaining_values() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, 8.0], [4.0, 7.0], [1e9, -1e9]])
    mean = trimmed_mean(rows, [1.0, 1.0, 3.0, 3.0], 0.25)
    assert mean.tolist() == [(2 + 3 * 4) / 4, (8 + 3 * 7) / 4]
    assert trimmed_mean(rows[:1], [5.0], 0.25).tolist() == [1.0, 9.0]
    assert cap_weights([1.0, 1.0, 100.0]) == [1.0, 1.0, 3.0]


def test_mean_weight_of_one_member_is_capped(tmp_path: Path) -> None:
    form = VectorForm(4, 1024, "fp32", 0)
    files = _files(tmp_path, [torch.ones(4), torch.ones(4), torch.ones(4), -torch.ones(4)], form)
    weights = (10.0, 30.0, 40.0, 1e9)
    merged = merge_chunk(
        [MergeInput(file, weight) for file, weight in zip(files, weights, strict=True)], 0, None
    )
    numpy.testing.assert_allclose(merged, [(80.0 - 300.0) / 380.0] * 4, rtol=1e-6)
    usual = merge_chunk([MergeInput(files[0], 10.0), MergeInput(files[3], 100.0)], 0, None)
    numpy.testing.assert_allclose(usual, [-90.0 / 110.0] * 4, rtol=1e-6)


def test_weight_of_one_invite_is_bounded(tmp_path: Path) -> None:
    """One person takes ten seats with one invite; five friends have an invite each."""
    form = VectorForm(4, 1024, "fp32", 0)
    values = [torch.ones(4)] * 5 + [-torch.ones(4)] * 10
    files = _files(tmp_path, values, form)
    invites = [f"friend {number}" for number in range(5)] + ["one"] * 10
    inputs = [MergeInput(file, 1.0, 1.0, invite) for file, invite in zip(files, invites, strict=True)]
    numpy.testing.assert_allclose(merge_chunk(inputs, 0, None), [(5 - 3) / 8] * 4, rtol=1e-6)
    assert cap_invites([1.0, 1.0, 9.0, 1.0], ["a", "b", "c", "c"]) == pytest.approx([1.0, 1.0, 8.1, 0.9])
    assert cap_invites([2.0, 3.0], ["a", "a"]) == [2.0, 3.0], "below the bound nothing changes"
    assert cap_invites([1.0] * 9, [""] * 9) == [1.0] * 9
    alone = merge_chunk([*inputs[5:], MergeInput(files[0], 1.0, 1.0, "one")], 0, None)
    numpy.testing.assert_allclose(alone, [-9 / 11] * 4, rtol=1e-6)


def test_strangers_of_one_invite_count_as_one_in_the_trim(tmp_path: Path) -> None:
    """Eight machines of one stranger would be most of the values that the trim leaves."""
    form = VectorForm(4, 1024, "fp32", 0)
    files = _files(tmp_path, [torch.full((4,), 0.1 * number) for number in range(4)], form)
    (tmp_path / "evil").mkdir()
    evil = _files(tmp_path / "evil", [torch.full((4,), 1e6)] * 8, form)
    inputs = [MergeInput(file, 1.0, 1.0, f"friend {place}") for place, file in enumerate(files)]
    inputs += [MergeInput(file, 1.0, 1.0, "one", is_strangers=True) for file in evil]
    assert float(merge_chunk(inputs, 0, 0.25).max()) <= 0.3


def test_outer_step_equals_torch_sgd_with_error_feedback(tmp_path: Path) -> None:
    """A coarse codec: the chain stays within one step's rounding of what torch.optim.SGD does."""
    torch.manual_seed(2)
    numel, blobs = 3000, BlobStore(tmp_path / "blobs")
    parameter = torch.nn.Parameter(torch.randn(numel))
    state = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer, worst = OuterState(None, None), 0.0
    with ThreadPoolExecutor(2) as pool:
        for version in range(1, 12):
            gradient = torch.randn(numel)
            parameter.grad = gradient.clone()
            optimizer.step()
            form = VectorForm(numel, 1024, "int4", version)
            means = [gradient[form.slice(index)].clone() for index in range(form.count)]
            outcome = take_outer_step(blobs, form, means.__getitem__, outer, 0.7, 0.9, pool)
            add_vector(blobs.path(outcome.step.sha256), form, state)
            outer = OuterState(blobs.path(outcome.momentum), blobs.path(outcome.feedback))
            worst = max(worst, float((state - parameter.detach()).abs().max()))
    lost = torch.frombuffer(bytearray(blobs.path(outcome.feedback).read_bytes()), dtype=torch.float32)
    assert torch.allclose(state + lost, parameter.detach(), atol=1e-4)
    assert worst < 5.0


def test_map_in_order_limits_results_ahead() -> None:
    started: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        results = map_in_order(pool, lambda index: started.append(index) or index, 1000)
        assert next(results) == 0
        assert len(started) < 100
        assert list(results) == list(range(1, 1000))
