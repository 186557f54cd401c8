"""Text of the dry run of a split model, and what its profile may hold."""

from __future__ import annotations

import json

import msgspec
import pytest

from barnraise.agent_client.profile import (
    PartBytes,
    SplitProfile,
    SplitWorker,
    decode_profile,
    encode,
)
from barnraise.cli.plan.options import PlanOptions
from barnraise.cli.plan.split import describe_split, report_of, run_split
from barnraise.core.errors import ProtocolError, RunError
from barnraise.core.units import format_duration

GIB = 1 << 30
RATE = 117.5e6


def profile(
    *memories: float, names: tuple[str, ...] = ("mac", "nas", "pc"), blocks: int = 16
) -> SplitProfile:
    count = len(memories)
    workers = tuple(
        SplitWorker(name=name, memory_bytes=round(gib * GIB), forward_s=0.02 * place, backward_s=0.04 * place)
        for place, (name, gib) in enumerate(zip(names, memories, strict=False), 1)
    )
    return SplitProfile(
        before=PartBytes(GIB // 2, 0),
        blocks=(PartBytes(GIB, 1 << 20),) * blocks,
        after=PartBytes(GIB // 2, 0),
        boundary_bytes=1 << 25,
        sent_bytes=1 << 24,
        batch=16,
        batches=8,
        order="1F1B",
        workers=workers,
        rates=((RATE,) * count,) * count,
        latencies=((0.0002,) * count,) * count,
    )


def words(text: str) -> str:
    return " ".join(text.split())


def test_dry_run_is_told_in_plain_words_within_eighty_columns() -> None:
    names = ("mac-mini-in-the-living-room-of-my-parents", "nas", "pc-with-two-cards")
    text = describe_split(report_of(profile(12, 12, 12, names=names)), 80)
    print(text)
    assert max(map(len, text.splitlines())) <= 80
    flat = words(text)
    assert "The model has 16 blocks, which are its layers, and needs 17.1 GiB to train" in flat
    assert "the start, blocks 1 to" in text
    assert "of 12 GiB" in text
    assert "16 samples in 8 pieces, called micro-batches" in flat
    assert "128 MiB each way in a step. The weights never travel." in flat
    assert "940 Mbit/s" in text
    assert "Predicted: " in text
    assert "computes longest" in flat
    assert "samples a second" in flat
    assert "FSDP2 over" in flat
    assert "it needs 17.1 GiB of memory and has 12 GiB" in flat
    assert "The split is the right choice: " in flat


def test_model_that_does_not_fit_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_split(profile(4, 4), wishes=PlanOptions()) == 1
    shown = words(capsys.readouterr().out)
    assert "It cannot be split over these machines: the model needs 17.1 GiB" in shown
    assert "more than all have: mac 4 GiB, nas 4 GiB." in shown
    assert "A split over all machines is not possible here. Mac alone, with weights on its disk" in shown


def test_machine_that_is_enough_is_recommended() -> None:
    pair = profile(24, 24)
    slow = msgspec.structs.replace(pair.workers[1], forward_s=2.0, backward_s=4.0)
    text = words(
        describe_split(report_of(msgspec.structs.replace(pair, workers=(pair.workers[0], slow))), 80)
    )
    assert (
        "A split is not the right choice here: mac alone takes 7.68 s for a step, so the others get" in text
    )


def test_machine_without_blocks_is_told_with_the_reason() -> None:
    three = profile(12, 12, 12)
    slow = msgspec.structs.replace(three.workers[2], forward_s=1.0, backward_s=2.0)
    report = report_of(msgspec.structs.replace(three, workers=(*three.workers[:2], slow)))
    flat = words(describe_split(report, 80))
    assert "Pc computes no blocks, because a step is shorter without it: a block takes 3 s there" in flat
    assert report.split is not None
    assert sorted(report.split.machines) == [0, 1]


def test_full_replicas_of_a_run_are_told() -> None:
    pair = profile(24, 24)
    alike = (pair.workers[0], msgspec.structs.replace(pair.workers[0], name="nas"))
    report = report_of(msgspec.structs.replace(pair, batches=4, workers=alike))
    text = words(describe_split(report, 80))
    assert text.count("the whole model") == 2
    assert "mac trains 2 of them. nas trains 2 of them." in text
    assert "Then they exchange and add the gradients of what is trained." in text
    assert report.split is not None
    assert f"The split is the right choice: {format_duration(report.split.step.step_s)}" in text
    assert len(report_of(profile(12, 12)).split.pipelines) == 1  # type: ignore[union-attr]


def test_single_machine_sends_nothing() -> None:
    text = words(describe_split(report_of(profile(24)), 80))
    assert "the whole model" in text
    assert "micro-batches" not in text
    assert "mac computes all of it" in text


def test_report_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_split(profile(7, 7, 7), wishes=PlanOptions(as_json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["batch"], report["micro_batches"]) == (16, 8)
    assert {stage["machine"] for stage in report["stages"]} == {"mac", "nas", "pc"}
    assert report["stages"][-1]["last_block"] == 16
    assert report["step"]["step_s"] > report["step"]["bound_s"] > 0
    assert {rival["kind"] for rival in report["rivals"]} == {"alone", "disk", "sharded"}
    assert run_split(profile(4, 4), wishes=PlanOptions(as_json=True)) == 1
    assert json.loads(capsys.readouterr().out)["step"] is None


def test_options_about_other_plans_are_refused() -> None:
    with pytest.raises(RunError, match="do not work with a split model yet"):
        run_split(profile(12, 12), wishes=PlanOptions(add=("4090@1gbit",)))


def test_profile_with_links_of_other_workers_is_refused() -> None:
    good = profile(12, 12)
    assert decode_profile(encode(good)) == good
    for change in ({"rates": ((1.0,), (1.0,))}, {"latencies": ((0.0, 0.0),)}):
        bad = msgspec.structs.replace(good, **change)
        with pytest.raises(ProtocolError, match="other workers than its own"):
            decode_profile(encode(bad))


def test_unmeasured_blocks_are_told_after_missing_memory() -> None:
    small = profile(4, 4)
    unknown = tuple(
        msgspec.structs.replace(worker, forward_s=0.0, backward_s=0.0) for worker in small.workers
    )
    report = report_of(msgspec.structs.replace(small, workers=unknown))
    assert "more than all have" in report.why_not
    larger = tuple(msgspec.structs.replace(worker, memory_bytes=12 * GIB) for worker in unknown)
    report = report_of(msgspec.structs.replace(small, workers=larger))
    assert report.why_not == "no machine has measured a block, so no step can be predicted"
