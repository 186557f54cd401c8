"""The choice is the same on every rank, sane at the extremes, and says why."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.collectives.algorithms.compile import ALGORITHMS, algorithms_for, compile_schedule
from barnraise.collectives.algorithms.cost_model import (
    TIE,
    AlgorithmChoice,
    CostTable,
    choose,
    merge_tables,
    predict,
    segment_bytes,
)
from barnraise.collectives.algorithms.schedule import MAX_SEGMENT_BYTES, BufferLayout, OperationKind
from barnraise.core.errors import ConfigError, UnsupportedOperation

LAN = CostTable.default()
PAIRS = [(kind, name) for kind, names in ALGORITHMS.items() for name in names]
KIB, MIB = 1 << 10, 1 << 20

tables = st.builds(
    CostTable,
    latency_s=st.floats(1e-6, 0.3),
    seconds_per_byte=st.floats(1e-11, 2e-6),
    reduce_seconds_per_byte=st.floats(0, 1e-8),
    copy_seconds_per_byte=st.floats(0, 1e-8),
    message_s=st.floats(0, 1e-3),
)


@settings(max_examples=80, deadline=None)
@given(
    table=tables,
    pair=st.sampled_from(PAIRS),
    nbytes=st.integers(0, 1 << 34),
    world=st.integers(1, 200),
    arity=st.integers(2, 8),
)
def test_predictions_are_finite_and_grow_with_size_and_latency(
    table: CostTable, pair: tuple[OperationKind, str], nbytes: int, world: int, arity: int
) -> None:
    kind, name = pair
    segment = 64 * KIB
    seconds = predict(kind, name, nbytes, world, table, arity, segment)
    assert math.isfinite(seconds)
    assert seconds >= 0
    assert predict(kind, name, 2 * nbytes, world, table, arity, segment) >= seconds * 0.999
    slower = msgspec.structs.replace(table, latency_s=2 * table.latency_s)
    assert predict(kind, name, nbytes, world, slower, arity, segment) >= seconds
    narrower = msgspec.structs.replace(table, seconds_per_byte=2 * table.seconds_per_byte)
    assert predict(kind, name, nbytes, world, narrower, arity, segment) >= seconds


@settings(max_examples=60, deadline=None)
@given(
    table=tables,
    kind=st.sampled_from(list(OperationKind)),
    nbytes=st.integers(0, 1 << 32),
    world=st.integers(1, 128),
)
def test_auto_chooses_fastest_predicted_algorithm(
    table: CostTable, kind: OperationKind, nbytes: int, world: int
) -> None:
    choice = choose(kind, nbytes, world, table)
    times = [
        predict(kind, name, nbytes, world, table, 2, segment_bytes(kind, name, nbytes, world, table))
        for name in algorithms_for(kind)
    ]
    assert choice.seconds <= min(times) * TIE
    assert choice.algorithm in algorithms_for(kind)
    assert choice.reason.startswith(f"{choice.algorithm}: ")
    assert choice.reason.endswith(".")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(tables, min_size=1, max_size=8),
    seed=st.integers(0, 1 << 20),
    nbytes=st.integers(0, 1 << 30),
    world=st.integers(1, 64),
)
def test_merge_tables_is_independent_of_order(
    rows: list[CostTable], seed: int, nbytes: int, world: int
) -> None:
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    merged, merged_shuffled = merge_tables(rows), merge_tables(iter(shuffled))
    assert merged == merged_shuffled
    assert merge_tables([merged, *rows]) == merged
    over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(merged), type=CostTable)
    assert choose("all_reduce", nbytes, world, merged) == choose("all_reduce", nbytes, world, over_the_wire)


def test_merge_tables_keeps_largest_costs() -> None:
    merged = merge_tables([CostTable.measured(0.1, 1e-9), CostTable.measured(0.001, 5e-8)])
    assert (merged.latency_s, merged.seconds_per_byte) == (0.1, 5e-8)
    assert merge_tables([]) == CostTable.default()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e6])
def test_cost_table_with_invalid_costs_is_rejected(value: float) -> None:
    encoded = msgspec.msgpack.encode({"latency_s": value})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=CostTable)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_cost_table_with_infinite_cost_is_rejected(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        CostTable.measured(value, 1e-9)


@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_small_messages_use_algorithm_with_few_steps(world: int) -> None:
    assert choose("all_reduce", 1 * KIB, world, LAN).algorithm == "exchange"


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 16])
def test_large_messages_use_the_ring(world: int) -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast"):
        assert choose(kind, 64 * MIB, world, LAN).algorithm == "ring"


@pytest.mark.parametrize("world", range(3, 33))
def test_large_sums_never_use_the_star(world: int) -> None:
    for table in (LAN, CostTable.measured(0.02, 4e-7), CostTable.measured(4e-5, 6e-10)):
        assert choose("all_reduce", 16 * MIB, world, table).algorithm in ("ring", "doubling", "direct")


def test_ring_stays_best_for_larger_messages() -> None:
    for world in (2, 3, 4, 8):
        names = [choose("all_reduce", 1 << power, world, LAN).algorithm for power in range(10, 31)]
        assert names[names.index("ring") :] == ["ring"] * (21 - names.index("ring"))


def test_single_rank_costs_nothing() -> None:
    for kind in OperationKind:
        choice = choose(kind, 5 * MIB, 1, LAN)
        assert choice.seconds == 0.0
        sizes = {OperationKind.BARRIER: (), OperationKind.ALL_TO_ALL: (8, 8)}.get(kind, (8,))
        assert compile_schedule(
            kind, choice.algorithm, 0, 1, BufferLayout(sizes, segment=choice.segment)
        ).empty


@pytest.mark.parametrize(
    ("nbytes", "world", "algorithm"),
    [(MIB - 1, 8, "tree"), (MIB, 8, "ring"), (64 * MIB, 3, "tree"), (64 * MIB, 4, "ring"), (0, 1, "tree")],
)
def test_plain_setting_chooses_tree_or_ring(nbytes: int, world: int, algorithm: str) -> None:
    assert choose("all_reduce", nbytes, world, LAN, "plain").algorithm == algorithm
    assert choose("broadcast", nbytes, world, LAN, "plain").algorithm == algorithm


def test_plain_setting_has_threshold_for_every_operation() -> None:
    assert choose("all_reduce", 2 * MIB, 8, LAN, "plain", plain_below=4 * MIB).algorithm == "tree"
    for kind in OperationKind:
        assert choose(kind, 1 * KIB, 8, LAN, "plain").algorithm in algorithms_for(kind)
    assert choose("all_gather", 1 * KIB, 8, LAN, "plain").algorithm == "ring"


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_algorithm_set_by_name_is_chosen(kind: OperationKind, name: str) -> None:
    choice = choose(kind, 3 * MIB, 5, LAN, name, strict=True)
    assert choice.algorithm == name
    assert "set by name" in choice.reason


def test_unsupported_name_falls_back_or_raises_if_strict() -> None:
    choice = choose("all_gather", 64 * MIB, 4, LAN, "tree")
    assert choice.algorithm == "ring"
    assert "tree, which is set, does not exist for all_gather" in choice.reason
    with pytest.raises(UnsupportedOperation, match="all_gather has no algorithm 'tree'"):
        choose("all_gather", 64 * MIB, 4, LAN, "tree", strict=True)
    with pytest.raises(ConfigError, match="unknown algorithm 'spiral'"):
        choose("all_gather", 64 * MIB, 4, LAN, "spiral")
    with pytest.raises(ConfigError, match="arity 1"):
        choose("all_reduce", 64 * MIB, 4, LAN, arity=1)


def test_choice_reason_contains_numbers() -> None:
    choice: AlgorithmChoice = choose("all_reduce", 32 * MIB, 4, LAN)
    assert choice.reason == (
        "ring: fastest for 32 MiB on 4 ranks, about 429 ms; next is doubling with 430 ms."
    )
    forced = choose("all_reduce", 32 * MIB, 4, LAN, "star")
    assert "ring would take about 429 ms" in forced.reason


@settings(max_examples=80, deadline=None)
@given(
    table=tables,
    pair=st.sampled_from(PAIRS),
    nbytes=st.integers(0, 1 << 36),
    world=st.integers(1, 200),
    limit=st.integers(1024, MAX_SEGMENT_BYTES),
)
def test_segments_stay_within_their_limit(
    table: CostTable, pair: tuple[OperationKind, str], nbytes: int, world: int, limit: int
) -> None:
    assert 1024 <= segment_bytes(*pair, nbytes, world, table, limit) <= limit


def test_segment_size_is_limit_if_sizes_differ_by_rank() -> None:
    for kind, name in (("all_to_all", "direct"), ("gather", "star"), ("scatter", "star")):
        assert segment_bytes(kind, name, 100, 4, LAN) == segment_bytes(kind, name, 1 << 30, 4, LAN)


@pytest.mark.parametrize(
    ("kind", "flat"), [("broadcast", "ring"), ("reduce", "ring"), ("barrier", "doubling")]
)
def test_sites_are_chosen_where_they_are_known(kind: str, flat: str) -> None:
    """Twelve ranks at three sites: fewer messages in sequence cross the slow links."""
    apart = choose(kind, 4 * MIB, 12, LAN, leaders=3)
    assert apart.algorithm == "sites"
    assert apart.seconds < choose(kind, 4 * MIB, 12, LAN).seconds
    assert choose(kind, 4 * MIB, 12, LAN).algorithm != "sites"
    assert predict(kind, "sites", 4 * MIB, 12, LAN) == predict(kind, flat, 4 * MIB, 12, LAN)
