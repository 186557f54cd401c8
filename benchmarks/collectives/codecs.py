"""Compression, error and CPU time of each codec, and the time of an all-reduce of 25 MB with it.

    python -m benchmarks.collectives.codecs --quick     about 8 minutes on an idle machine
    python -m benchmarks.collectives.codecs             more rounds

The gradients are real: a transformer of 6.4 million parameters reads this repository's documents. The codecs
are timed alone, in MB of float32 input per second of one core. Then four lab hosts sum such gradients at four
rates. The contenders are our backend (encrypted), plain and with codecs and error feedback, and torch's hooks
on Gloo (in the clear). The hosts share this machine's cores, so encoding weighs more here than on separate
machines. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power

from barnraise.compression import (
    Codec,
    CodecRound,
    ErrorFeedback,
    FeedbackPart,
    PowerSGD,
    codec_named,
    sum_over,
)
from barnraise.compression.codecs.powersgd import orthonormal, restore
from benchmarks.ranks.hosts import PROCESS_ENVIRONMENT, identities, prepare_driver, working_directory
from benchmarks.ranks.measure import CpuMeter
from benchmarks.report import REPOSITORY, Spread, durations, environment_line, last_line, table
from lab import Lab, LabProcess, why_unavailable

HOSTS = 4
RATES = ("1gbit", "200mbit", "50mbit", "20mbit")
CODECS = (
    *("fp32", "fp16", "bf16", "int8", "int4", "int4:block=64", "topk", "randomk", "powersgd:rank=4"),
    *("fp32+zlib", "bf16+zlib", "int8+zlib", "int4+zlib"),
)
IN_THE_LAB = (
    *("fp16", "int8", "int4", "topk", "randomk", "powersgd:rank=4", "bf16+zlib", "int8+zlib", "int4+zlib"),
)
STEPS = 50
GRADIENTS = 8
PORT = 29531
WAIT_S = 900.0

Gradient = dict[str, torch.Tensor]
Operation = Callable[[torch.Tensor], torch.Tensor]


# gradients


class Reader(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.layers(self.embedding(text) / 16, mask=mask, is_causal=True)
        logits: torch.Tensor = hidden @ self.embedding.weight.t() / 16
        return logits


def real_gradients(count: int) -> list[Gradient]:
    """Return the gradients of ``count`` different batches, after a few steps of training."""
    torch.manual_seed(0)
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
    model, source = Reader(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    collected: list[Gradient] = []
    for _ in range(12 + count):
        starts = torch.randint(0, len(text) - 65, (8,), generator=source)
        batch = torch.stack([text[start : start + 65] for start in starts]).long()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        collected.append(dict(zip(names, gradients, strict=True)))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return collected[-count:]


def flat_of(gradient: Gradient) -> tuple[torch.Tensor, list[FeedbackPart]]:
    parts = [FeedbackPart(name, tuple(gradient[name].shape)) for name in sorted(gradient)]
    return torch.cat([gradient[part.name].reshape(-1) for part in parts]), parts


# codecs alone


def time_of(call: Callable[[], object], rounds: int) -> float:
    """Return the median CPU seconds of a call; the first call is not counted."""
    took = []
    for _ in range(rounds + 1):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return Spread.of(took[1:]).median


class Alone:
    """One member's encoding and decoding, for codecs and for PowerSGD alike."""

    def __init__(self, name: str, parts: Sequence[FeedbackPart]) -> None:
        self.codec = codec_named(name)
        self._parts = parts
        self.size = 0

    def encode(self, values: torch.Tensor, step: int) -> Any:
        if isinstance(self.codec, PowerSGD):
            return self._factors(self.codec, values, step)
        payload = self.codec.encode(values, CodecRound("gradient", step))
        self.size = payload.numel()
        return payload

    def decode(self, encoded: Any, numel: int, step: int) -> torch.Tensor:
        if isinstance(self.codec, Codec):
            return self.codec.decode(encoded, numel, CodecRound("gradient", step))
        decoded = torch.empty(numel)
        split, bases, factors, whole = encoded
        for matrix, p, q in zip(split.matrices, bases, factors, strict=True):
            restore(p, q, matrix.view(decoded))
        for span, values in zip(split.spans, whole, strict=True):
            decoded[span] = values
        return decoded

    def _factors(self, power: PowerSGD, values: torch.Tensor, step: int) -> Any:
        split = power.split(self._parts)
        bases = [orthonormal(matrix.view(values) @ power.factor(matrix, step)) for matrix in split.matrices]
        factors = [matrix.view(values).t() @ p for matrix, p in zip(split.matrices, bases, strict=True)]
        power.keep({matrix.name: q for matrix, q in zip(split.matrices, factors, strict=True)})
        whole = [values[span] for span in split.spans]
        self.size = 4 * sum(tensor.numel() for tensor in (*bases, *factors, *whole))
        return split, bases, factors, whole


def relative(actual: torch.Tensor, right: torch.Tensor) -> float:
    return float((actual - right).norm() / right.norm())


