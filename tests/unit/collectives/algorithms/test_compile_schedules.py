"""Every operation, algorithm, world and root: right sums in any message order, and the promised traffic."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from functools import cache, reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.collectives.algorithms.compile import (
    ALGORITHMS,
    algorithms_for,
    compile_schedule,
    resolve_algorithm,
)
from barnraise.collectives.algorithms.schedule import (
    EMPTY,
    SHAPES,
    BufferLayout,
    OperationKind,
    Schedule,
    StageShapes,
    block_bounds,
)
from barnraise.core.errors import ConfigError, UnsupportedOperation
from tests.unit.collectives.schedule_simulator import Causes, Simulation, matched, prove_free_of_races

WORLDS = range(1, 10)
ITEM = 2
SEGMENT = 12
ROOTED = (OperationKind.REDUCE, OperationKind.BROADCAST, OperationKind.GATHER, OperationKind.SCATTER)
WHOLE = (OperationKind.ALL_REDUCE, OperationKind.REDUCE, OperationKind.BROADCAST)
BY_BLOCK = (
    OperationKind.ALL_GATHER,
    OperationKind.REDUCE_SCATTER,
    OperationKind.GATHER,
    OperationKind.SCATTER,
)
PAIRS = [(kind, name) for kind, names in ALGORITHMS.items() for name in names]


def cell(rank: int, position: int) -> int:
    """Each rank adds into its own digits, so a sum shows how often each rank's byte went in."""
    return (position + 1) << (16 * rank)


def traced(rank: int, position: int) -> str:
    return f"{rank}.{position}"


def pair_up(first: str, second: str) -> str:
    return f"({first}+{second})"


def uneven_sizes(world: int, seed: int) -> tuple[int, ...]:
    """Block sizes with an empty block, one item, and blocks of several segments."""
    return tuple(ITEM * ((seed + 5 * rank * rank + 3 * rank) % 17) for rank in range(world))


def split_table(world: int, seed: int) -> list[tuple[int, ...]]:
    """Return the bytes that each rank sends to each other rank."""
    return [tuple(ITEM * ((seed + 7 * a + 3 * b + a * b) % 11) for b in range(world)) for a in range(world)]


@cache
def compiled(
    kind: OperationKind,
    name: str,
    world: int,
    sizes: tuple[int, ...],
    root: int = 0,
    order: tuple[int, ...] = (),
    arity: int = 2,
) -> tuple[Schedule, ...]:
    layout = BufferLayout(sizes, ITEM, root, SEGMENT, arity, order)
    return tuple(compile_schedule(kind, name, rank, world, layout) for rank in range(world))


def compiled_all_to_all(world: int, table: Sequence[tuple[int, ...]]) -> tuple[Schedule, ...]:
    columns = [tuple(table[a][b] for a in range(world)) for b in range(world)]
    return tuple(
        compile_schedule(
            "all_to_all", "direct", rank, world, BufferLayout(table[rank] + columns[rank], ITEM, 0, SEGMENT)
        )
        for rank in range(world)
    )


def expect_same(
    kind: OperationKind, sizes: tuple[int, ...], root: int, before: list[list[Any]], after: list[list[Any]]
) -> None:
    """Compare with the direct sum (digits do not depend on its order)."""
    world = len(before)
    bounds = block_bounds(sizes)
    for rank in range(world):
        lo, hi = bounds[rank : rank + 2] if kind in BY_BLOCK else (0, sizes[0])
        if kind is OperationKind.ALL_REDUCE or (kind is OperationKind.REDUCE and rank == root):
            assert after[rank] == [sum(cells) for cells in zip(*before, strict=True)]
        elif kind is OperationKind.BROADCAST:
            assert after[rank] == before[root]
        elif kind is OperationKind.REDUCE_SCATTER:
            assert after[rank][lo:hi] == [sum(memory[at] for memory in before) for at in range(lo, hi)]
        elif kind is OperationKind.ALL_GATHER:
            assert after[rank] == [
                before[a][at] for a in range(world) for at in range(bounds[a], bounds[a + 1])
            ]
        elif kind is OperationKind.GATHER and rank == root:
            for a in range(world):
                expected = before[a][lo:hi] if a == root else before[a]
                assert after[rank][bounds[a] : bounds[a + 1]] == expected
        elif kind is OperationKind.SCATTER and rank != root:
            assert after[rank] == before[root][lo:hi]
        elif kind is OperationKind.SCATTER:
            assert after[rank] == before[root]


