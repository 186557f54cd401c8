"""The parts of PowerSGD that need no group: what is factored, columns, products and what is remembered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.compression import FeedbackPart, PowerSGD
from barnraise.compression.allreduce.deterministic_sum import sum_rows
from barnraise.compression.codecs.powersgd import Matrix, fingerprint, orthonormal, require_equal, restore
from barnraise.core.errors import ConfigError, OperationMismatch, RunError

MATRIX = Matrix("w", 0, 60, 40)


def test_split_factors_only_large_matrices() -> None:
    parts = [
        FeedbackPart("conv", (32, 8, 3, 3)),
        FeedbackPart("bias", (32,)),
        FeedbackPart("small", (4, 9)),
        FeedbackPart("w", (64, 64)),
    ]
    split = PowerSGD(rank=2).split([*parts, FeedbackPart("none", (0, 5)), FeedbackPart("number", ())])
    assert [(matrix.name, matrix.rows, matrix.columns) for matrix in split.matrices] == [
        ("conv", 32, 72),
        ("w", 64, 64),
    ]
    covered = sorted(
        [(matrix.first, matrix.last) for matrix in split.matrices] + [(s.start, s.stop) for s in split.spans]
    )
    assert [first for first, _ in covered] == [0, 2304, 2336, 2372, 6468, 6468]
    assert covered[-1] == (6468, 6469)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**30), st.integers(1, 80), st.integers(1, 6), st.floats(-18, 18))
def test_columns_are_orthonormal_or_zero(seed: int, rows: int, rank: int, exponent: float) -> None:
    source = torch.Generator().manual_seed(seed)
    columns = torch.randn(rows, rank, generator=source) * 10**exponent
    if rank > 2:
        columns[:, 1] = 2 * columns[:, 0]
    basis = orthonormal(columns).double()
    products = basis.t() @ basis
    is_there = products.diagonal() > 0.5
    assert torch.allclose(products, torch.diag(is_there.double()), atol=2e-5)
    # What is left spans all that was there.
    scaled = columns.double() / columns.abs().max()
    assert float((scaled - basis @ (basis.t() @ scaled)).abs().max()) < 1e-4


def test_orthonormal_of_zeros_is_zero() -> None:
    assert not orthonormal(torch.zeros(7, 3)).any()


def test_sum_rows_has_fixed_order() -> None:
    for rows in (1, 2, 3, 7, 64, 100):
        values = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
        assert torch.allclose(sum_rows(values.clone()), values.sum(0), atol=1e-5)
    assert sum_rows(torch.zeros(0, 5)).tolist() == [0.0] * 5
    column = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert float(sum_rows(column.clone())) == 2.0  # (1e8 - 1e8) + (1 + 1), where left to right gives 1


def test_restore_computes_low_rank_product() -> None:
    p, q = torch.randn(300, 3), torch.randn(700, 3)
    into = torch.empty(300, 700)
    restore(p, q, into)
    assert torch.allclose(into, p @ q.t(), atol=1e-5)


def test_lost_columns_are_drawn_again() -> None:
    """A zero gradient leaves factors of zeros, from which a power iteration would never recover."""
    power = PowerSGD(rank=3)
    fresh = power.factor(MATRIX, 0)
    assert torch.allclose(fresh.t() @ fresh, torch.eye(3), atol=1e-5)
    power.keep({"w": torch.zeros(40, 3)})
    factor = power.factor(MATRIX, 1)
    assert torch.allclose(factor.t() @ factor, torch.eye(3), atol=1e-5)
    half = torch.zeros(40, 3)
    half[0, 1] = 5.0
    power.keep({"w": half})
    factor = power.factor(MATRIX, 2)
    assert torch.allclose(factor.t() @ factor, torch.eye(3), atol=1e-5)
    assert bool((factor[0].abs() > 0.99).any())  # what was known is kept


def test_state_dict_round_trip_and_validation() -> None:
    power, again = PowerSGD(rank=2, seed=7), PowerSGD(rank=2, seed=8)
    power.keep({"w": torch.randn(40, 2)})
    assert not torch.equal(again.factor(MATRIX, 0), power.factor(MATRIX, 0))
    again.load_state_dict(power.state_dict())
    assert torch.equal(again.factor(MATRIX, 0), power.factor(MATRIX, 0))
    again.restart()
    assert torch.equal(again.factor(MATRIX, 0), PowerSGD(rank=2, seed=8).factor(MATRIX, 0))
    for state in ({}, {"factors": {"w": torch.zeros(40, 3)}}, {"factors": {"w": None}}):
        with pytest.raises(RunError, match="does not belong to powersgd"):
            power.load_state_dict(state)


def test_different_factors_raise_mismatch() -> None:
    here, there = torch.randn(40, 2), torch.randn(40, 2)
    cpu = torch.device("cpu")
    require_equal(fingerprint([here], cpu) * 3, 3)
    require_equal(fingerprint([], cpu) * 3, 3)
    with pytest.raises(OperationMismatch, match="different factors"):
        require_equal(fingerprint([here], cpu) * 2 + fingerprint([there], cpu), 3)


def test_rank_out_of_range_is_rejected() -> None:
    for rank in (0, 65):
        with pytest.raises(ConfigError, match=str(rank)):
            PowerSGD(rank)
