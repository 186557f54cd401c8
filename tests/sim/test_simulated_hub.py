"""The simulator of hubs: its queues against formulas, its rounds against what must always hold."""

from __future__ import annotations

import pytest

from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.hub.hub import Closed, Costs, Server, Sizes
from benchmarks.simulation.hub.members import Region
from benchmarks.simulation.hub.queues import Journal, Line, Places, Processor
from benchmarks.simulation.hub.topologies import Crowd, World, doubled, herd, look, tree, warm_up
from benchmarks.simulation.network import Link, Network, Way

SIZES = Sizes(update=1_000_000, delta=1_000_000, words=5_000)
COSTS = Costs()
STEADY = Crowd(vanish=0.0)
RESTLESS = Crowd(vanish=0.2, away_s=100.0)


def made(leaves: int, *regions: int, costs: Costs = COSTS, crowd: Crowd = STEADY, seed: int = 1) -> World:
    return tree(leaves, regions, costs, Server(), SIZES, crowd, seed)


def test_hub_uploads_share_a_link_fairly() -> None:
    clock, ended = FakeClock(), []
    line = Line(clock, 80.0)  # ten megabytes a second
    for size in (1e6, 3e6, 6e6):
        line.carry(size, 1e6, lambda: ended.append(clock.now))
    clock.run(100.0)
    shared, arrivals = FakeClock(), []
    up, downs = Link("up", 80.0), [Link(f"down {number}", 1e6) for number in range(3)]
    network = Network(shared, lambda source, target: Way((up, downs[target]), 0.0))
    for target, size in enumerate((1e6, 3e6, 6e6)):
        network.send("test", 0, target, size, lambda: arrivals.append(shared.now))
    shared.run(100.0)
    assert max(ended) == pytest.approx(1.0)
    assert max(arrivals) == pytest.approx(1.0)
    assert line.carried == up.carried


def test_slow_link_of_a_member_delays_only_that_member() -> None:
    clock, ended = FakeClock(), {}
    line = Line(clock, 80.0)
    line.carry(1e6, 8.0, lambda: ended.setdefault("slow", clock.now))
    line.carry(1e6, 1e6, lambda: ended.setdefault("fast", clock.now))
    clock.run(100.0)
    assert ended == {"slow": pytest.approx(1.0), "fast": pytest.approx(0.2)}


def test_event_loop_is_serial_and_threads_use_the_other_core() -> None:
    clock, ended = FakeClock(), []
    cpu = Processor(clock, [0.0, 0.0])
    for _ in range(4):
        cpu.loop(1.0, lambda: ended.append(("loop", clock.now)))
        cpu.thread(1.0, lambda: ended.append(("thread", clock.now)))
    clock.run(100.0)
    assert max(when for _, when in ended) == pytest.approx(4.0)
    assert (cpu.loop_s, cpu.busy_s) == (4.0, 8.0)


def test_log_batches_waiting_writes_into_one_sync() -> None:
    clock, ended = FakeClock(), []
    journal = Journal(clock, 0.5)
    for _ in range(10):
        journal.write(lambda: ended.append(clock.now))
    clock.run(10.0)
    assert ended == [0.5] + [1.0] * 9
    places, entered = Places(clock, 2), []
    for number in range(3):
        places.enter(lambda number=number: entered.append(number))
    assert entered == [0, 1]
    places.leave()
    assert entered == [0, 1, 2]


def test_bytes_of_a_member_do_not_depend_on_their_number() -> None:
    few = look(made(10), 3).leaf_bytes
    assert few == pytest.approx(2_000_000, rel=0.05)
    for world in (made(200), made(200, 5), made(200, 3, 9)):
        assert look(world, 3).leaf_bytes == pytest.approx(few, rel=0.05)


@pytest.mark.parametrize("regions", [(), (6,), (3, 9)], ids=["flat", "two levels", "three levels"])
@pytest.mark.parametrize("seed", [1, 2])
def test_samples_count_once_after_any_loss(regions: tuple[int, ...], seed: int) -> None:
    world = made(90, *regions, crowd=RESTLESS, seed=seed)
    figures = look(world, 6)
    assert figures.rounds == 6
    assert figures.vanished > 20
    root = world.root
    assert doubled(root) == 0
    counted = sum(part.samples for part in root.parts)
    assert counted == sum(span.size for part in root.parts for span in part.spans) == root.tally.samples
    state = root.state
    held = [*state.lent.values(), *state.waiting.values(), *state.closing]
    free = sum(span.size for span in state.pool.returned)
    assert counted + free + sum(entry.samples for entry in held) == state.pool.cursor


def test_regions_count_what_their_parents_count() -> None:
    world = made(120, 6)
    look(world, 4)
    regions = [node for node in world.levels[1] if isinstance(node, Region)]
    below = sum(part.samples for region in regions for part in region.parts)
    above = sum(part.samples for part in world.root.parts)
    last = world.root.tally.rounds[-1].samples
    assert below in (above, above - last), "regions learn of the last version later"
    assert last > 0


def test_hub_loop_bounds_a_tree_and_more_regions_help() -> None:
    slow = Costs(push_s=1.0)
    flat = look(made(120, costs=slow), 3)
    assert flat.loads[0].loop <= 1.0
    assert flat.counted / flat.seconds <= 1.0 / slow.push_s
    two = look(made(120, 6, costs=slow), 3)
    assert two.utilisation > 1.3 * flat.utilisation
    assert two.counted / two.seconds <= 6 / slow.push_s


def test_slow_leaves_fill_the_places_for_bodies() -> None:
    """Sixteen at once, each for as long as its own line takes."""
    crowd = Crowd(vanish=0.0, up_mbps=(1.0, 1.0))  # eight seconds for an update
    figures = look(made(200, crowd=crowd), 2)
    assert figures.loads[0].fullest()[0] == "places for bodies"
    assert figures.counted / figures.seconds <= 16 / 8.0


def test_regions_of_a_new_run_are_full_after_some_rounds() -> None:
    assert warm_up(20, (), COSTS, SIZES) <= 4
    assert 3 <= warm_up(200, (2,), COSTS, SIZES) <= 11


def test_members_come_back_to_a_hub_that_was_away() -> None:
    few, tries = herd(50, 0.004, 5.0)
    assert tries == 1.0
    assert few < 15.0
    seconds, tries = herd(5000, 0.004, 5.0)
    assert seconds >= 5000 * 0.004
    assert tries > 1.0, "members that waited too long retried"


def test_equal_seeds_give_equal_rounds() -> None:
    def once() -> list[Closed]:
        world = made(60, 4, crowd=RESTLESS, seed=5)
        look(world, 4)
        return world.root.tally.rounds

    assert once() == once()
