"""Placement of a model's blocks: the sizes of its parts, the memory of a stage, and the stages. Pure."""

from __future__ import annotations

from typing import NamedTuple

_OPTIMIZER = 3  # gradient and both moments of Adam, beside the value itself


class PartSize(NamedTuple):
    """Size of a part of the model. ``activation_bytes``: what a micro-batch keeps for its backward pass."""

    frozen_bytes: int
    trained_bytes: int = 0
    activation_bytes: int = 0


class ModelParts(NamedTuple):
    """The parts of a model in the order of its forward pass.

    ``before`` and ``after``: what the first and the last stage hold beside their blocks. ``boundary_bytes``:
    the activations of a micro-batch between two blocks. ``tied_bytes``: what both ends hold, and a machine
    with the whole model only once.
    """

    before: PartSize
    blocks: tuple[PartSize, ...]
    after: PartSize
    boundary_bytes: int = 0
    tied_bytes: int = 0


class StagePlacement(NamedTuple):
    """Stages of a pipeline. ``order``: the number of the machine of each stage. ``runs``: its blocks.

    A run has the first block and the one after the last. ``why`` and ``why_spare``: sentences about machines
    with and without blocks. ``needs``: memory of each stage.
    """

    order: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    why: tuple[str, ...] = ()
    why_spare: tuple[str, ...] = ()
    needs: tuple[int, ...] = ()

    def run_of(self, machine: int) -> tuple[int, int] | None:
        """Return the blocks of a machine; None if it has none."""
        return self.runs[self.order.index(machine)] if machine in self.order else None


def stage_bytes(
    parts: ModelParts,
    first: int,
    end: int,
    *,
    stages: int,
    place: int,
    batches: int,
    order: str = "1F1B",
    is_mirror: bool = True,
) -> int:
    """Return the memory that a stage needs; ``batches``: micro-batches of a step.

    In 1F1B, a stage keeps the activations of its own micro-batch, and of two for each stage after it. In
    GPipe, it keeps those of all. It has buffers for the boundaries of all micro-batches of a step. If it
    ``is_mirror``, it mirrors what another stage trains, which is taken to be as large as its own.
    """
    held = held_parts(parts, first, end)
    is_whole = first == 0 and end == len(parts.blocks)
    frozen = sum(part.frozen_bytes for part in held) - (parts.tied_bytes if is_whole else 0)
    trained = mirror_bytes(parts, first, end)
    mirrored = trained if stages > 1 and is_mirror else 0
    in_flight = min(2 * (stages - 1 - place) + 1, batches) if order == "1F1B" or stages == 1 else batches
    activations = in_flight * sum(part.activation_bytes for part in held)
    buffers = 2 * batches * parts.boundary_bytes if stages > 1 else 0
    return frozen + trained + mirrored + activations + buffers


def mirror_bytes(parts: ModelParts, first: int, end: int) -> int:
    """Return the memory that a mirror of a stage needs: for what is trained, and for its optimizer."""
    return sum(part.trained_bytes for part in held_parts(parts, first, end)) * (1 + _OPTIMIZER)


def held_parts(parts: ModelParts, first: int, end: int) -> list[PartSize]:
    """Return the parts of the stage of these blocks."""
    return [
        *([parts.before] if first == 0 else []),
        *parts.blocks[first:end],
        *([parts.after] if end == len(parts.blocks) else []),
    ]


def whole_bytes(parts: ModelParts, batches: int) -> int:
    """Return the memory that the whole model needs on one machine."""
    return stage_bytes(parts, 0, len(parts.blocks), stages=1, place=0, batches=batches)
