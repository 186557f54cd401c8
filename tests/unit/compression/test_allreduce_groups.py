"""Sums over groups of real processes, on Gloo and on our backend; see group_member.py for what they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from barnraise.compression import CodecRound, ErrorFeedback, FeedbackPart, GradientHook, codec_named, sum_over
from barnraise.compression.allreduce.exchange import PayloadExchange
from barnraise.compression.allreduce.hierarchical import channels_of
from barnraise.compression.allreduce.sharded import cut
from barnraise.core.errors import CollectiveError, OperationMismatch, ProtocolError, RunError
from tests.repository import ROOT

REPOSITORY = ROOT
MEMBERS = Path(__file__).with_name("group_member.py")
Results = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(backend, marks=pytest.mark.slow) for backend in ("gloo", "barnraise")],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of the four members."""
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    room = tmp_path_factory.mktemp(request.param)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, MEMBERS, request.param, room],
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((room / f"{rank}.json").read_text()) for rank in range(4)]


def test_members_hold_same_bits_and_bounded_error(results: Results) -> None:
    sums = [member["one_sum"] for member in results]
    for key in sums[0]:
        name, _, world = key.rpartition("/")
        digests = {member[key][0] for member in sums[: int(world)]}
        assert len(digests) == 1, f"{key}: {digests}"
        if not name.startswith("powersgd"):  # more members, more directions: its rank is what bounds it
            two, four = sums[0][f"{name}/2"][1], sums[0][f"{name}/4"][1]
            assert four <= two * 1.2 + 1e-7, f"{name}: {two} with two members, {four} with four"
    bounds = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3, "int8": 0.015, "int4": 0.25, "int4+zlib": 0.25}
    for name, bound in bounds.items():
        assert sums[0][f"{name}/4"][1] < bound
    assert sums[0]["powersgd:rank=4/2"][1] < 1e-4  # two members of rank 2 each
    sent = {name: sums[0][f"{name}/4"][2] for name in ("fp32", "int8", "int4", "int4+zlib", "topk")}
    assert sent["fp32"] / sent["int8"] > 3.8
    assert sent["fp32"] / sent["int4"] > 7.4
    assert sent["int4+zlib"] < sent["int4"]
    assert sent["fp32"] / sent["topk"] > 80


def test_hierarchical_sum_has_same_bits_and_constant_site_traffic(results: Results) -> None:
    flat, sums = [member["one_sum"] for member in results], [member["through_sites"] for member in results]
    assert [member["tiny"] for member in results] == [pytest.approx([6.0, 6.0, 6.0], abs=0.05)] * 4
    for key in sums[0]:
        name, _, form = key.rpartition("/")
        assert len({member[key][0] for member in sums}) == 1, key
        if not name.startswith("powersgd"):
            # The members of a site are added exactly: the error is that of one member for each site.
            two = flat[0][f"{name}/2"][1]
            assert sums[0][key][1] <= two * (1.25 if form == "three" else 1.05) + 1e-6, key
    for name in ("fp32", "int8", "int4", "topk", "randomk:every=8", "powersgd:rank=4"):
        # With one host at each of two sites, all that they send crosses.
        alone = sum(member[f"{name}/2"][2] for member in flat[:2])
        for form in ("even", "uneven"):
            crossed = sum(member[f"{name}/{form}"][3] for member in sums)
            assert alone * 0.9 < crossed < alone * 1.05 + 400, f"{name}/{form}: {crossed}, {alone} with two"
    # Without sites, two of a member's three receivers are at the other one.
    assert (
        sum(member["int8/even"][3] for member in sums)
        < 0.55 * sum(member["int8/4"][2] for member in flat) * 2 / 3
    )


def test_site_residuals_are_added_after_leader_change(results: Results) -> None:
    for key, (once, together, _, _) in results[0]["paid_back"].items():
        assert once > 0.01, key
        assert together < 1e-6, key
    for key in results[0]["paid_back"]:
        assert all(member["paid_back"][key][3] == 0.0 for member in results), key
        # Only leaders keep what was lost, each of its lane.
        kept = [member["paid_back"][key][2] for member in results]
        assert all(0 < count <= 0.55 * 30_337 for count in kept), key