def measured_alone(
    name: str, gradients: Sequence[torch.Tensor], parts: Sequence[FeedbackPart], rounds: int
) -> dict[str, float]:
    first = gradients[0]
    subject = Alone(name, parts)
    encoded = subject.encode(first, 0)
    figures = {"ratio": 4 * first.numel() / subject.size}
    figures["error_once"] = relative(subject.decode(encoded, first.numel(), 0), first)
    size = 4 * first.numel() / 1e6
    figures["encode_mb_s"] = size / time_of(lambda: subject.encode(first, 0), rounds)
    figures["decode_mb_s"] = size / time_of(lambda: subject.decode(encoded, first.numel(), 0), rounds)
    return figures


def error_of_many(name: str, gradients: Sequence[torch.Tensor], parts: Sequence[FeedbackPart]) -> float:
    """Return the relative error of the sum of all steps, with error feedback."""
    subject, residual = Alone(name, parts), torch.zeros_like(gradients[0])
    sent, given = torch.zeros_like(residual), torch.zeros_like(residual)
    for step in range(STEPS):
        gradient = gradients[step % len(gradients)]
        residual.add_(gradient)
        decoded = subject.decode(subject.encode(residual, step), residual.numel(), step)
        residual.sub_(decoded)
        sent.add_(decoded)
        given.add_(gradient)
    return relative(sent, given)


