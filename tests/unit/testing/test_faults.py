"""Faults of a simulation: delays by pair, and faults that a world cannot have."""

from __future__ import annotations

import pytest

from barnraise.core.errors import ConfigError
from barnraise.testing.faults import MAX_WORLD, Faults, check_faults


def test_delay_of_a_pair_replaces_the_common_one() -> None:
    faults = Faults(delay_s=0.1, delays={(0, 1): 0.5})
    assert faults.delay_between(0, 1) == 0.5
    assert faults.delay_between(1, 0) == 0.1


def test_possible_faults_are_accepted() -> None:
    check_faults(Faults(), 1)
    check_faults(Faults(0.1, {(0, 3): 0.0, (3, 0): 9.0}, {3: 1, 0: 1000}), 4)
    check_faults(Faults(), MAX_WORLD)


@pytest.mark.parametrize(
    ("faults", "world", "sentence"),
    [
        (Faults(), 0, "cannot have 0 ranks"),
        (Faults(), MAX_WORLD + 1, "cannot have"),
        (Faults(delay_s=-0.1), 2, "delay_s is -0.1"),
        (Faults(delay_s=float("inf")), 2, "delay_s is inf"),
        (Faults(delays={(0, 1): float("nan")}), 2, r"delays\[0, 1\] is nan"),
        (Faults(delays={(0, 2): 0.1}), 2, "delays names rank 2, but the world has 2 ranks"),
        (Faults(delays={(-1, 0): 0.1}), 2, "delays names rank -1"),
        (Faults(delays={(1, 1): 0.1}), 2, "rank 1 as sender and receiver"),
        (Faults(kills={2: 1}), 2, "kills names rank 2"),
        (Faults(kills={1: 0}), 2, "rank 1 cannot die before operation 0"),
    ],
)
def test_impossible_faults_are_refused(faults: Faults, world: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_faults(faults, world)
