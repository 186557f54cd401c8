"""Levels of the network: strict reading, with errors that name the valid values."""

from __future__ import annotations

import re
import tomllib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ConfigError
from barnraise.planning import LOSSY, Level, Levels, read_levels
from barnraise.planning.inputs.levels import Sync, decode_levels

CODECS = [codec.name for codec in LOSSY]


@pytest.mark.parametrize("name", ["star", "centralised", "centralized"])
def test_star_has_three_names(name: str) -> None:
    table = {"all_reduce": name, "reduce": name, "broadcast": name}
    level = Level(all_reduce="star", reduce="star", broadcast="star")
    assert read_levels({"inside": table}, CODECS).inside == level


def test_levels_of_a_run_reach_its_workers() -> None:
    assert decode_levels("") == Levels()
    levels = Levels(inside=Level(reduce="tree"), across=Level(codec="int8", period=32))
    assert decode_levels(msgspec.json.encode(levels).decode()) == levels
    for text in ("[]", "{", '{"inside": {"reduce": "rign"}}'):
        with pytest.raises(ConfigError):
            decode_levels(text)


def test_levels_are_auto_by_default() -> None:
    assert read_levels({}, CODECS) == Levels()
    assert Levels().across.is_open
    text = """
    [inside]
    all_reduce = "ring"
    reduce = "tree"

    [across]
    codec = "int8"
    period = 32
    """
    levels = read_levels(tomllib.loads(text), CODECS, "auto")
    assert levels.inside == Level(all_reduce="ring", reduce="tree")
    assert levels.across == Level(codec="int8", period=32)
    exact = Levels(inside=levels.inside, across=Level(codec="exact", period=1))
    assert levels.exact() == exact, "sites are still taken apart"
    assert msgspec.json.decode(msgspec.json.encode(levels), type=Levels) == levels


@pytest.mark.parametrize(
    ("document", "message", "hint"),
    [
        ({"accross": {}}, "unknown level 'accross'", "Did you mean 'across'? Use one of inside, across."),
        ({"inside": 3}, "must be a table", "Write \\[inside\\]"),
        ({"inside": {"allreduce": "ring"}}, "unknown setting 'allreduce'", "Did you mean 'all_reduce'"),
        ({"inside": {"reduce": "rign"}}, "unknown strategy 'rign'", "Did you mean 'ring'"),
        ({"inside": {"broadcast": 7}}, "unknown strategy '7'", "Use one of auto, ring, tree, star"),
        ({"across": {"codec": "int9"}}, "unknown codec 'int9'", "exact, fp16, bf16, int8"),
        ({"across": {"period": 0}}, "the period 0, which is not a number of steps", "from 1 to 500"),
        ({"across": {"period": True}}, "the period True", "from 1 to 500"),
        ({"across": {"period": "often"}}, "the period 'often'", "or 'auto'"),
        ({"across": {"period": 8}}, "rounds of 8 steps, which changes the mathematics", "sync = 'auto'"),
        ({"across": {"reduce": "tree"}}, "[across] sets reduce, but the leaders", "reduce in [inside]"),
        ({"inside": {"codec": "int8"}}, "the codec 'int8', which changes the mathematics", "sync = 'auto'"),
    ],
)
def test_mistakes_are_named_with_a_hint(document: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_levels(document, CODECS, "exact")
    assert hint.replace("\\", "") in raised.value.hint


def test_contradicting_levels_are_rejected() -> None:
    for inside in ({"codec": "int8"}, {"period": 4}):
        with pytest.raises(ConfigError, match=r"although \[across\] is set"):
            read_levels({"inside": inside, "across": {"all_reduce": "ring"}}, CODECS, "auto")
        assert read_levels({"inside": inside}, CODECS, "auto").inside != Level()


_values: st.SearchStrategy[object] = st.sampled_from(
    ["auto", "ring", "star", "int8", "exact", 1, 7, 501, True, None, 2.5, [], {}]
)
_keys = st.sampled_from([*Level.__struct_fields__, "speed"])
_tables = st.dictionaries(_keys, _values, max_size=3) | _values


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["inside", "across", "home"]), _tables, max_size=2),
    st.sampled_from(["exact", "auto"]),
)
def test_any_table_is_read_or_rejected(document: dict[str, object], sync: Sync) -> None:
    try:
        levels = read_levels(document, CODECS, sync)
    except ConfigError:
        return
    assert isinstance(levels, Levels)
