"""Each codec alone: error bounds, determinism, shapes and types, malformed payloads."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.compression import Codec, CodecRound, PowerSGD, codec_named
from barnraise.core.errors import CollectiveError, ProtocolError, UnsupportedOperation

NAMES = (
    *("fp32", "fp16", "bf16", "int8", "int8:block=6", "int4", "int4:block=10", "topk", "topk:k=3,block=17"),
    *("topk:k=5,block=5", "randomk:every=7", "fp32+zlib", "bf16+zlib", "int8+zlib", "int4+zlib"),
    *("topk:k=3,block=17+zlib", "randomk:every=3+zlib", "topk-fp32", "topk-fp32:ratio=0.2,block=17"),
    *("topk-fp32:k=5,block=5", "topk-fp32:k=3,block=17+zlib"),
)
ROUND = CodecRound("layer.weight", 3)
SMALLEST = 2.0**-100


def codec_of(name: str) -> Codec:
    codec = codec_named(name)
    assert not isinstance(codec, PowerSGD)
    return codec


def numbers(seed: int, numel: int, low: float, high: float) -> torch.Tensor:
    """Normal, times powers of ten between two exponents, some of them zero."""
    source = torch.Generator().manual_seed(seed)
    exponents = torch.rand(numel, generator=source, dtype=torch.float64) * (high - low) + low
    values = torch.randn(numel, generator=source, dtype=torch.float64) * 10.0**exponents
    return (values * (torch.rand(numel, generator=source) > 0.1)).float()


@st.composite
def tensors(draw: st.DrawFn, max_size: int = 600) -> torch.Tensor:
    low = draw(st.floats(-32, 36))
    high = draw(st.floats(low, 36))
    return numbers(draw(st.integers(0, 2**30)), draw(st.integers(0, max_size)), low, high)


def largest_of_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """For each number, the largest magnitude of its block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: values.numel()]


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    payload = codec.encode(values, ROUND)
    assert payload.dtype == torch.uint8
    assert payload.dim() == 1
    assert payload.numel() <= codec.payload_bytes(values.numel())
    assert not codec.is_fixed or payload.numel() == codec.payload_bytes(values.numel())
    return codec.decode(payload, values.numel(), ROUND)


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_codec_rounding_error_is_bounded(values: torch.Tensor) -> None:
    wide = values.double()
    for name in ("fp32", "fp32+zlib"):
        assert torch.equal(through(codec_of(name), values), values)
    for name, relative, absolute in (("fp16", 2.0**-11, 2.0**-25), ("bf16", 2.0**-8, 2.0**-134)):
        max_value = torch.finfo(torch.float16 if name == "fp16" else torch.bfloat16).max
        cut = wide.clamp(-max_value, max_value)
        gap = (through(codec_of(name), values).double() - cut).abs()
        assert bool((gap <= cut.abs() * relative + absolute).all())
    for levels, width, name in ((127, 256, "int8"), (127, 6, "int8:block=6"), (7, 10, "int4:block=10")):
        gap = (through(codec_of(name), values).double() - wide).abs()
        bound = largest_of_blocks(values, width).double() / (2 * levels) * (1 + 1e-5)
        assert bool((gap <= bound.clamp(min=SMALLEST)).all())


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_topk_keeps_largest_magnitudes(values: torch.Tensor) -> None:
    decoded = through(codec_of("topk:k=3,block=17"), values)
    for block, decoded_block in zip(values.split(17), decoded.split(17), strict=True):
        if not block.numel():
            continue
        k = -(-3 * block.numel() // 17)
        kept = block.abs() >= block.abs().topk(k).values[-1]
        assert bool((decoded_block[~kept] == 0).all())
        assert bool((decoded_block.sign() * block.sign() >= 0).all())
        assert float(decoded_block.abs().max()) <= float(block.abs().max()) * (1 + 2.0**-8)
        assert float((decoded_block - block).norm()) <= float(block.norm()) * (1 + 2.0**-7)


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_topk_fp32_keeps_a_share_without_rounding(values: torch.Tensor) -> None:
    decoded = through(codec_of("topk-fp32:ratio=0.2,block=20"), values)
    for block, decoded_block in zip(values.split(20), decoded.split(20), strict=True):
        k = -(-4 * block.numel() // 20)
        is_kept = decoded_block != 0
        assert torch.equal(decoded_block[is_kept], block[is_kept])
        assert int(is_kept.sum()) == min(k, int((block != 0).sum()))
        if block.numel():
            smallest = block.abs().topk(k).values[-1]
            assert bool((block[is_kept].abs() >= smallest).all())


def test_topk_with_two_magnitudes_is_exact_and_prefers_first() -> None:
    values = torch.zeros(4096)
    values[torch.arange(0, 4096, 64)] = 0.5
    values[::128] = -2.0
    assert torch.equal(through(codec_of("topk"), values), values)
    equal = torch.ones(17)
    assert through(codec_of("topk:k=3,block=17"), equal).tolist() == [1.0] * 3 + [0.0] * 14


@settings(max_examples=40, deadline=None)
@given(tensors(), st.integers(0, 1000))
def test_randomk_sends_one_number_of_each_group(values: torch.Tensor, step: int) -> None:
    codec, codec_round = codec_of("randomk:every=7"), CodecRound("w", step)
    decoded = codec.decode(codec.encode(values, codec_round), values.numel(), codec_round)
    is_kept = decoded == values
    for group, decoded_group in zip(is_kept.split(7), decoded.split(7), strict=True):
        assert bool(group.any()) or not values.numel()
        assert int((decoded_group != 0).sum()) <= 1


def test_randomk_draw_depends_on_tensor_and_step_only() -> None:
    codec, values = codec_of("randomk:every=16"), torch.ones(16_000)
    sums = torch.zeros(16_000)
    for step in range(64):
        sums += codec.decode(codec.encode(values, CodecRound("w", step)), 16_000, CodecRound("w", step))
    assert float(sums.sum()) == 64 * 1000
    assert float((sums == 0).float().mean()) < 0.03  # (15/16)**64 is 0.016
    payload = codec.encode(values, CodecRound("w", 1))
    for other in (CodecRound("w", 2), CodecRound("v", 1)):
        with pytest.raises(ProtocolError, match="another tensor, step or seed"):
            codec.decode(payload, 16_000, other)


@pytest.mark.parametrize("name", NAMES)
def test_codecs_accept_any_shape_and_float_type(name: str) -> None:
    codec = codec_of(name)
    source = torch.Generator().manual_seed(5)
    base = torch.randn(9, 11, generator=source)
    shapes = (base, base.t(), base[::2, ::3], torch.tensor(2.5), torch.zeros(0, 3), base[:1], torch.zeros(40))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in shapes:
            values = shape.to(dtype)
            flat = values.reshape(-1).float()
            assert torch.equal(through(codec, values), through(codec, flat))


@pytest.mark.parametrize("name", NAMES)
def test_codecs_encode_deterministically(name: str) -> None:
    values = numbers(1, 70_001, -6, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = codec_of(name).encode(values, ROUND)
        torch.set_num_threads(2)
        assert torch.equal(codec_of(name).encode(values.clone(), ROUND), first)
    finally:
        torch.set_num_threads(before)


# Bytes are a promise to other versions and other machines; zlib's may differ between its versions.
FROZEN = {
    "fp32": "cc8d75a17a9acab9",
    "fp16": "d47149281b0834d4",
    "bf16": "9b9b3c24db35e49e",
    "int8": "bc3ff3976382ce7e",
    "int4": "ffdfc2f3b5a637de",
    "topk:k=3,block=17": "85329009034fbcdb",
    "topk": "05e1ca75e54d27cc",
    "randomk:every=7": "940dd3887c28df64",
}


@pytest.mark.parametrize("name", FROZEN)
def test_payload_bytes_match_stored_hashes(name: str) -> None:
    whole = (torch.arange(10_007, dtype=torch.int64) * 7919 % 20_011 - 10_005).double()
    values = (whole / 2.0 ** (torch.arange(10_007) % 23)).float()
    payload = codec_of(name).encode(values, CodecRound("frozen", 11))
    assert blake3(payload.numpy().tobytes()).hexdigest()[:16] == FROZEN[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_error_names_tensor(name: str, bad: float) -> None:
    for place in (0, 150, 299):
        values = torch.ones(300)
        values[place] = bad
        with pytest.raises(CollectiveError, match=r"layer\.weight"):
            codec_of(name).encode(values, ROUND)
    with pytest.raises(CollectiveError, match=r"layer\.weight"):
        codec_of(name).encode(torch.full((3,), 1e200, dtype=torch.float64), ROUND)


@pytest.mark.parametrize("values", [torch.ones(3, dtype=torch.int64), torch.eye(3).to_sparse()])
def test_sparse_and_integer_tensors_are_rejected(values: torch.Tensor) -> None:
    with pytest.raises(UnsupportedOperation, match=r"layer\.weight"):
        codec_of("int8").encode(values, ROUND)


def test_unaligned_payloads_are_decoded() -> None:
    values = torch.randn(301)
    for name in NAMES:
        codec = codec_of(name)
        payload = codec.encode(values, ROUND)
        shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), payload])[3:]
        assert torch.equal(
            codec.decode(shifted, values.numel(), ROUND), codec.decode(payload, values.numel(), ROUND)
        )


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 300), st.data())
def test_malformed_payload_raises_protocol_error_only(name: str, numel: int, data: st.DataObject) -> None:
    """Bytes of any kind, and good payloads with a few bytes changed: an error of ours, or finite numbers."""
    codec = codec_of(name)
    good = bytes(codec.encode(numbers(numel, numel, -3, 3), ROUND).tolist())
    kind = data.draw(st.sampled_from(["any", "as long", "changed", "cut", "longer"]))
    if kind == "any":
        sent = data.draw(st.binary(max_size=2 * len(good) + 8))
    elif kind == "as long":
        sent = data.draw(st.binary(min_size=len(good), max_size=len(good)))
    elif kind == "changed":
        changed = bytearray(good)
        for place in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
            changed[place] = data.draw(st.integers(0, 255))
        sent = bytes(changed)
    elif kind == "cut":
        sent = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        sent = good + data.draw(st.binary(min_size=1, max_size=9))
    payload = torch.tensor(list(sent), dtype=torch.uint8)
    try:
        decoded = codec.decode(payload, numel, ROUND)
    except ProtocolError:
        return
    assert kind in ("any", "as long", "changed")
    assert decoded.shape == (numel,)
    assert bool(torch.isfinite(decoded).all())


def test_small_zlib_payload_cannot_inflate_beyond_limit() -> None:
    """A deflated plane that would inflate to far more than there is room for."""
    codec = codec_of("fp32+zlib")
    zeros = codec.encode(torch.zeros(2_000_000), ROUND)
    assert zeros.numel() < 40_000
    with pytest.raises(ProtocolError, match="wrong number of bytes"):
        codec.decode(zeros, 10_000, ROUND)


def test_zlib_skips_incompressible_planes() -> None:
    noise = torch.randint(0, 256, (400_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    values = (noise.view(torch.int32) & 0x3FFFFFFF | 0x30000000).view(torch.float32)
    plain, packed = codec_of("fp32"), codec_of("fp32+zlib")
    assert packed.encode(values, ROUND).numel() <= plain.payload_bytes(values.numel()) + 4
    assert torch.equal(through(packed, values), values)
    sparse = torch.zeros(100_000)
    sparse[::100] = 1.5
    assert packed.encode(sparse, ROUND).numel() < 20_000
