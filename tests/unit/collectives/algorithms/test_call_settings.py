"""Call, network level, operation and general settings decide on the algorithm, in this order."""

from __future__ import annotations

import msgspec
import pytest

from barnraise.collectives.algorithms.call_settings import (
    AlgorithmSettings,
    settings_of_call,
    shapes_of,
    strategy_of_operation,
)
from barnraise.collectives.algorithms.compile import algorithms_for, format_label, parse_label
from barnraise.collectives.algorithms.cost_model import CostTable, choose
from barnraise.collectives.algorithms.schedule import SHAPES, OperationKind, StageShapes
from barnraise.collectives.per_call import CallOptions
from barnraise.core import config
from barnraise.core.config import CollectiveSettings, load_settings, setting_names
from barnraise.core.errors import UnsupportedOperation
from barnraise.planning import Level, Levels

FREE = Levels()
STAR = Levels(inside=Level(all_reduce="star", broadcast="tree"))
APART = Levels(inside=Level(all_reduce="star", reduce="star"), across=Level(all_reduce="tree"))
GENERAL = CollectiveSettings(strategy="ring", arity=5, tree_below_bytes=7)
NONE = CallOptions()
_INSIDE = [name for name in setting_names() if name.startswith("collectives.") and name.count(".") == 2]


@pytest.mark.parametrize(
    ("kind", "levels", "sites", "expected"),
    [
        (OperationKind.ALL_REDUCE, FREE, 2, "ring"),
        (OperationKind.ALL_REDUCE, STAR, 1, "star"),
        (OperationKind.ALL_REDUCE, STAR, 2, "star"),
        (OperationKind.ALL_REDUCE, APART, 1, "star"),
        (OperationKind.ALL_REDUCE, APART, 2, "sites"),
        (OperationKind.REDUCE, STAR, 2, "ring"),
        (OperationKind.REDUCE, APART, 2, "star"),
        (OperationKind.BROADCAST, STAR, 0, "tree"),
        (OperationKind.ALL_GATHER, APART, 2, "ring"),
    ],
)
def test_level_beats_the_general_setting(
    kind: OperationKind, levels: Levels, sites: int, expected: str
) -> None:
    assert settings_of_call(kind, GENERAL, levels, sites, NONE) == AlgorithmSettings(expected, 5, 7)


@pytest.mark.parametrize("name", _INSIDE)
def test_setting_of_an_operation_has_an_effect_on_it_alone(name: str) -> None:
    _, operation, key = name.split(".")
    value = {"strategy": "direct", "arity": 9, "tree_below_bytes": 11}[key]
    needed = {f"collectives.{operation}.strategy": "plain"} if key == "tree_below_bytes" else {}
    changed = load_settings(environ={}, overrides={**needed, name: value}).collectives
    for kind in OperationKind:
        before = settings_of_call(kind, CollectiveSettings(), FREE, 1, NONE)
        after = settings_of_call(kind, changed, FREE, 1, NONE)
        assert (getattr(after, key) == value) == (kind == operation)
        assert (after == before) == (kind != operation)
        assert strategy_of_operation(kind, changed) == after.strategy


def test_options_of_the_call_beat_everything() -> None:
    own = config.AllReduceSettings(strategy="tree", arity=3)
    settings = msgspec.structs.replace(GENERAL, all_reduce=own)
    kind = OperationKind.ALL_REDUCE
    assert settings_of_call(kind, settings, FREE, 1, NONE) == AlgorithmSettings("tree", 3, 7)
    assert settings_of_call(kind, settings, STAR, 1, NONE) == AlgorithmSettings("star", 3, 7)
    options = CallOptions(strategy="plain", arity=4, tree_below_bytes=8)
    expected = AlgorithmSettings("plain", 4, 8, is_required=True)
    assert settings_of_call(kind, settings, STAR, 1, options) == expected
    only_timeout = CallOptions(timeout_s=2.0)
    assert settings_of_call(kind, settings, FREE, 1, only_timeout) == AlgorithmSettings("tree", 3, 7)


@pytest.mark.parametrize("name", [name for name in _INSIDE if name.endswith(".strategy")])
def test_settings_know_the_strategies_of_each_operation(name: str) -> None:
    """Every choice of the setting exists, and every algorithm can be chosen."""
    operation = name.split(".")[1]
    choices = set(config._choices(config._TYPES[name])) - {"auto", "plain"}
    assert choices - {"direct"} == set(algorithms_for(operation)) - {"direct"}
    for choice in choices:
        choose(operation, 1000, 4, CostTable.default(), choice, strict=True)


@pytest.mark.parametrize(
    ("operation", "strategy"), [("broadcast", "doubling"), ("all_gather", "centralised"), ("barrier", "ring")]
)
def test_strategy_that_a_call_names_must_exist(operation: str, strategy: str) -> None:
    with pytest.raises(UnsupportedOperation, match=operation):
        choose(operation, 1000, 4, CostTable.default(), strategy, strict=True)
    assert choose(operation, 1000, 4, CostTable.default(), strategy).algorithm in algorithms_for(operation)


def test_shapes_default_to_chains_and_ring() -> None:
    assert shapes_of(FREE) == StageShapes("ring", "ring", "ring")
    assert shapes_of(APART) == StageShapes("star", "tree", "ring")


def test_label_round_trip_keeps_algorithm_and_shapes() -> None:
    assert format_label("sites", StageShapes()) == "sites"
    assert format_label("ring", StageShapes("star", "star", "star")) == "ring"
    for shapes in (StageShapes(a, b, c) for a in SHAPES for b in SHAPES for c in SHAPES):
        assert parse_label(format_label("sites", shapes)) == ("sites", shapes)


def test_predicted_cost_depends_on_shapes() -> None:
    """Leaders of a star hear every rank; a site's star is nearer than its chain."""

    def seconds(nbytes: int, shapes: StageShapes, leaders: int = 4) -> float:
        table = CostTable.default()
        return choose(
            OperationKind.ALL_REDUCE, nbytes, 16, table, "sites", leaders=leaders, shapes=shapes
        ).seconds

    large, small = 64 << 20, 1 << 10
    assert seconds(large, StageShapes(across="star")) > 1.5 * seconds(large, StageShapes())
    assert seconds(small, StageShapes(across="star")) < seconds(small, StageShapes())
    assert seconds(small, StageShapes("star", "ring", "star")) < seconds(small, StageShapes())
    assert seconds(small, StageShapes("tree", "tree", "tree"), leaders=1) > 0
