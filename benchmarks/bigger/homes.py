"""Split models on typical homes, by the planner's arithmetic. Simulated: nothing of this was run.

    python -m benchmarks.bigger.homes             print the tables
    python -m benchmarks.bigger.homes --write     and put them into docs/benchmarks/bigger-homes.md

Each model is fine-tuned with LoRA and gradient checkpointing. The machines' figures are public ones. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from barnraise.core.errors import RunError
from barnraise.planning.split.language_model import LORA_RANK, NUMBER_BYTES, LanguageShape
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.split_rivals import (
    Rival,
    RivalKind,
    SplitPrice,
    price_rivals,
    price_run,
    recommend,
)
from barnraise.planning.split.stage_placement import ModelParts
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates
from benchmarks.report import REPOSITORY, last_line

PAGE = REPOSITORY / "docs" / "benchmarks" / "bigger-homes.md"
TOKENS, SAMPLES = 1024, 16  # of a sample, and of a step; a micro-batch is one sample
RANK = LORA_RANK
REACHED = 0.35  # of the peak of a device
CARRIED = 0.94  # of the rate of a line
COPIED = 0.8  # of the rate of PCIe
_GB = 1e9
_FOUR_BITS = 4.5 / 8  # NF4, with a scale of four bytes for 64 numbers
_HEAD_WIDTH = 128


class Device(NamedTuple):
    """Machine by its public figures. ``usable``: share of the memory that a training gets.

    ``tflops``: peak of matrix products. ``read_gbs``: memory bandwidth. ``host_gb``: memory of the computer
    beside that of the card. ``copy_gbs``: of PCIe; 0 without a card. ``disk_gbs``: of its SSD.
    """

    name: str
    memory_gb: float
    usable: float
    tflops: float
    read_gbs: float
    host_gb: float
    copy_gbs: float
    disk_gbs: float
    source: str


class Shape(NamedTuple):
    """Shape of a language model, from its public configuration. ``keys``: heads of keys and values."""

    name: str
    hidden: int
    inner: int
    layers: int
    keys: int
    words: int

    @property
    def language(self) -> LanguageShape:
        """Return the shape as the planner takes it."""
        narrow = self.keys * _HEAD_WIDTH
        return LanguageShape(self.hidden, self.inner, self.layers, self.hidden, narrow, self.words)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Return the sizes of the matrices of a block."""
        return self.language.matrices


class Home(NamedTuple):
    """Machines with one kind of line between all of them."""

    name: str
    devices: tuple[str, ...]
    mbps: float
    latency_s: float


class Case(NamedTuple):
    """A model in one home, with its prices. ``split``: None if it does not fit."""

    home: Home
    shape: Shape
    bits: int
    split: SplitPrice | None
    rivals: tuple[Rival, ...]
    words: str


