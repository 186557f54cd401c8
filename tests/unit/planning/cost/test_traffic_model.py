"""Ring orders, splits of work, and the arithmetic of links."""

from __future__ import annotations

import random
from itertools import permutations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import (
    Calibration,
    ModelSize,
    NetworkPath,
    PlannedMachine,
    build_cluster,
    symmetric_link,
)
from barnraise.planning.cost.link_matrix import LinkMatrix, find_sites
from barnraise.planning.cost.rings import MAX_EXACT, RingTable, ring_order
from barnraise.planning.cost.traffic_model import Route, flows, ring_hop_s, round_seconds, seconds
from barnraise.planning.cost.work_split import split_by_speed, split_samples
from barnraise.planning.inputs.codecs import PlanPayload, exact_codec, payload
from barnraise.runs.sharding import DataOrder, assign_micro_batches
from tests.unit.planning.clusters import clusters, mesh

MB = 1e6


def _costs(numbers: random.Random, count: int, tables: int = 1) -> numpy.ndarray:
    costs = numpy.array([numbers.choice([1, 2, 3, 5, 8, 13, 99.0]) for _ in range(tables * count * count)])
    return costs.reshape(tables, count, count)


def _slowest(costs: numpy.ndarray, order: tuple[int, ...]) -> float:
    return max(float(costs[order[place - 1], machine]) for place, machine in enumerate(order))


@pytest.mark.parametrize("seed", range(6))
def test_ring_of_few_machines_is_optimal(seed: int) -> None:
    numbers = random.Random(seed)
    costs = _costs(numbers, 7)[0]
    best = min(_slowest(costs, (0, *rest)) for rest in permutations(range(1, 7)))
    order = ring_order(costs)
    assert sorted(order) == list(range(7))
    assert order[0] == 0
    assert _slowest(costs, order) == best


def test_rings_of_all_subsets_are_optimal_for_each_table() -> None:
    costs = _costs(random.Random(3), 5, tables=3)
    rings = RingTable(costs)
    for subset in range(1, 1 << 5):
        members = tuple(machine for machine in range(5) if subset >> machine & 1)
        if len(members) < 2:
            continue
        for table in range(3):
            best = min(_slowest(costs[table], (members[0], *rest)) for rest in permutations(members[1:]))
            order = rings.order(subset, table)
            assert set(order) == set(members)
            assert _slowest(costs[table], order) == best


def test_ring_of_many_machines_avoids_slow_paths() -> None:
    """Two sites of 16 with one slow path between any two machines of them: two are needed, no more."""
    count = 32
    costs = numpy.full((count, count), 1.0)
    costs[:16, 16:] = costs[16:, :16] = 50.0
    order = ring_order(costs)
    assert count > MAX_EXACT
    assert sorted(order) == list(range(count))
    assert sum(costs[order[place - 1], machine] == 50.0 for place, machine in enumerate(order)) == 2
    # A chain of fast paths hidden among slow ones is found by nearest neighbours and 2-opt.
    hidden = list(range(count))
    random.Random(1).shuffle(hidden)
    costs = numpy.full((count, count), 50.0)
    for place, machine in enumerate(hidden):
        costs[hidden[place - 1], machine] = costs[machine, hidden[place - 1]] = 1.0
    assert _slowest(costs, ring_order(costs)) == 1.0


def test_ring_time_is_that_of_its_slowest_hop() -> None:
    cluster = mesh([1, 1, 1, 1], lambda a, b: 100.0 if (a, b) == (0, 2) else 1000.0, latency_s=0.001)
    wires = LinkMatrix(cluster)
    size = PlanPayload(100 * MB)
    around = Route("ring", (0, 1, 2, 3))
    expected = 2 * 3 / 4 * 100 * MB / (1000e6 / 8) + 2 * 3 * 0.001
    assert seconds(around, wires, size, 0) == pytest.approx(expected)
    assert seconds(Route("ring", (0, 2, 1, 3)), wires, size, 0) > 5 * expected
    assert all(flow.size == pytest.approx(150 * MB) for flow in flows(around, size, 0))
    gathered = seconds(around, wires, PlanPayload(MB, gathers=True), 0)
    assert gathered == pytest.approx(3 * (MB / (1000e6 / 8) + 0.001))


def test_star_shares_its_root_port_and_tree_its_inner_ports() -> None:
    wires = LinkMatrix(mesh([1] * 7, 1000.0, latency_s=0.001))
    size = PlanPayload(125 * MB)
    assert seconds(Route("star", tuple(range(7))), wires, size, 0) == pytest.approx(6 + 2 * 0.001)
    # Two children and, of the inner ones, a parent: three times the bytes each way.
    assert seconds(Route("tree", tuple(range(7))), wires, size, 0) == pytest.approx(3 + 4 * 0.001)
    sent = flows(Route("star", tuple(range(7))), size, 0)
    assert sum(flow.size for flow in sent if flow.source == 0) == pytest.approx(6 * 125 * MB)


