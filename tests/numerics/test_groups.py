"""Sub-groups, asynchronous work, objects, functional and coalesced collectives."""

from __future__ import annotations

import pytest
import torch

from barnraise.collectives.torch_patch.torch_version import has_python_backends
from tests.numerics.harness.pool import Pool

WORLDS = [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 5]


@pytest.mark.parametrize("body", ["sub_groups", "enumerated", "interleaved"])
def test_new_groups_compute_right_sums(pool: Pool, body: str) -> None:
    pool.run(f"groups:{body}")


def test_all_reduce_by_leaders_matches_one_group_and_survives_a_failure(ours: Pool) -> None:
    outcomes = ours.run("groups:by_leaders")
    assert outcomes[0].startswith("PeerLost: rank 1 is lost"), outcomes
    assert outcomes[3].startswith("OperationAborted: "), outcomes
    for member in (1, 2, 4):
        assert outcomes[member].startswith("CollectiveError: the leader of this machine"), outcomes


def test_all_reduce_by_leaders_refuses_wrong_calls(ours: Pool) -> None:
    ours.run("groups:refused_by_leaders", world=1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("body", ["futures", "many_kinds_in_flight"])
def test_asynchronous_operations_complete(pool: Pool, body: str, world: int) -> None:
    pool.run(f"groups:{body}", world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_object_collectives_return_objects(pool: Pool, world: int) -> None:
    pool.run("objects:everything", world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("body", ["plain", "coalesced", "coalesced_in_place", "differentiable"])
def test_functional_collectives_match_expected_values(pool: Pool, body: str, world: int) -> None:
    pool.run(f"functional:{body}", world=world)


@pytest.mark.parametrize("world", [1, 3])
def test_coalescing_on_a_device(ours: Pool, world: int) -> None:
    ours.run("functional:coalesced_on_a_device", world=world)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_reconfigured_group_has_its_new_members(ours: Pool, world: int) -> None:
    ours.run("reconfigure:members_change", world=world)


@pytest.mark.skipif(
    not has_python_backends(torch.__version__), reason="torch records other backends from 2.15 on"
)
@pytest.mark.parametrize("world", [1, 3])
def test_flight_recorder_has_operations(ours: Pool, world: int) -> None:
    ours.run("flight_recorder:operations_are_recorded", world=world)