def memory_sizes(kind: OperationKind, sizes: tuple[int, ...], world: int, root: int) -> list[int]:
    if kind in (OperationKind.GATHER, OperationKind.SCATTER):
        return [sum(sizes) if rank == root else sizes[rank] for rank in range(world)]
    return [sum(sizes)] * world


def shapes(kind: OperationKind, world: int) -> list[tuple[int, ...]]:
    if kind is OperationKind.BARRIER:
        return [()]
    if kind in WHOLE:
        return [(ITEM * items,) for items in (0, 1, 13, 48)]
    return [(ITEM * 5,) * world, uneven_sizes(world, 1), uneven_sizes(world, 9), (0,) * world]


def roots(kind: OperationKind, world: int) -> list[int]:
    """Every root in small worlds, the corners in larger ones."""
    if kind not in ROOTED:
        return [0]
    return list(range(world)) if world < 6 else [0, world // 2, world - 1]


def bytes_sent(schedule: Schedule) -> int:
    return sum(send.hi - send.lo for send in schedule.sends)


def bytes_received(schedule: Schedule) -> int:
    return sum(receive.hi - receive.lo for receive in schedule.receives)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [pair for pair in PAIRS if pair[0] not in (OperationKind.ALL_TO_ALL, OperationKind.BARRIER)],
)
def test_results_are_right_in_every_message_order(kind: OperationKind, name: str, world: int) -> None:
    for sizes in shapes(kind, world):
        for root in roots(kind, world):
            schedules = compiled(kind, name, world, sizes, root)
            prove_free_of_races(schedules)
            lengths = memory_sizes(kind, sizes, world, root)
            before = [[cell(rank, at) for at in range(length)] for rank, length in enumerate(lengths)]
            for seed in range(2 if world < 6 else 1):
                after = Simulation(schedules, before, operator.add, seed).run()
                expect_same(kind, sizes, root, before, after)
            after = Simulation(schedules, before, operator.add, 0, strict=True).run()
            expect_same(kind, sizes, root, before, after)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", algorithms_for("all_reduce"))
