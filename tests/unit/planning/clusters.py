"""Clusters for tests: random ones, and small ones that are easy to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from barnraise.planning import (
    ModelSize,
    NetworkPath,
    PlanCluster,
    PlannedMachine,
    StepTimes,
    build_cluster,
    symmetric_link,
)

MODEL = ModelSize(parameters=100_000_000)
PROFILE = StepTimes(batch=256, unit=8)


def mesh(
    speeds: Sequence[float],
    mbps: float | Callable[[int, int], float] = 940.0,
    latency_s: float = 0.0002,
    site: str = "",
) -> PlanCluster:
    """Return machines m0, m1, ... linked with each other."""
    members = [
        PlannedMachine(name=f"m{number:02}", samples_per_s=speed, site=site)
        for number, speed in enumerate(speeds)
    ]
    paths: list[NetworkPath] = []
    for a in range(len(members)):
        for b in range(a + 1, len(members)):
            rate = mbps(a, b) if callable(mbps) else mbps
            paths += symmetric_link(members[a].name, members[b].name, rate, latency_s)
    return build_cluster(members, paths)


rates = st.floats(5.0, 10_000.0)
latencies = st.floats(0.0, 0.05)


@st.composite
def clusters(draw: st.DrawFn, max_machines: int = 4, site: str = "") -> PlanCluster:
    """Draw a cluster with directed paths of any rate, a few of them missing."""
    count = draw(st.integers(1, max_machines))
    members = [
        PlannedMachine(name=f"m{number}", samples_per_s=draw(st.floats(1.0, 200.0)), site=site)
        for number in range(count)
    ]
    paths = []
    for a in members:
        for b in members:
            if a is not b and draw(st.integers(0, 9)):
                path = NetworkPath(source=a.name, target=b.name, mbps=draw(rates), latency_s=draw(latencies))
                paths.append(path)
    return build_cluster(members, paths)


models = st.builds(ModelSize, parameters=st.integers(1_000, 2_000_000_000))
profiles = st.builds(
    StepTimes,
    batch=st.integers(1, 512),
    unit=st.integers(0, 64),
    travels=st.sampled_from(["last_unit", "step"]),
    overhead_s=st.sampled_from([0.0, 0.002]),
)