_AMPERE = "NVIDIA Ampere GA102 whitepaper (rates of each SM, float32 sums) and GeForce product page"
_ADA = "NVIDIA Ada whitepaper (float32 sums) and GeForce product page"
_APPLE = "Apple, technical specifications; Apple gives no TFLOP/s: as `barnraise plan`"
_MAC = 2 / 3  # of its memory, which macOS lets the GPU take
_CARD = 0.9
DEVICES = (
    Device("RTX 3060 12 GB", 12, _CARD, 25.5, 360, 32, 31.5, 3.5, _AMPERE),
    Device("RTX 3090 24 GB", 24, _CARD, 71.0, 936, 64, 31.5, 3.5, _AMPERE),
    Device("RTX 4070 12 GB", 12, _CARD, 58.3, 504, 32, 31.5, 3.5, _ADA),
    Device("RTX 4090 24 GB", 24, _CARD, 165.2, 1008, 64, 31.5, 3.5, _ADA),
    Device("Mac mini M4 16 GB", 16, _MAC, 4.3, 120, 0, 0, 2.9, _APPLE),
    Device("MacBook Pro M4 Max 36 GB", 36, _MAC, 18.4, 410, 0, 0, 5.0, _APPLE),
    Device(
        "laptop i5-8250U 16 GB",
        16,
        0.7,
        0.32,
        34.1,
        0,
        0,
        0.5,
        "Intel ARK; 4 cores, 32 operations per cycle (AVX2), 2.5 GHz",
    ),
)
SHAPES = (
    Shape("Llama 3.1 8B", 4096, 14336, 32, 8, 128256),
    Shape("Qwen 2.5 32B", 5120, 27648, 64, 8, 152064),
    Shape("Llama 3.1 70B", 8192, 28672, 80, 8, 128256),
)
HOMES = (
    Home(
        "A PC, a Mac mini and an old laptop",
        ("RTX 3060 12 GB", "Mac mini M4 16 GB", "laptop i5-8250U 16 GB"),
        1000.0,
        0.0002,
    ),
    Home(
        "Two large cards and a MacBook",
        ("RTX 4090 24 GB", "RTX 3090 24 GB", "MacBook Pro M4 Max 36 GB"),
        2500.0,
        0.0002,
    ),
    Home(
        "Three gaming PCs",
        ("RTX 4070 12 GB", "RTX 3060 12 GB", "RTX 3060 12 GB"),
        1000.0,
        0.0002,
    ),
    Home(
        "Four friends over the internet",
        ("RTX 4090 24 GB", "RTX 3090 24 GB", "RTX 4070 12 GB", "MacBook Pro M4 Max 36 GB"),
        50.0,
        0.015,
    ),
)
BITS = (16, 4)
_COLUMNS: tuple[tuple[RivalKind, str], ...] = (
    ("fewer", "split over fewer"),
    ("alone", "one alone"),
    ("memory", "one, weights in RAM"),
    ("disk", "one, weights on disk"),
    ("sharded", "FSDP2"),
)
_INTRO = f"""\
# Split models at home, simulated

**Nothing of this was run.** `python -m benchmarks.bigger.homes --write` computes this page from public \
figures of the machines, with the functions that place a [split model](../split.md) and predict its steps. \
It shows where a split can be the right choice, and where it is not.

- A step trains {SAMPLES} samples of {TOKENS} tokens with LoRA (rank {RANK}, all linear layers) and gradient \
checkpointing, one sample in each micro-batch.
- A device computes at {REACHED:.0%} of its peak, and reads its weights at its full memory bandwidth. The \
slower of both counts. A line carries {CARRIED:.0%} of its rate.
- 16 bits: two bytes for each parameter. 4 bits: 4.5 bits for each parameter of a block (`base="nf4"`), \
and two bytes for those of embeddings and head.
- Cards keep {1 - _CARD:.0%} of their memory free, Macs a third of it, and the laptop 30%. The memory inside \
a block while it is computed is not counted.
- The rivals are favoured: reading and sending overlap with computing, and micro-batches are computed \
together as far as memory allows. "RAM" is the memory of the same computer, over PCIe at {COPIED:.0%} of its \
rate. Weights in RAM or on disk need another program.
- A figure is the predicted time of a step. "-": it does not fit. "slower": one machine alone, which holds \
all weights, is faster. "none": the split uses no more than two machines.
"""


def parts_of(shape: Shape, bits: int) -> ModelParts:
    """Return the sizes of a model's parts."""
    return shape.language.parts(TOKENS, NUMBER_BYTES if bits == 16 else _FOUR_BITS)


def speed_of(device: Device, shape: Shape, parts: ModelParts) -> BlockSpeed:
    """Return the seconds of a micro-batch on a device; the backward pass computes a block once more."""
    flops = shape.language.block_flops(TOKENS)
    forward_s = _seconds(device, flops, parts.blocks[0].frozen_bytes)
    head_s = _seconds(device, shape.language.head_flops(TOKENS), parts.after.frozen_bytes)
    return BlockSpeed(forward_s, 2 * forward_s, after_s=2 * head_s)


def _seconds(device: Device, flops: float, read: float) -> float:
    return max(flops / (device.tflops * 1e12 * REACHED), read / (device.read_gbs * _GB))


