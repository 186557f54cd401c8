"""Placement of a model's blocks: which machine holds which run of them, and why. Pure.

A pipeline is as fast as its slowest stage. So the runs are chosen that fit into memory and make the slowest
stage the fastest. Machines keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from barnraise.core.errors import RunError
from barnraise.core.units import format_size

_OPTIMIZER = 3  # gradient and both moments of Adam, beside the value itself


class PartSize(NamedTuple):
    """Size of a part of the model. ``activation_bytes``: what a micro-batch keeps for its backward pass."""

    frozen_bytes: int
    trained_bytes: int = 0
    activation_bytes: int = 0


class ModelParts(NamedTuple):
    """The parts of a model in the order of its forward pass.

    ``before`` and ``after``: what the first and the last stage hold beside their blocks. ``boundary_bytes``:
    the activations of a micro-batch between two blocks.
    """

    before: PartSize
    blocks: tuple[PartSize, ...]
    after: PartSize
    boundary_bytes: int = 0


class StageMachine(NamedTuple):
    """A machine for one stage. ``memory_bytes``: 0 if unknown. ``block_s``: seconds of a block; or 0.

    ``link_s``: seconds in which the activations of a micro-batch reach the next machine; 0 if unknown.
    """

    name: str
    memory_bytes: int = 0
    block_s: float = 0.0
    link_s: float = 0.0


class StagePlacement(NamedTuple):
    """Runs of blocks by machine: the first one, and the one after the last. ``why``: sentences."""

    runs: tuple[tuple[int, int], ...]
    why: tuple[str, ...]


def stage_bytes(parts: ModelParts, first: int, end: int, *, stages: int, place: int, batches: int) -> int:
    """Return the memory that a stage needs; ``batches``: micro-batches of a step.

    In 1F1B, a stage keeps the activations of its own micro-batch, and of two for each stage after it. It
    has buffers for the boundaries of all micro-batches of a step. It also mirrors what the stage before it
    has trained, which is taken to be as large as its own.
    """
    held = _held_parts(parts, first, end)
    frozen = sum(part.frozen_bytes for part in held)
    trained = mirror_bytes(parts, first, end)
    mirrored = trained if stages > 1 else 0
    in_flight = min(2 * (stages - 1 - place) + 1, batches)
    activations = in_flight * sum(part.activation_bytes for part in held)
    buffers = 2 * batches * parts.boundary_bytes if stages > 1 else 0
    return frozen + trained + mirrored + activations + buffers


def mirror_bytes(parts: ModelParts, first: int, end: int) -> int:
    """Return the memory that a mirror of a stage needs: for what is trained, and for its optimizer."""
    return sum(part.trained_bytes for part in _held_parts(parts, first, end)) * (1 + _OPTIMIZER)


def _held_parts(parts: ModelParts, first: int, end: int) -> list[PartSize]:
    return [
        *([parts.before] if first == 0 else []),
        *parts.blocks[first:end],
        *([parts.after] if end == len(parts.blocks) else []),
    ]


def place_stages(parts: ModelParts, machines: Sequence[StageMachine], batches: int) -> StagePlacement:
    """Return the runs of blocks for these machines, each with one block at least.

    Raise RunError if the model does not fit, with what is missing, or if there are fewer blocks than
    machines.
    """
    count, stages = len(parts.blocks), len(machines)
    if stages > count:
        raise RunError(
            f"a model of {count} blocks cannot be split over {stages} machines",
            hint=f"Start the run on {count} machines at most.",
        )
    known = [machine.block_s for machine in machines if machine.block_s > 0]
    mean_s = sum(known) / len(known) if known else 1.0
    block_s = [machine.block_s or mean_s for machine in machines]

    def cost(place: int, first: int, end: int) -> float:
        machine = machines[place]
        need = stage_bytes(parts, first, end, stages=stages, place=place, batches=batches)
        if machine.memory_bytes and need > machine.memory_bytes:
            return math.inf
        # The embeddings and the head take time too: the head of a small model as much as a block.
        extra = end == count
        return max((end - first + extra) * block_s[place], machine.link_s)

    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for place in range(stages):
        for end in range(place + 1, count + 1):
            for first in range(place, end):
                if best[place][first] < math.inf:
                    slowest = max(best[place][first], cost(place, first, end))
                    if slowest < best[place + 1][end]:
                        best[place + 1][end], cut[place + 1][end] = slowest, first
    if best[stages][count] == math.inf:
        raise RunError(
            _what_is_missing(parts, machines, batches), hint="Add a machine, or take a smaller model."
        )
    ends = [count]
    for place in range(stages, 0, -1):
        ends.append(cut[place][ends[-1]])
    ends.reverse()
    runs = tuple(pairwise(ends))
    return StagePlacement(runs, tuple(_reasons(parts, machines, runs, batches, is_measured=bool(known))))


def fits_alone(parts: ModelParts, machine: StageMachine, batches: int) -> bool:
    """Tell whether the whole model fits on one machine whose memory is known."""
    need = stage_bytes(parts, 0, len(parts.blocks), stages=1, place=0, batches=batches)
    return 0 < need <= machine.memory_bytes


def _what_is_missing(parts: ModelParts, machines: Sequence[StageMachine], batches: int) -> str:
    need = stage_bytes(parts, 0, len(parts.blocks), stages=1, place=0, batches=batches)
    memory = sum(machine.memory_bytes for machine in machines)
    names = ", ".join(f"{machine.name} {format_size(machine.memory_bytes)}" for machine in machines)
    if need > memory:
        more = format_size(need - memory)
        return f"the model needs {format_size(need)}, which is {more} more than all have: {names}"
    largest = max(parts.blocks, key=lambda part: part.frozen_bytes)
    return (
        f"the model needs {format_size(need)}, in parts that do not fit on these machines in this order: "
        f"{names}; a block has {format_size(largest.frozen_bytes)}"
    )


def _reasons(
    parts: ModelParts,
    machines: Sequence[StageMachine],
    runs: Sequence[tuple[int, int]],
    batches: int,
    *,
    is_measured: bool,
) -> list[str]:
    lines = []
    for place, ((first, end), machine) in enumerate(zip(runs, machines, strict=True)):
        need = stage_bytes(parts, first, end, stages=len(machines), place=place, batches=batches)
        of = f" of {format_size(machine.memory_bytes)}" if machine.memory_bytes else ""
        lines.append(f"{machine.name} computes blocks {first + 1} to {end} and needs {format_size(need)}{of}")
    if len(machines) > 1 and not is_measured:
        lines.append("the machines' speeds are not measured yet, so they count as equal")
    alone = [machine for machine in machines if len(machines) > 1 and fits_alone(parts, machine, batches)]
    if alone:
        fastest = min(alone, key=lambda machine: machine.block_s)
        lines.append(f"the model fits on {fastest.name} alone, which may be faster than a split")
    return lines