def test_sum_order_is_equal_on_all_ranks_and_runs(name: str, world: int) -> None:
    schedules = compiled(OperationKind.ALL_REDUCE, name, world, (ITEM * 13,))
    before = [[traced(rank, at) for at in range(ITEM * 13)] for rank in range(world)]
    runs = [Simulation(schedules, before, pair_up, seed).run() for seed in range(3)]
    assert all(memory == runs[0][0] for run in runs for memory in run)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("kind", "name"), [p for p in PAIRS if p[0] in (OperationKind.REDUCE_SCATTER, OperationKind.REDUCE)]
)
def test_reductions_have_one_order(kind: OperationKind, name: str, world: int) -> None:
    sizes = (ITEM * 7,) * world if kind is OperationKind.REDUCE_SCATTER else (ITEM * 13,)
    schedules = compiled(kind, name, world, sizes)
    before = [[traced(rank, at) for at in range(sum(sizes))] for rank in range(world)]
    runs = [Simulation(schedules, before, pair_up, seed).run() for seed in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_with_even_and_uneven_splits(world: int) -> None:
    for table in (split_table(world, 1), split_table(world, 4), [(ITEM * 3,) * world] * world):
        schedules = compiled_all_to_all(world, table)
        prove_free_of_races(schedules)
        received = [sum(table[a][rank] for a in range(world)) for rank in range(world)]
        before = [
            [cell(rank, at) for at in range(sum(table[rank]))] + [0] * received[rank] for rank in range(world)
        ]
        after = Simulation(schedules, before, operator.add, world).run()
        assert after == Simulation(schedules, before, operator.add, 0, strict=True).run()
        for rank in range(world):
            wanted: list[int] = []
            for a in range(world):
                lo = sum(table[a][:rank])
                part = before[a][lo : lo + table[a][rank]]
                wanted += part if a != rank else [0] * len(part)
            assert after[rank][sum(table[rank]) :] == wanted
            assert after[rank][: sum(table[rank])] == before[rank][: sum(table[rank])]


@pytest.mark.parametrize("world", [*range(1, 18), 31, 32, 33, 64])
def test_barrier_completes_after_all_ranks_entered(world: int) -> None:
    schedules = compiled(OperationKind.BARRIER, "doubling", world, ())
    rounds = (world - 1).bit_length()
    assert all(len(schedule.sends) == len(schedule.receives) == rounds for schedule in schedules)
    before = Causes(schedules).before
    for rank, schedule in enumerate(schedules):
        heard = [("apply", rank, number) for number in range(len(schedule.receives))]
        for other in set(range(world)) - {rank}:
            reads = [("read", other, number) for number in range(rounds)]
            assert any(before(read, event) for read in reads for event in heard)
    Simulation(schedules, [[] for _ in schedules], operator.add, 3).run()


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_messages_fit_their_segment_and_hold_whole_items(kind: OperationKind, name: str) -> None:
    for world in (2, 3, 8):
        for sizes in [(ITEM * 500,)] if kind in WHOLE else shapes(kind, world):
            if kind is OperationKind.ALL_TO_ALL:
                schedules = compiled_all_to_all(world, split_table(world, 2))
            else:
                schedules = compiled(kind, name, world, sizes)
            for schedule in schedules:
                chunk_ranges = [(m.lo, m.hi) for m in schedule.sends] + [
                    (m.lo, m.hi) for m in schedule.receives
                ]
                for lo, hi in chunk_ranges:
                    assert lo % ITEM == 0
                    assert hi % ITEM == 0
                    assert hi - lo <= SEGMENT
                    assert hi > lo or kind is OperationKind.BARRIER


@pytest.mark.parametrize("name", algorithms_for("reduce_scatter"))
@pytest.mark.parametrize("world", range(2, 10))
def test_reduce_scatter_sends_only_the_blocks_of_others(name: str, world: int) -> None:
    for sizes in shapes(OperationKind.REDUCE_SCATTER, world):
        for rank, schedule in enumerate(compiled(OperationKind.REDUCE_SCATTER, name, world, sizes)):
            assert bytes_sent(schedule) == sum(sizes) - sizes[rank]


@pytest.mark.parametrize("name", algorithms_for("all_gather"))
@pytest.mark.parametrize("world", range(2, 10))
def test_all_gather_receives_each_foreign_block_once(name: str, world: int) -> None:
    for sizes in shapes(OperationKind.ALL_GATHER, world):
        for rank, schedule in enumerate(compiled(OperationKind.ALL_GATHER, name, world, sizes)):
            assert bytes_received(schedule) == sum(sizes) - sizes[rank]


@pytest.mark.parametrize("name", ["ring", "doubling", "direct"])
@pytest.mark.parametrize("world", range(2, 10))
def test_bandwidth_optimal_all_reduces_send_twice_the_buffer_less_a_share(name: str, world: int) -> None:
    nbytes = ITEM * 60 * world
    for schedule in compiled(OperationKind.ALL_REDUCE, name, world, (nbytes,)):
        assert bytes_sent(schedule) == bytes_received(schedule) == 2 * (world - 1) * nbytes // world


@pytest.mark.parametrize(
    ("name", "hops"), [("exchange", 3), ("doubling", 6), ("direct", 2), ("star", 2), ("ring", 14)]
)
def test_steps_of_a_small_all_reduce_on_eight_ranks(name: str, hops: int) -> None:
    assert longest_chain(compiled(OperationKind.ALL_REDUCE, name, 8, (ITEM * 8,))) == hops


def longest_chain(schedules: Sequence[Schedule]) -> int:
    pairs = matched(schedules)

    @cache
    def arrived(rank: int, receive: int) -> int:
        sender, number = pairs[rank, receive]
        causing = [arrived(sender, other) for other in schedules[sender].sends[number].after]
        return max(
            [
                1 + max(causing, default=0),
                *(arrived(rank, r) for r in schedules[rank].receives[receive].after),
            ]
        )

    return max(
        arrived(rank, n) for rank, schedule in enumerate(schedules) for n in range(len(schedule.receives))
    )


def test_ring_segment_waits_only_for_itself() -> None:
    for schedule in compiled(OperationKind.ALL_REDUCE, "ring", 4, (ITEM * 400,)):
        assert all(len(send.after) <= 1 for send in schedule.sends)
        for send in schedule.sends:
            for receive in send.after:
                assert (send.lo, send.hi) == (schedule.receives[receive].lo, schedule.receives[receive].hi)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rings_work_in_any_order(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 7))
    order = tuple(data.draw(st.permutations(range(world))))
    root = data.draw(st.integers(0, world - 1))
    kind = data.draw(st.sampled_from([kind for kind, names in ALGORITHMS.items() if "ring" in names]))
    sizes: tuple[int, ...] = (ITEM * data.draw(st.integers(0, 40)),)
    if kind in BY_BLOCK:
        sizes = tuple(
            ITEM * items for items in data.draw(st.lists(st.integers(0, 9), min_size=world, max_size=world))
        )
    schedules = compiled(kind, "ring", world, sizes, root, order)
    prove_free_of_races(schedules)
    before = [[cell(rank, at) for at in range(sum(sizes))] for rank in range(world)]
    expect_same(kind, sizes, root, before, Simulation(schedules, before, operator.add, 1).run())
    following = {rank: order[(order.index(rank) + 1) % world] for rank in range(world)}
    if kind not in ROOTED:
        assert all(send.peer == following[rank] for rank, p in enumerate(schedules) for send in p.sends)


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 12),
    items=st.integers(0, 90),
    item=st.sampled_from([1, 2, 4, 8, 16]),
    segment=st.integers(16, 200),
    arity=st.integers(2, 5),
    name=st.sampled_from(algorithms_for("all_reduce")),
    seed=st.integers(0, 1 << 30),
    shapes=st.builds(StageShapes, *[st.sampled_from(SHAPES)] * 3),
)
def test_all_reduce_on_random_shapes(
    world: int, items: int, item: int, segment: int, arity: int, name: str, seed: int, shapes: StageShapes
) -> None:
    sites = _random_sites(world, seed)
    layout = BufferLayout((items * item,), item, 0, segment, arity, sites=sites, shapes=shapes)
    schedules = [compile_schedule("all_reduce", name, rank, world, layout) for rank in range(world)]
    prove_free_of_races(schedules)
    before = [[cell(rank, at) for at in range(items * item)] for rank in range(world)]
    after = Simulation(schedules, before, operator.add, seed).run()
    assert all(
        memory == [reduce(operator.add, cells) for cells in zip(*before, strict=True)] for memory in after
    )


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([OperationKind.REDUCE, OperationKind.BROADCAST]),
    world=st.integers(1, 12),
    items=st.integers(0, 90),
    root=st.integers(0, 11),
    arity=st.integers(2, 5),
    seed=st.integers(0, 1 << 30),
    shapes=st.builds(StageShapes, *[st.sampled_from(SHAPES)] * 3),
)
def test_rooted_operations_through_random_sites(
    kind: OperationKind, world: int, items: int, root: int, arity: int, seed: int, shapes: StageShapes
) -> None:
    """Each site but that of the root is entered or left once, with shapes of any kind."""
    root, sites = root % world, _random_sites(world, seed)
    sizes = (items * ITEM,)
    layout = BufferLayout(sizes, ITEM, root, SEGMENT, arity, sites=sites, shapes=shapes)
    schedules = [compile_schedule(kind, "sites", rank, world, layout) for rank in range(world)]
    prove_free_of_races(schedules)
    before = [[cell(rank, at) for at in range(items * ITEM)] for rank in range(world)]
    expect_same(kind, sizes, root, before, Simulation(schedules, before, operator.add, seed).run())
    places = {rank: place for place, site in enumerate(sites) for rank in site}
    crossing = sum(
        send.hi - send.lo
        for rank, schedule in enumerate(schedules)
        for send in schedule.sends
        if places[send.peer] != places[rank]
    )
    assert crossing == (len(sites) - 1) * items * ITEM


