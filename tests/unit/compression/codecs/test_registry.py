"""Names of codecs, as a person writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.compression import NAMES, codec_named
from barnraise.core.errors import ConfigError

GOOD = (
    *(
        "fp32",
        "fp16",
        "bf16",
        "int8",
        "int8:block=128",
        "int4:block=64",
        "topk:k=8,block=512",
        "topk:block=64",
    ),
    *("randomk:every=16,seed=3", "powersgd:rank=8", "bf16+zlib", "int8:block=64+zlib"),
    *("topk:ratio=0.1", "topk-fp32:ratio=.05,block=512", "topk-fp32:ratio=1", "topk-fp32:k=9+zlib"),
)
BAD = {
    "int9": "unknown codec 'int9'",
    "": "unknown codec ''",
    "INT8": "unknown codec",
    "int8:block=": "not a whole number",
    "int8:block=x": "not a whole number",
    "int8:block=-2": "not a whole number",
    "int8:block=²": "not a whole number",
    "int8:blocks=2": "no parameter 'blocks'",
    "int8:block=128,block=64": "twice",
    "int8:": "no parameter ''",
    "fp16:block=2": "no parameter",
    "int8:block=7": "blocks of 7",
    "int4:block=0": "blocks of 0",
    "int8:block=999999999": "blocks of 999999999",
    "topk:k=0": "keep 0",
    "topk:k=65,block=64": "keep 65",
    "topk:ratio=0": "a share of 0",
    "topk:ratio=1.5": "a share of 1.5",
    "topk-fp32:ratio=-0.1": "not a share",
    "topk-fp32:ratio=1e-3": "not a share",
    "topk-fp32:ratio=nan": "not a share",
    "topk:k=4,ratio=0.1": "both k and ratio",
    "int8:ratio=0.1": "no parameter 'ratio'",
    "randomk:every=0": "each 0",
    "powersgd:rank=0": "rank 0",
    "powersgd+zlib": "does not name",
    "int8+zstd": "does not name",
    "int8+zlib+zlib": "does not name",
}


@pytest.mark.parametrize("name", [*NAMES, *GOOD])
def test_codec_name_round_trip(name: str) -> None:
    codec = codec_named(name)
    assert codec.name.startswith(name.partition(":")[0].partition("+")[0])
    assert codec_named(codec.name).name == codec.name


@pytest.mark.parametrize("name", BAD)
def test_invalid_codec_text_error_names_problem(name: str) -> None:
    with pytest.raises(ConfigError, match=BAD[name]) as caught:
        codec_named(name)
    assert caught.value.hint.endswith(".")


@pytest.mark.parametrize(("text", "k"), [("0.1", 410), (".0001", 1), ("1", 4096), ("0.015625", 64)])
def test_ratio_is_a_share_of_each_block(text: str, k: int) -> None:
    assert codec_named(f"topk-fp32:ratio={text}").name == f"topk-fp32:k={k},block=4096"


def test_unknown_codec_hint_lists_names() -> None:
    with pytest.raises(ConfigError) as caught:
        codec_named("gzip")
    assert all(name in caught.value.hint for name in NAMES)


@given(st.text(alphabet="intfp8416topk:=,+zlib0123456789", max_size=30))
def test_any_text_returns_codec_or_config_error(text: str) -> None:
    try:
        assert codec_named(text).name
    except ConfigError:
        pass