def problem_of(home: Home, shape: Shape, bits: int) -> SplitProblem:
    """Return a model and the machines of a home as the planner takes them."""
    parts = parts_of(shape, bits)
    devices = {device.name: device for device in DEVICES}
    machines = []
    for place, name in enumerate(home.devices):
        device = devices[name]
        again = home.devices[:place].count(name)
        machines.append(
            SplitMachine(
                f"{name} ({again + 1})" if again else name,
                round(device.usable * device.memory_gb * _GB),
                speed_of(device, shape, parts),
                round(device.host_gb * _GB),
                COPIED * device.copy_gbs * _GB,
                device.disk_gbs * _GB,
            )
        )
    count = range(len(machines))
    rate = CARRIED * home.mbps * 1e6 / 8
    links = LinkRates(
        tuple(tuple(rate for _ in count) for _ in count),
        tuple(tuple(0.0 if a == b else home.latency_s for b in count) for a in count),
    )
    return SplitProblem(parts, tuple(machines), links, SAMPLES, parts.boundary_bytes)


def cases() -> Iterator[Case]:
    """Yield each model in each home."""
    for home in HOMES:
        for shape in SHAPES:
            for bits in BITS:
                problem = problem_of(home, shape, bits)
                split = None
                try:
                    split = price_run(problem)
                except RunError:  # the model does not fit
                    pass
                rivals = price_rivals(problem)
                yield Case(home, shape, bits, split, rivals, recommend(split, rivals))


def render(computed: Sequence[Case]) -> str:
    """Return the page as Markdown."""
    lines = [_INTRO, "## Machines", ""]
    head = ("machine", "memory", "TFLOP/s", "GB/s", "RAM beside it", "PCIe", "SSD", "source")
    rows: list[Sequence[str]] = [
        (
            device.name,
            f"{device.memory_gb:g} GB",
            f"{device.tflops:g}",
            f"{device.read_gbs:g}",
            f"{device.host_gb:g} GB" if device.host_gb else "-",
            f"{device.copy_gbs:g} GB/s" if device.copy_gbs else "-",
            f"{device.disk_gbs:g} GB/s",
            device.source,
        )
        for device in DEVICES
    ]
    lines += [*_table(head, rows), "", "RAM and SSDs are assumptions about a usual computer of that kind."]
    for home in HOMES:
        lines += ["", f"## {home.name}", "", f"{', '.join(home.devices)}; {_line(home)}.", ""]
        own = [case for case in computed if case.home == home]
        titles = ("model", "split", "it is limited by", *(title for _, title in _COLUMNS))
        lines += _table(titles, [_row(case) for case in own])
        lines += ["", *(f"- {case.shape.name}, {case.bits} bits: {case.words}" for case in own)]
    return "\n".join(lines) + "\n"


def _line(home: Home) -> str:
    return f"{home.mbps:g} Mbit/s and {1e3 * home.latency_s:g} ms between any two"


def _row(case: Case) -> list[str]:
    by_kind = {rival.kind: rival for rival in case.rivals}
    split = case.split
    return [
        f"{case.shape.name}, {case.bits} bits",
        _time(split.step.step_s if split is not None else None),
        split.step.limit if split is not None else "-",
        *(_time(by_kind[kind].step_s) if kind in by_kind else _absent(kind, split) for kind, _ in _COLUMNS),
    ]


def _absent(kind: RivalKind, split: SplitPrice | None) -> str:
    """Return why a rival is not priced."""
    if kind == "fewer":
        return "none" if split is not None else "-"
    return "slower" if kind in ("memory", "disk") else "-"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def figures_of(computed: Sequence[Case]) -> dict[str, Any]:
    """Return the prices by home and model."""
    figures: dict[str, Any] = {"is_simulated": True}
    for case in computed:
        prices: dict[str, Any] = {rival.kind: rival.step_s for rival in case.rivals}
        if case.split is not None:
            step = case.split.step
            prices |= {"split": step.step_s, "bound": step.bound_s, "limit": step.limit}
        figures.setdefault(case.home.name, {})[f"{case.shape.name}, {case.bits} bits"] = prices
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(REPOSITORY)}")
    options = parser.parse_args()
    computed = list(cases())
    text = render(computed)
    print(text)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    last_line(figures_of(computed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