@settings(max_examples=60, deadline=None)
@given(world=st.integers(1, 20), seed=st.integers(0, 1 << 30))
def test_barrier_through_sites_completes_after_all_ranks_entered(world: int, seed: int) -> None:
    sites = _random_sites(world, seed)
    layout = BufferLayout(sites=sites)
    schedules = [compile_schedule("barrier", "sites", rank, world, layout) for rank in range(world)]
    before = Causes(schedules).before
    for rank, schedule in enumerate(schedules):
        heard = [("apply", rank, number) for number in range(len(schedule.receives))]
        for other in set(range(world)) - {rank}:
            reads = [("read", other, number) for number in range(len(schedules[other].sends))]
            assert any(before(read, event) for read in reads for event in heard)
    Simulation(schedules, [[] for _ in schedules], operator.add, seed).run()
    leaders = {site[0] for site in sites}
    places = {rank: place for place, site in enumerate(sites) for rank in site}
    for rank, schedule in enumerate(schedules):
        crossing = [send.peer for send in schedule.sends if places[send.peer] != places[rank]]
        assert not crossing or (rank in leaders and set(crossing) <= leaders)


def _random_sites(world: int, seed: int) -> tuple[tuple[int, ...], ...]:
    chance = random.Random(seed)
    ranks = chance.sample(range(world), world)
    cuts = sorted(chance.sample(range(1, world), chance.randint(0, world - 1)))
    return tuple(tuple(ranks[lo:hi]) for lo, hi in pairwise([0, *cuts, world]))


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_traffic_between_sites_is_independent_of_site_size(hosts: int) -> None:
    size = 4 * 3 * 1000
    sites = tuple(tuple(range(site * hosts, (site + 1) * hosts)) for site in range(3))
    layout = BufferLayout((size,), 4, 0, 256, sites=sites)
    schedules = [
        compile_schedule("all_reduce", "sites", rank, 3 * hosts, layout) for rank in range(3 * hosts)
    ]
    crossing = [
        sum(send.hi - send.lo for send in schedule.sends if send.peer // hosts != rank // hosts)
        for rank, schedule in enumerate(schedules)
    ]
    assert [crossing[site[0]] for site in sites] == [2 * 2 * size // 3] * 3
    assert sum(crossing) == 3 * 2 * 2 * size // 3


def test_single_rank_sends_nothing() -> None:
    for kind, name in PAIRS:
        sizes = {OperationKind.BARRIER: (), OperationKind.ALL_TO_ALL: (8, 8)}.get(kind, (8,))
        assert compile_schedule(kind, name, 0, 1, BufferLayout(sizes)) is EMPTY


def test_schedules_are_compiled_once() -> None:
    layout = BufferLayout((1 << 20,), 4)
    assert compile_schedule("all_reduce", "ring", 1, 4, layout) is compile_schedule(
        "all_reduce", "ring", 1, 4, layout
    )
    assert compile_schedule("all_reduce", "ring", 1, 4, layout) is compile_schedule(
        OperationKind.ALL_REDUCE, "ring", 1, 4, layout
    )


def test_resolve_algorithm_lists_valid_names_on_error() -> None:
    for name in ("star", "centralised", "centralized"):
        assert resolve_algorithm("all_reduce", name) == "star"
    assert resolve_algorithm("broadcast", "direct") == "star"
    with pytest.raises(ConfigError, match="unknown algorithm 'spiral'") as unknown:
        resolve_algorithm("all_reduce", "spiral")
    assert "ring, tree, doubling" in unknown.value.hint
    with pytest.raises(UnsupportedOperation, match="all_gather has no algorithm 'tree'") as missing:
        resolve_algorithm("all_gather", "tree")
    assert "ring, doubling, direct" in missing.value.hint
    with pytest.raises(UnsupportedOperation, match="unknown operation 'all_add'"):
        algorithms_for("all_add")


@pytest.mark.parametrize(
    ("kind", "rank", "world", "layout"),
    [
        ("all_reduce", 4, 4, BufferLayout((8,))),
        ("all_reduce", 0, 0, BufferLayout((8,))),
        ("all_reduce", 0, 2, BufferLayout((7,), item=4)),
        ("all_reduce", 0, 2, BufferLayout((-4,), item=4)),
        ("all_reduce", 0, 2, BufferLayout((8, 8))),
        ("reduce", 0, 2, BufferLayout((8,), root=2)),
        ("all_gather", 0, 3, BufferLayout((8, 8))),
        ("all_to_all", 0, 3, BufferLayout((8, 8, 8))),
        ("barrier", 0, 3, BufferLayout((8,))),
        ("all_reduce", 0, 3, BufferLayout((8,), order=(0, 1, 1))),
        ("all_reduce", 0, 3, BufferLayout((8,), segment=(1 << 20) + 1)),
        ("all_reduce", 0, 3, BufferLayout((16,), item=16, segment=8)),
    ],
)
def test_invalid_layouts_are_rejected(kind: str, rank: int, world: int, layout: BufferLayout) -> None:
    with pytest.raises(ConfigError):
        compile_schedule(kind, algorithms_for(kind)[0], rank, world, layout)


def test_tree_arity_below_two_is_rejected() -> None:
    with pytest.raises(ConfigError, match="arity 1"):
        compile_schedule("all_reduce", "tree", 0, 4, BufferLayout((8,), arity=1))