def test_feedback_compensates_both_roundings_and_leaving_members(results: Results) -> None:
    runs = [member["long_run"] for member in results[:3]]
    for name, (_, compensated, plain) in runs[0].items():
        assert compensated < plain / (5 if name == "int4" else 2) or compensated < 1e-6, name
        assert len({run[name][0] for run in runs}) == 1
    assert runs[0]["fp32"][1] < 1e-6


def test_step_repeated_without_keep_is_identical(results: Results) -> None:
    for digests in results[0]["repeated_step"].values():
        first, again, kept, following = digests
        assert first == again == kept
        assert following != first


def test_nan_of_one_member_raises_on_all_without_waiting(results: Results) -> None:
    refusals = [member["refusals"] for member in results[:3]]
    for name in ("int8", "topk", "int4+zlib", "powersgd:rank=2"):
        assert refusals[1][name] == "collective: 'bias' holds numbers that are not finite in float32"
        assert (
            refusals[0][name]
            == refusals[2][name]
            == "collective: rank 1 holds numbers of 'g' that are not finite"
        )
        assert all(member[f"{name}/nan"] for member in refusals)
        assert len({member[f"{name}/after"] for member in refusals}) == 1
        assert [member[f"{name}/sites"] for member in refusals] == [member[name] for member in refusals]
    assert all(
        "too large" in member["large"] and member["large"] == member["large/sites"] for member in refusals
    )
    assert all(member["factors"] == "operation-mismatch" for member in refusals)


def test_ddp_with_codecs_reaches_same_loss(results: Results) -> None:
    runs = [member["training"] for member in results[:3]]
    for name in runs[0]:
        assert len({run[name][0] for run in runs}) == 1, f"{name}: replicas differ"

    def loss(name: str, place: int) -> float:
        return float(sum(run[name][place] for run in runs)) / 3

    plain, begin = loss("plain", 2), loss("plain", 1)
    assert plain < begin / 3
    for name, factor in (("int8", 1.05), ("int8+zlib", 1.05), ("powersgd:rank=2", 1.3)):
        assert loss(name, 2) < plain * factor, name
    assert loss("topk:k=256,block=1024", 2) < begin / 2.5


class Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Three(Alone):
    def size(self) -> int:
        return 3


def test_single_member_sum_is_exact_and_clears_residuals() -> None:
    feedback, group, values = ErrorFeedback(), Alone(), torch.randn(7, 9).double()
    feedback.keep(torch.ones(63), [FeedbackPart("w", (63,))])
    summed = sum_over(group, values, codec_named("int4"), CodecRound("w"), feedback=feedback)  # type: ignore[arg-type]
    assert torch.equal(summed.values, values.float().reshape(-1) + 1)
    assert summed.sent == 0
    assert "nothing is sent" in summed.reason
    summed.keep()
    assert not feedback.state_dict()["residuals"]["w"].any()
    with pytest.raises(CollectiveError, match="'w' holds numbers"):
        sum_over(group, values / 0, codec_named("int4"), CodecRound("w"))  # type: ignore[arg-type]
    with pytest.raises(OperationMismatch, match="62 numbers, it has 63"):
        sum_over(group, values, codec_named("int4"), CodecRound("w"), parts=[FeedbackPart("w", (62,))])  # type: ignore[arg-type]


