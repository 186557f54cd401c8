"""Four real processes that sum by codecs on one backend. ``test_allreduce_groups.py`` runs it.

Each process writes its results. torch is imported once, then the process forks: four imports would take
longer than the test.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP would import it in each process
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from barnraise.compression import (
    CodecRound,
    ErrorFeedback,
    FeedbackPart,
    PowerSGD,
    codec_named,
    compress_gradients,
    sum_over,
)
from barnraise.compression.allreduce import sharded
from barnraise.core.errors import BarnraiseError
from tests.unit.forked import fork_all

WORLD = 4
CODECS = (
    *("fp32", "fp16", "bf16", "int8", "int4", "topk", "randomk:every=8", "int4+zlib", "topk+zlib"),
    "topk-fp32",
)
LONG = ("fp32", "int4", "topk:k=128,block=1024", "powersgd:rank=1")
HOOKS = ("int8", "topk:k=256,block=1024", "powersgd:rank=2")
SITES = {"even": [[0, 1], [2, 3]], "uneven": [[2, 0, 3], [1]], "three": [[3], [0, 2], [1]]}
LED_BY_OTHERS = [[1, 0], [3, 2]]
PARTS = (
    FeedbackPart("weight", (96, 300)),
    FeedbackPart("bias", (300,)),
    FeedbackPart("odd", (1237,)),
    FeedbackPart("nothing", (0, 3)),
)
SIZE = sum(part.numel for part in PARTS)

Groups = dict[int, dist.ProcessGroup]


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    """Return a low-rank matrix with a common part and noise, like a gradient."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    left, right = torch.randn(96, 2, generator=source), torch.randn(2, 300, generator=source)
    rest = torch.randn(SIZE - 96 * 300, generator=source)
    return torch.cat([(left @ right).reshape(-1), rest])


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def off(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed.double() - expected.double()).norm() / expected.double().norm())


def one_sum(groups: Groups, rank: int) -> dict[str, Any]:
    """Each codec once, in groups of two and of four."""
    results: dict[str, Any] = {}
    for name in (*CODECS, "powersgd:rank=4"):
        for world, group in groups.items():
            if rank >= world or world == 3:
                continue
            summed = sum_over(group, gradient(rank), codec_named(name), CodecRound("g", 7), parts=PARTS)
            expected = torch.stack([gradient(peer).double() for peer in range(world)]).sum(0)
            results[f"{name}/{world}"] = [digest(summed.values), off(summed.values, expected), summed.sent]
            assert summed.values.dtype == torch.float32
            assert summed.values.shape == (SIZE,)
            assert summed.reason.startswith(name.split("+")[0].split(":")[0])
    return results


def through_sites(groups: Groups, rank: int) -> dict[str, Any]:
    """Each codec through sites of several forms: the sum, the bytes, and those that left a member's site."""
    results: dict[str, Any] = {}
    for name in (*CODECS, "powersgd:rank=4"):
        for form, sites in SITES.items():
            codec, codec_round = codec_named(name), CodecRound("g", 7)
            own_gradient = gradient(rank)
            summed = sum_over(groups[4], own_gradient, codec, codec_round, parts=PARTS, sites=sites)
            assert torch.equal(own_gradient, gradient(rank))
            expected = torch.stack([gradient(peer).double() for peer in range(4)]).sum(0)
            results[f"{name}/{form}"] = [
                digest(summed.values),
                off(summed.values, expected),
                summed.sent,
                summed.crossed,
            ]
            assert f"at {len(sites)} sites" in summed.reason
    return results


def tiny(groups: Groups, rank: int) -> list[float]:
    """Fewer numbers than there are lanes and shards."""
    own_values = torch.full((3,), float(rank))
    summed = sum_over(groups[4], own_values, codec_named("int8"), CodecRound("t"), sites=SITES["uneven"])
    values: list[float] = summed.values.tolist()
    return values


def paid_back(groups: Groups, rank: int) -> dict[str, Any]:
    """Check that the next sum contains all residuals of sites, with any leader and without sites."""
    results: dict[str, Any] = {}
    expected = torch.stack([gradient(peer).double() for peer in range(4)]).sum(0)
    for name in ("int4", "topk:k=16,block=1024", "randomk:every=8"):
        for following, sites in (("same", SITES["even"]), ("others", LED_BY_OTHERS), ("flat", [])):
            feedback, codec = ErrorFeedback(), codec_named(name)
            for again in range(2):  # the first is as if it had broken
                lossy = sum_over(
                    groups[4],
                    gradient(rank),
                    codec,
                    CodecRound("g"),
                    parts=PARTS,
                    feedback=feedback,
                    sites=SITES["even"],
                )
                if not again:
                    first = digest(lossy.values)
            assert digest(lossy.values) == first
            lossy.keep()
            owed = torch.cat(list(feedback.state_dict()["residuals"].values()))
            rest = sum_over(
                groups[4],
                torch.zeros(SIZE),
                codec_named("fp32"),
                CodecRound("g", 1),
                parts=PARTS,
                feedback=feedback,
                sites=sites,
            )
            rest.keep()
            remaining = torch.cat(list(feedback.state_dict()["residuals"].values()))
            results[f"{name}/{following}"] = [
                off(lossy.values, expected),
                off(lossy.values + rest.values, expected),
                int(owed.count_nonzero()),
                float(remaining.abs().max()),
            ]
    return results


