"""The choice of cores that workers may use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent.supervisor.messages import QUIET, WorkerLimits
from barnraise.agent.supervisor.resource_limits import chosen_cpus


@given(st.frozensets(st.integers(0, 63), min_size=1), st.none() | st.integers(1, 80), st.integers(0, 80))
def test_chosen_cpus_leave_at_least_one_core(available: frozenset[int], cpus: int | None, spare: int) -> None:
    chosen = chosen_cpus(available, WorkerLimits(cpus=cpus, spare_cpus=spare))
    if chosen is None:
        assert spare == 0 or len(available) == 1
        assert cpus is None or cpus >= len(available) or len(available) == 1
    else:
        assert 1 <= len(chosen) < len(available)
        assert chosen < available
        assert len(chosen) == max(1, min(cpus or 99, len(available) - spare))


def test_chosen_cpus_quiet_spares_one_core() -> None:
    assert chosen_cpus(frozenset(range(8)), QUIET) == frozenset(range(1, 8))
