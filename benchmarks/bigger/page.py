"""Page of the benchmark in docs/benchmarks: written from the figures of one run, and kept beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import REPOSITORY, rounded

FOLDER = REPOSITORY / "docs" / "benchmarks"
_NOT_MEASURED = "not measured"


class Goal(NamedTuple):
    """Bound of a figure, and which side of it is good."""

    bound: float
    is_most: bool = True

    def text(self) -> str:
        """Return the goal as a reader sees it."""
        return f"{'<=' if self.is_most else '>='} {self.bound:g}"

    def holds(self, value: float) -> bool:
        """Tell whether a value meets the goal."""
        return value <= self.bound if self.is_most else value >= self.bound


class Line(NamedTuple):
    """Row of the table. ``show``: formats the figure."""

    name: str
    meaning: str
    goal: Goal | None = None
    show: Callable[[Any], str] = lambda value: f"{value:.3g}"


LINES = (
    Line(
        "peak_memory_over_limit",
        "largest memory that a host held, over its hard limit; of all hosts and runs. The kernel never lets "
        "it be more: then it kills, which the next line counts",
        Goal(1.0),
    ),
    Line(
        "oom_kills", "processes that the kernel killed because of a limit, those of FSDP2 included", Goal(0)
    ),
    Line("model_over_limit", "bytes of the weights over the largest limit"),
    Line(
        "loss_gap",
        "largest difference of a step's loss from the same step of one process without a limit, in float32",
        Goal(1e-5),
        lambda value: f"{value:.1e}",
    ),
    Line(
        "prediction_error",
        "difference of the predicted seconds of a step from the measured ones, over these",
        Goal(0.15),
    ),
    Line("over_fsdp2", "median step of FSDP2 over ours; the median of the rounds", Goal(5, is_most=False)),
    Line(
        "share_of_bound",
        "seconds of a step that the slowest stage or link allows, over the measured ones; the median",
        Goal(0.8, is_most=False),
    ),
    Line("kills", "deaths at random moments of a step: of a worker, or of a whole host"),
    Line(
        "kill_to_commit_s_p95",
        "from a death to the first commit of a step that the others computed: the 95th percentile",
        Goal(15),
    ),
    Line("detect_s", "of which: until another host leaves the group (median)"),
    Line("regroup_s", "until the first of them loads weights (median)"),
    Line("load_s", "until the last of them has loaded (median)"),
    Line("step_s", "until the commit (median)"),
    Line("samples_lost", "samples of steps that no host has committed", Goal(0)),
    Line("samples_doubled", "samples of steps that count twice", Goal(0)),
    Line(
        "stage_state_bytes_moved",
        "trained state that hosts received for their stages because of a death, over what the dead host "
        "trained; the largest",
        Goal(1.1),
    ),
    Line("mirror_state_bytes_moved", "the same, for the mirrors that they keep of each other"),
)


_HEAD = """
# A model that fits on no host

`{command}`: three hosts of [the lab](../lab.md) at 1 Gbit/s
fine-tune a [split model](../split.md) with LoRA. This command writes the page.

    {environment}

A Llama-shaped model in float32 has {billions:.2f} billion parameters, which are {gigabytes:.2f} GB. All
processes of a host are in control groups with two limits.

- Memory: {limits} GB, a hard limit (`memory.limit_in_bytes`).
- Processors: {cores} of the computer's cores (`cpu.cfs_quota_us`).
"""
_MEMORY = """
## How it is measured

**Memory** is what the kernel charges to the group of a host, read ten times a second. It is without page
cache that the kernel can drop. The base is in files that each host reads.
"""
_SPEED = """
**Speed.** A step has {micro_batches} micro-batches of {tokens_of_micro_batch} tokens. It takes {ours} s
split, and {theirs} s with FSDP2, in turns on the same hosts. Few tokens favour the split: its traffic grows
with them, and that of FSDP2 does not.

- The bound of a stage is the number of micro-batches times its mean seconds for one, forward and backward.
They are measured in the same run. The slowest stage counts, or a link, if that is slower. The pipeline fills
and drains in addition. The agent and encryption make passes longer, too. This figure does not show that, but
`over_fsdp2` does.
- FSDP2 shards each block over the hosts (`fully_shard`, on Gloo, without encryption). A step is one forward
and one backward pass with all samples of a host. Faster hosts get more of them. The next block is gathered
while one computes, and as many blocks as fit stay whole between both passes. For it, each host has 15 % more
memory: otherwise the kernel sometimes kills it. The hosts held {held:.2f} of our limits.
- Both ways start with the same loss, to {fsdp2_first_loss_gap:.0e}.
"""
_KILLS = """
**Kills.** A step has {micro_batches_with_kills} micro-batches here. The moments and the victims are random
(seed {seed}). Two of five deaths take all processes of a host, its agent included, and the others its
worker. All hosts read the base from one disk, whose pages may be in memory: a real disk takes longer. After
the first step without a host, the others wait until its worker has started again. One process
without a limit also computed all {steps_with_kills} steps.
"""


def render(figures: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    given = {
        **figures,
        "billions": figures["parameters"] / 1e9,
        "gigabytes": figures["model_bytes"] / 1e9,
        "limits": ", ".join(f"{limit / 1000:.1f}" for limit in figures["limits_mb"]),
        "cores": ", ".join(f"{cores:g}" for cores in figures["cores"]),
        "ours": _seconds(figures.get("split_step_s", ())),
        "theirs": _seconds(figures.get("fsdp2_step_s", ())),
        "held": figures.get("fsdp2_peak_over_limit"),
    }
    rows = [_row(line, figures.get(line.name)) for line in LINES]
    parts = [
        _text(_HEAD, given),
        "\n".join(["| Figure | Meaning | Measured | Goal |", "|---|---|---|---|", *rows]),
        _text(_MEMORY, given),
        *([_text(_SPEED, given)] if "split_step_s" in figures else []),
        *([_text(_KILLS, given)] if "kills" in figures else []),
    ]
    return "\n\n".join(parts) + "\n"


def _text(template: str, given: Mapping[str, Any]) -> str:
    """Return a text with its values, each paragraph and each item of a list in one line."""
    lines: list[str] = []
    for line in template.strip().splitlines():
        if line and lines and lines[-1] and not line.startswith(("- ", "#", " ")):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines).format(**given)


def _row(line: Line, value: Any) -> str:
    shown = _NOT_MEASURED if value is None else line.show(value)
    goal = line.goal.text() if line.goal is not None else ""
    if value is not None and line.goal is not None and not line.goal.holds(value):
        shown += " (missed)"
    return f"| `{line.name}` | {line.meaning} | {shown} | {goal} |"


def _seconds(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.2f}" for value in values)


def write(figures: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Write the page, and the figures beside it."""
    kept = rounded(figures)
    (folder / "bigger.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    (folder / "bigger.md").write_text(render(kept), encoding="utf-8")
