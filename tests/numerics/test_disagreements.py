"""Ranks that call different things (ours only: Gloo is wrong, hangs, or aborts the process)."""

from __future__ import annotations

import pytest

from tests.numerics.harness.pool import Pool

CASES = (
    "size",
    "dtype",
    "operation",
    "kind",
    "root",
    "all_gather size",
    "reduce_scatter size",
    "barrier",
    "large size",
    "all_to_all splits",
)


@pytest.mark.parametrize("case", CASES)
def test_disagreement_raises_on_every_rank(ours: Pool, case: str) -> None:
    messages = ours.run("disagreements:raises_everywhere", case=case)
    for message in messages:
        assert message.startswith("OperationMismatch"), message
        assert "rank 1 " in message, f"the differing rank is not named: {message}"


def test_monitored_barrier_passes_with_all_ranks(ours: Pool) -> None:
    for world in (1, 2, 5):
        ours.run("disagreements:monitored_barrier_passes", world=world)


@pytest.mark.parametrize("missing", [[2], [1, 4]])
def test_monitored_barrier_names_missing_ranks(ours: Pool, missing: list[int]) -> None:
    messages = ours.run("disagreements:monitored_barrier_names", missing=missing)
    for rank, message in enumerate(messages):
        if rank not in missing:
            assert all(str(missing_rank) in message for missing_rank in missing), f"rank {rank}: {message!r}"
            assert not any(
                f"rank {present_rank} " in message for present_rank in range(5) if present_rank not in missing
            ), message


@pytest.mark.slow
def test_gloo_group_keeps_its_monitored_barrier(gloo: Pool) -> None:
    gloo.run("disagreements:gloo_monitored_barrier", world=3)
