"""Facts that members compare, and what differs in words."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from barnraise.training.pipeline.members.model_facts import ModelFacts, as_words, difference

FACTS = ModelFacts(
    "layers",
    (b"before", b"1", b"2", b"3", b"after"),
    1000,
    b"trained",
    120,
    (("base", "exact"), ("lr", "0.1")),
)
ELSE = "has other parameters than on mac"


def test_equal_facts_have_no_difference() -> None:
    assert FACTS.blocks == 3
    assert difference(FACTS, replace(FACTS), "mac") == ""
    assert difference(ModelFacts(), ModelFacts(), "mac") == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"parts": FACTS.parts[:-1]},
            "its model has 2 blocks in layers, and that of mac has 3 blocks in layers",
        ),
        ({"path": "h"}, "its model has 3 blocks in h, and that of mac has 3 blocks in layers"),
        ({"options": (("lr", "0.2"),)}, "its lr is 0.2, and that of mac is 0.1"),
        (
            {"parts": (b"before", b"1", b"x", b"3", b"after"), "numbers": 2000},
            f"block 2 of its model {ELSE}; the models have 2,000 and 1,000 numbers",
        ),
        ({"parts": (b"x", *FACTS.parts[1:])}, f"what its model has before the blocks {ELSE}"),
        ({"parts": (*FACTS.parts[:-1], b"x")}, f"what its model has after the blocks {ELSE}"),
        ({"trained": b"x", "trained_numbers": 60}, "it trains 60 numbers, and mac trains 120"),
        ({"trained": b"x"}, "it trains other parameters than mac"),
    ],
)
def test_first_difference_is_said_in_words(changes: dict[str, object], words: str) -> None:
    assert difference(replace(FACTS, **changes), FACTS, "mac") == words


def test_option_that_only_one_member_knows_is_no_difference() -> None:
    newer = replace(FACTS, options=(*FACTS.options, ("added later", "1")))
    assert difference(newer, FACTS, "mac") == ""
    assert difference(FACTS, newer, "mac") == ""


def test_words_of_other_machines_are_plain_and_short() -> None:
    assert as_words("Adam\x1b[31m\u202e" + "x" * 300) == "Adam?[31m?" + "x" * 190
    decoder = msgspec.msgpack.Decoder(ModelFacts)
    for path in ("\x1b[31m", "x" * 201, "line\n"):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode([path]))
    assert decoder.decode(msgspec.msgpack.encode(FACTS)) == FACTS
