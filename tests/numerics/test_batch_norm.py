"""barnraise.SyncBatchNorm equals ordinary batch normalisation of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from barnraise.collectives.batch_norm import SyncBatchNorm
from barnraise.core.errors import UnsupportedOperation
from tests.numerics.harness.pool import Pool

SHAPES: tuple[list[int], ...] = ([], [3], [3, 2], [3, 2, 4])
FORMS: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"uneven": True},
    "one empty": {"uneven": True, "empty": True},
    "no affine": {"affine": False},
    "cumulative": {"momentum": None, "uneven": True},
}


def _same(digests: list[Any]) -> None:
    assert all(digest == digests[0] for digest in digests), f"running statistics differ: {digests}"


@pytest.mark.parametrize("world", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_sync_batch_norm_matches_whole_batch(pool: Pool, dtype: str, form: str, world: int) -> None:
    for spatial in SHAPES:
        _same(pool.run("batch_norms:matches", world=world, spatial=spatial, dtype=dtype, **FORMS[form]))


def test_sync_batch_norm_inside_ddp(pool: Pool) -> None:
    _same(pool.run("batch_norms:in_ddp", world=4))


def test_too_few_values_raise_on_every_rank(pool: Pool) -> None:
    pool.run("batch_norms:too_few", world=2)


class TestAlone:
    """Without a process group it is ordinary batch normalisation."""

    def test_single_rank_equals_batch_norm(self) -> None:
        plain, ours = nn.BatchNorm2d(4), SyncBatchNorm.convert(nn.BatchNorm2d(4))
        batch = torch.randn(6, 4, 3, 3)
        assert torch.equal(plain(batch), ours(batch))
        assert torch.equal(plain.eval()(batch), ours.eval()(batch))

    def test_convert_replaces_all_norms_and_keeps_parameters(self) -> None:
        inner = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        model = nn.ModuleDict({"a": inner, "b": nn.BatchNorm1d(3, affine=False, track_running_stats=False)})
        weight, state = inner[1].weight, list(model.state_dict())
        model.eval()
        converted = SyncBatchNorm.convert(model)
        assert converted is model
        assert isinstance(inner[1], SyncBatchNorm)
        assert isinstance(model["b"], SyncBatchNorm)
        assert inner[1].weight is weight
        assert list(model.state_dict()) == state
        assert not inner[1].training
        assert model["b"].running_mean is None

    def test_convert_keeps_states_loadable_both_ways(self) -> None:
        plain = nn.BatchNorm2d(3)
        ours = SyncBatchNorm.convert(nn.BatchNorm2d(3))
        ours.load_state_dict(plain.state_dict())
        plain.load_state_dict(ours.state_dict())

    def test_convert_rejects_lazy_norms_with_hint(self) -> None:
        with pytest.raises(UnsupportedOperation, match="one batch"):
            SyncBatchNorm.convert(nn.Sequential(nn.LazyBatchNorm2d()))