class HostileGroup:
    """Fake process group of peers that send arbitrary bytes."""

    def __init__(self, data: st.DataObject, keeps_header: bool, world: int) -> None:
        self._data, self._keeps_header, self._world = data, keeps_header, world

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._world

    def wait(self) -> None:
        return

    def all_to_all_single(
        self, arrived: torch.Tensor, leaving: torch.Tensor, coming: list[int], sizes: list[int]
    ) -> HostileGroup:
        assert (arrived.numel(), leaving.numel()) == (sum(coming), sum(sizes))
        self._lie(arrived)
        return self

    def all_gather_single(self, arrived: torch.Tensor, leaving: torch.Tensor) -> HostileGroup:
        arrived[: leaving.numel()] = leaving
        self._lie(arrived[leaving.numel() :])
        return self

    def _lie(self, place: torch.Tensor) -> None:
        if place.dtype == torch.int64:
            low, high = -(2**40), 2**40
            place[:] = torch.tensor([self._data.draw(st.integers(low, high)) for _ in range(place.numel())])
            return
        size = place.numel()
        place[:] = torch.tensor(list(self._data.draw(st.binary(min_size=size, max_size=size))))
        if self._keeps_header:
            place[:8] = 0


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        ["fp32", "bf16", "int8", "int4", "topk:k=2,block=32", "randomk", "int8+zlib", "topk+zlib"]
    ),
    st.booleans(),
    st.sampled_from([(), ((0, 1), (2,)), ((1,), (0, 2)), ((0,), (1, 2))]),
    st.data(),
)
def test_arbitrary_peer_payloads_raise_or_return(
    name: str, keeps_header: bool, sites: tuple[tuple[int, ...], ...], data: st.DataObject
) -> None:
    feedback, liar = ErrorFeedback(), HostileGroup(data, keeps_header, 3 if sites else 2)
    ones, codec = torch.ones(70), codec_named(name)
    try:
        summed = sum_over(liar, ones, codec, CodecRound("w"), feedback=feedback, sites=sites)  # type: ignore[arg-type]
    except (ProtocolError, CollectiveError):
        assert feedback.state_dict()["residuals"] == {}
        return
    assert bool(torch.isfinite(summed.values).all())


def test_shards_cover_tensor_once_at_block_starts() -> None:
    for numel in (0, 1, 255, 256, 257, 5000, 10_000):
        for world in (1, 2, 3, 7):
            shards = cut(numel, world, 256)
            assert [shard.start for shard in shards] == [0, *(shard.stop for shard in shards[:-1])]
            assert shards[-1].stop == numel
            assert all(shard.start % 256 == 0 or shard.start == numel for shard in shards)


def test_channels_have_one_leader_per_site() -> None:
    for sites in (((0, 1), (2, 3)), ((4, 0, 2), (1,), (3, 5))):
        for numel in (0, 3, 5000, 10_000):
            channels = channels_of(numel, sites, 256)
            assert {leader for channel in channels for leader in channel.leaders} == {
                rank for site in sites for rank in site
            }
            covered = [shard for channel in channels for shard in channel.shards]
            assert [shard.start for shard in covered] == [0, *(shard.stop for shard in covered[:-1])]
            assert covered[-1].stop == numel
            assert all(shard.start % 256 == 0 or shard.start == numel for shard in covered)
            for channel in channels:
                assert (channel.shards[0].start, channel.shards[-1].stop) == (
                    channel.whole.start,
                    channel.whole.stop,
                )
                assert all(leader in site for leader, site in zip(channel.leaders, sites, strict=True))


def test_sites_without_every_rank_once_are_rejected() -> None:
    for bad in ([[0], [1]], [[0, 1], [1, 2]], [[0, 1, 2], []]):
        with pytest.raises(OperationMismatch, match="do not name each of 3 ranks once"):
            PayloadExchange(Three(), bad)  # type: ignore[arg-type]
    assert PayloadExchange(Three(), [[0, 1, 2]]).sites == ()  # type: ignore[arg-type]
    assert PayloadExchange(Three(), [[2], [1], [0]]).sites == ()  # type: ignore[arg-type]
    assert PayloadExchange(Three(), [[2, 1], [0]]).site == 1  # type: ignore[arg-type]


def test_hook_state_of_other_codec_is_rejected() -> None:
    model, group = nn.Linear(3, 2), Alone()
    hook = GradientHook(model, "powersgd:rank=2", group)  # type: ignore[arg-type]
    saved = hook.state_dict()
    again = GradientHook(model, "powersgd:rank=2", group)  # type: ignore[arg-type]
    again.load_state_dict({**saved, "step": 5})
    assert again.step == 5
    with pytest.raises(RunError, match="powersgd:rank=2,seed=0 was loaded into int8"):
        GradientHook(model, "int8", group).load_state_dict(saved)  # type: ignore[arg-type]