def codecs_alone(gradients: Sequence[Gradient], rounds: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    flats, parts = [flat_of(gradient)[0] for gradient in gradients], flat_of(gradients[0])[1]
    figures, rows = {}, []
    for name in CODECS:
        row = figures[name] = measured_alone(name, flats, parts, rounds)
        base = name.removesuffix("+zlib")  # which loses nothing of its own
        row["error_50"] = error_of_many(name, flats, parts) if base == name else figures[base]["error_50"]
        errors = [f"{row[key]:.2g}" for key in ("error_once", "error_50")]
        rows.append([name, row["ratio"], *errors, row["encode_mb_s"], row["decode_mb_s"]])
    head = ["codec", "ratio", "error, once", f"error, sum of {STEPS}", "encode MB/s", "decode MB/s"]
    print(table(head, rows), flush=True)
    return figures


# in the lab: the driver


def all_reduces(gradients: Sequence[Gradient], rates: Sequence[str], quick: bool) -> dict[str, Any]:
    """Measure the median seconds by rate and contender, and the CPU seconds of all hosts together."""
    results: dict[str, Any] = {}
    with working_directory() as directory, Lab(hosts=HOSTS, rate=rates[0]) as lab:
        save_file(
            {
                f"{number}/{name}": tensor
                for number in range(HOSTS)
                for name, tensor in gradients[number].items()
            },
            directory / "gradients.safetensors",
        )
        members = _start_members(lab, directory)
        for number, rate in enumerate(rates):
            for host in lab.hosts:
                lab.set_rate(host, rate)
            rounds = {"1gbit": 5, "200mbit": 3}.get(rate, 1) * (1 if quick else 3)
            _put(directory / f"go-{number}", json.dumps({"rounds": rounds}))
            paths = [directory / f"done-{number}-{rank}" for rank in range(HOSTS)]
            _await(paths, members, WAIT_S * rounds)
            results[rate] = _shown(rate, [json.loads(path.read_text()) for path in paths])
        _put(directory / f"go-{len(rates)}", "{}")
        for member in members:
            member.wait(60)
    return results


def _start_members(lab: Lab, directory: Path) -> list[LabProcess]:
    started = []
    own = identities(directory, [host.address for host in lab.hosts])
    for rank, (host, identity) in enumerate(zip(lab.hosts, own, strict=True)):
        words = [
            sys.executable,
            "-m",
            "benchmarks.collectives.codecs",
            "--member",
            str(rank),
            "--directory",
            str(directory),
        ]
        words += ["--first", lab.hosts[0].address]
        environment = PROCESS_ENVIRONMENT | identity | {"GLOO_SOCKET_IFNAME": "eth0"}
        started.append(host.start(words, env=environment, cwd=REPOSITORY))
    return started


def _await(paths: Sequence[Path], members: Sequence[LabProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        dead = next((member for member in members if member.poll() is not None), None)
        if dead is not None or time.monotonic() > deadline:
            shown = "\n".join(member.output()[-2000:] for member in members)
            raise SystemExit(f"a member {'ended' if dead else 'is late'}:\n{shown}")
        time.sleep(0.05)


def _shown(rate: str, answers: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    rows: list[list[object]] = []
    for name in answers[0]["times"]:
        took = durations(answers, name)
        cpu = sum(times[2] for answer in answers for times in answer["times"][name]) / 1e9 / len(took)
        is_same = len({answer["digests"][name] for answer in answers}) == 1
        figures[name] = {"s": Spread.of(took).median, "least_s": min(took), "cpu_s": cpu}
        figures[name] |= {"error": answers[0]["errors"][name], "same_bits": is_same}
        faster = figures["fp32, ours"]["s"] / figures[name]["s"]
        error = f"{answers[0]['errors'][name]:.2g}"
        rows.append([name, Spread.of(took).median, min(took), faster, cpu, error, "yes" if is_same else "NO"])
    head = [f"25 MB over {HOSTS} hosts at {rate}", "seconds", "least", "times faster", "CPU s, all", "error"]
    print(table([*head, "same bits"], rows), flush=True)
    return figures


def _put(path: Path, text: str) -> None:
    """Write the file atomically, by way of a draft."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, path)


# in the lab: a member


class Bucket:
    """Stand-in for a DDP bucket, with the methods that torch's hooks call."""

    def __init__(self, buffer: torch.Tensor, parts: Sequence[FeedbackPart]) -> None:
        self._buffer, self._parts = buffer, parts

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        pieces = torch.split(self._buffer, [part.numel for part in self._parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, self._parts, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def contenders(parts: Sequence[FeedbackPart]) -> Iterator[tuple[str, Operation]]:
    """Yield each contender's name and its sum over all members, created again for each rate.

    Torch's hooks return the mean instead of the sum.
    """
    limit = timedelta(seconds=WAIT_S)
    ours = dist.new_group(backend="barnraise", timeout=limit)
    gloo = dist.new_group(backend="gloo", timeout=limit)

    def plain(group: Any) -> Operation:
        def run(values: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(values, group=group)
            return values

        return run

    def hook(call: Callable[[Any, Any], Any], state: Any) -> Operation:
        return lambda values: call(state, Bucket(values, parts)).wait()

    def by_codec(name: str) -> Operation:
        codec, feedback, step = codec_named(name), ErrorFeedback(), 0

        def run(values: torch.Tensor) -> torch.Tensor:
            nonlocal step
            step += 1
            summed = sum_over(
                ours, values, codec, CodecRound("gradient", step), parts=parts, feedback=feedback
            )
            summed.keep()
            return summed.values

        return run

    power = torch_power.PowerSGDState(gloo, matrix_approximation_rank=4, start_powerSGD_iter=2)
    power.iter = 2  # it begins at once instead of after two plain sums
    yield "fp32, ours", plain(ours)
    yield "fp32, Gloo", plain(gloo)
    yield "torch's fp16 hook, Gloo", hook(default_hooks.fp16_compress_hook, gloo)
    yield "torch's PowerSGD hook, rank 4, Gloo", hook(torch_power.powerSGD_hook, power)
    for name in IN_THE_LAB:
        yield name, by_codec(name)


def member(rank: int, directory: Path, first: str) -> None:
    from barnraise.collectives.torch_patch.autoload import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{first}:{PORT}",
        rank=rank,
        world_size=HOSTS,
        timeout=timedelta(seconds=WAIT_S),
    )
    stored = load_file(directory / "gradients.safetensors")
    flats = []
    for number in range(HOSTS):
        prefix = f"{number}/"
        own = {
            name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)
        }
        flat, parts = flat_of(own)
        flats.append(flat)
    right = torch.stack(flats).sum(0)
    number = 0
    while True:
        go = directory / f"go-{number}"
        while not go.exists():
            time.sleep(0.05)
        order = json.loads(go.read_text())
        if not order:
            break
        answer = one_rate(flats[rank], right, list(contenders(parts)), order["rounds"])
        _put(directory / f"done-{number}-{rank}", json.dumps(answer))
        number += 1
    dist.destroy_process_group()


def one_rate(
    gradient: torch.Tensor, right: torch.Tensor, runs: Sequence[tuple[str, Operation]], rounds: int
) -> dict[str, Any]:
    answer: dict[str, Any] = {"times": {name: [] for name, _ in runs}, "errors": {}, "digests": {}}
    for name, run in runs:
        if name.startswith("fp32"):
            run(gradient[:4096].clone())  # so that every connection is there
    meter = CpuMeter()
    for turn in range(rounds):
        for name, run in runs:
            values = gradient.clone()
            dist.barrier()
            cpu = meter.read()
            start = time.monotonic_ns()
            total = run(values)
            end = time.monotonic_ns()
            answer["times"][name].append([start, end, meter.read() - cpu])
            if turn == 0:
                scale = HOSTS if "hook" in name else 1
                answer["errors"][name] = relative(total * scale, right)
                answer["digests"][name] = hashlib.sha256(total.numpy().tobytes()).hexdigest()
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["codecs", "lab"])
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member is not None:
        member(options.member, options.directory, options.first)
        return 0
    prepare_driver()
    print(environment_line())
    gradients = real_gradients(GRADIENTS)
    figures: dict[str, Any] = {}
    if options.only in (None, "codecs"):
        figures["codecs"] = codecs_alone(gradients, 5 if options.quick else 15)
    if options.only in (None, "lab"):
        if (why := why_unavailable()) is not None:
            raise SystemExit(f"no lab here: {why}")
        figures["all_reduce"] = all_reduces(gradients, options.rates.split(","), options.quick)
    last_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