def test_sites_send_exact_gradients_to_their_leaders_and_the_codec_across_and_back() -> None:
    cluster = mesh([1] * 4, lambda a, b: 1000.0 if a // 2 == b // 2 else 100.0, latency_s=0.0)
    wires = LinkMatrix(cluster)
    route = Route("sites", (0, 2), ((0, 1), (2, 3)))
    across = PlanPayload(25 * MB)
    taken = seconds(route, wires, across, raw=100 * MB)
    assert taken == pytest.approx(0.8 + 25 * MB / (100e6 / 8) + 0.2)
    sent = {(flow.source, flow.target): flow.size for flow in flows(route, across, 100 * MB)}
    assert sent == {(1, 0): 100 * MB, (0, 1): 25 * MB, (3, 2): 100 * MB, (2, 3): 25 * MB} | {
        (0, 2): 25 * MB,
        (2, 0): 25 * MB,
    }
    # What a round changed is each machine's own, or the same on all machines of a site.
    assert round_seconds(route, wires, across, raw=100 * MB) == taken
    assert round_seconds(route, wires, across) == pytest.approx(taken - 0.8)
    exact = seconds(route, wires, PlanPayload(100 * MB), raw=100 * MB)
    assert exact == pytest.approx(0.8 + 100 * MB / (100e6 / 8) + 0.8)


def test_directions_and_ports_have_their_own_rates() -> None:
    members = [
        PlannedMachine(name="a", samples_per_s=1),
        PlannedMachine(name="b", samples_per_s=1, up_mbps=20, down_mbps=100),
    ]
    paths = [NetworkPath(source="a", target="b", mbps=900), NetworkPath(source="b", target="a", mbps=900)]
    wires = LinkMatrix(build_cluster(members, paths))
    assert wires.rate[0][1] == pytest.approx(100e6 / 8)
    assert wires.rate[1][0] == pytest.approx(20e6 / 8)
    assert seconds(Route("ring", (0, 1)), wires, PlanPayload(MB), 0) == pytest.approx(MB / (20e6 / 8))
    missing = LinkMatrix(build_cluster(members, paths[:1]))
    assert ring_hop_s((0, 1), missing, MB) == float("inf")
    assert seconds(Route("star", (0, 1)), missing, PlanPayload(MB), 0) == float("inf")


def test_default_factors_agree_with_measurements() -> None:
    """All-reduces of 32 MiB at 1 Gbit/s took 272 ms on two hosts and 426 ms on four: within ten percent."""
    factor = Calibration().factor("every_step")
    for hosts, measured in ((2, 0.2722), (4, 0.4257)):
        wires = LinkMatrix(mesh([1] * hosts, 1000.0, latency_s=0.0002))
        route = Route("ring", tuple(range(hosts)))
        predicted = factor * seconds(route, wires, PlanPayload(32 * 2**20), 0)
        assert predicted == pytest.approx(measured, rel=0.1)


def test_sites_are_found_by_a_step_of_rate_or_of_latency() -> None:
    by_rate = mesh([1] * 5, lambda a, b: 900.0 if (a < 3) == (b < 3) else 50.0)
    assert find_sites(by_rate, LinkMatrix(by_rate)) == ((0, 1, 2), (3, 4))
    far = [
        path
        for a in "abcd"
        for b in "abcd"
        if a < b
        for path in symmetric_link(a, b, 900.0, 0.0002 if (a < "c") == (b < "c") else 0.02)
    ]
    by_latency = build_cluster([PlannedMachine(name=name, samples_per_s=1) for name in "abcd"], far)
    assert find_sites(by_latency, LinkMatrix(by_latency)) == ((0, 1), (2, 3))
    alike = mesh([1] * 4, lambda a, b: 400.0 + 100 * a)
    assert find_sites(alike, LinkMatrix(alike)) == ((0, 1, 2, 3),)
    named = build_cluster(
        [
            PlannedMachine(name="a", samples_per_s=1, site="attic"),
            PlannedMachine(name="b", samples_per_s=1, site="barn"),
        ],
        symmetric_link("a", "b", 900.0),
    )
    assert find_sites(named, LinkMatrix(named)) == ((0,), (1,))


@settings(max_examples=50, deadline=None)
@given(clusters(max_machines=5), st.sampled_from([2.0, 64.0]))
def test_uniformly_faster_network_has_the_same_sites(cluster, factor: float) -> None:  # type: ignore[no-untyped-def]
    paths = [
        NetworkPath(source=path.source, target=path.target, mbps=path.mbps * factor, latency_s=path.latency_s)
        for path in cluster.paths
    ]
    faster = build_cluster(cluster.members, paths)
    assert find_sites(cluster, LinkMatrix(cluster)) == find_sites(faster, LinkMatrix(faster))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.lists(st.floats(0.1, 20.0), min_size=1, max_size=6))
def test_split_samples_agrees_with_the_assignment_of_sessions(
    batch: int, unit: int, speeds: list[float]
) -> None:
    """The planner may not import ``runs``; this test keeps both splits equal."""
    course = DataOrder(samples=batch, batch=batch, micro_batch_size=unit, seed=0)
    units = course.micro_batches(0)
    dealt = assign_micro_batches(units, {}, speeds)
    sizes = [sum(units[number].size for number in own_units) for own_units in dealt]
    shares = split_samples(batch, unit, speeds)
    assert sum(shares) == batch
    longest = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
    assert max(size / speed for size, speed in zip(shares, speeds, strict=True)) == pytest.approx(longest)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.floats(0.1, 20.0), min_size=1, max_size=3))
def test_split_by_speed_finishes_as_early_as_possible(pieces: int, speeds: list[float]) -> None:
    def deals(left: int, places: int) -> list[list[int]]:
        if places == 1:
            return [[left]]
        return [[first, *rest] for first in range(left + 1) for rest in deals(left - first, places - 1)]

    def done(counts: list[int]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    assert done(split_by_speed(pieces, speeds)) == pytest.approx(min(map(done, deals(pieces, len(speeds)))))


def test_payload_sizes_of_merged_sums() -> None:
    model = ModelSize(parameters=1000)
    assert payload(exact_codec(model.wire_bytes), 1000) == PlanPayload(4000.0)
    sparse = PlanPayload(10.0, gathers=True, largest=25.0)
    assert [sparse.merged(machines) for machines in (1, 2, 3)] == [10.0, 20.0, 25.0]