def long_run(groups: Groups, rank: int) -> dict[str, Any]:
    """The mean of some steps with error feedback, after one of four members left; and one without it."""
    results: dict[str, Any] = {}
    for name in LONG:
        codec, feedback = codec_named(name), ErrorFeedback()
        sums = torch.zeros(SIZE, dtype=torch.float64)
        for step in range(11):
            world = 4 if step == 0 else 3
            if rank >= world:
                break
            summed = sum_over(
                groups[world], gradient(rank), codec, CodecRound("g", step), parts=PARTS, feedback=feedback
            )
            summed.keep()
            if world == 3:
                sums += summed.values
        if rank < 3:
            expected = torch.stack([gradient(peer).double() for peer in range(3)]).sum(0)
            plain = sum_over(groups[3], gradient(rank), codec_named(name), CodecRound("g"), parts=PARTS)
            results[name] = [digest(sums), off(sums / 10, expected), off(plain.values, expected)]
    return results


def repeated_step(groups: Groups, rank: int) -> dict[str, Any]:
    """Without keep() a step can be done again, to the bit; with it, the next one differs."""
    results = {}
    for name in ("int4", "powersgd:rank=1"):
        codec, feedback = codec_named(name), ErrorFeedback()

        def once(codec: Any = codec, feedback: ErrorFeedback = feedback, keep_residual: bool = False) -> str:
            summed = sum_over(
                groups[4], gradient(rank), codec, CodecRound("g"), parts=PARTS, feedback=feedback
            )
            if keep_residual:
                summed.keep()
            return digest(summed.values)

        results[name] = [once(), once(), once(keep_residual=True), once()]
    return results


def refusals(groups: Groups, rank: int) -> dict[str, Any]:
    """Check that a NaN of one member raises on all members, and that the group works afterwards."""
    results: dict[str, Any] = {}
    for name in ("int8", "topk", "int4+zlib", "powersgd:rank=2"):
        bad = gradient(rank)
        if rank == 1:
            bad[96 * 300 + 5] = float("nan")
        try:
            sum_over(groups[3], bad, codec_named(name), CodecRound("g"), parts=PARTS)
            results[name] = "no error"
        except BarnraiseError as error:
            results[name] = f"{error.code}: {error.message}"
        codec_round = CodecRound("g", 1)
        nan = sum_over(groups[3], bad, codec_named(name), codec_round, parts=PARTS, if_not_finite="nan")
        results[f"{name}/nan"] = bool(nan.values.isnan().all())
        good = sum_over(groups[3], gradient(rank), codec_named(name), codec_round, parts=PARTS)
        results[f"{name}/after"] = digest(good.values)
        try:
            sum_over(groups[3], bad, codec_named(name), codec_round, parts=PARTS, sites=[[0], [1, 2]])
        except BarnraiseError as error:
            results[f"{name}/sites"] = f"{error.code}: {error.message}"
    large = torch.full((500,), 3e38)
    try:
        sum_over(groups[3], large, codec_named("bf16"), CodecRound("large"))
    except BarnraiseError as error:
        results["large"] = error.message
    try:
        sum_over(groups[3], large, codec_named("bf16"), CodecRound("large"), sites=[[0], [1, 2]])
    except BarnraiseError as error:
        results["large/sites"] = error.message
    power = PowerSGD(rank=2, seed=rank)
    try:
        sum_over(groups[3], gradient(rank), power, CodecRound("g"), parts=PARTS)
    except BarnraiseError as error:
        results["factors"] = error.code
    return results


def training(groups: Groups, rank: int) -> dict[str, Any]:
    """A small model, plain and with hooks: first and last loss, and the bits of the parameters."""
    results: dict[str, Any] = {}
    for number, name in enumerate((None, *HOOKS, "int8+zlib")):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        ddp = DistributedDataParallel(model, process_group=groups[3], bucket_cap_mb=0.016)
        state = None
        if name is not None:
            sites = [[0, 2], [1]] if name == "int8+zlib" else []
            state = compress_gradients(ddp, name, overlaps=number % 2 == 0, sites=sites)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        source = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(24):
            x = torch.randn(32, 20, generator=source)
            loss = (ddp(x).squeeze(1) - torch.sin(x.sum(1) / 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        bits = digest(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
        results[name or "plain"] = [bits, sum(losses[:3]) / 3, sum(losses[-8:]) / 8]
        if state is not None:
            assert state.step == 24
            kept = state.state_dict()["feedback"]["residuals"]
            assert set(kept) == {key for key, _ in model.named_parameters()}
    return results


def member(backend: str, rank: int, room: Path) -> None:
    torch.set_num_threads(1)
    if backend == "barnraise":
        from barnraise.collectives.torch_patch.autoload import register

        register()
    store = dist.FileStore(str(room / "store"), WORLD)
    limit = timedelta(seconds=100)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=limit)
    groups = {world: dist.new_group(list(range(world))) for world in (2, 3, 4)}
    chunk_numbers, sharded.CHUNK_NUMBERS = sharded.CHUNK_NUMBERS, 17_000  # one piece and a short one
    results: dict[str, Any] = {"one_sum": one_sum(groups, rank), "through_sites": through_sites(groups, rank)}
    results["tiny"], results["paid_back"] = tiny(groups, rank), paid_back(groups, rank)
    sharded.CHUNK_NUMBERS = chunk_numbers
    results["long_run"] = long_run(groups, rank)
    results["repeated_step"] = repeated_step(groups, rank)
    if rank < 3:
        results["refusals"] = refusals(groups, rank)
        results["training"] = training(groups, rank)
    (room / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    backend, room = sys.argv[1], Path(sys.argv[2])
    return fork_all(partial(member, backend, rank, room) for rank in range(WORLD))


if __name__ == "__main__":
    sys.exit(main())
