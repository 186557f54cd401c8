"""Problem of splitting a model: its parts, the machines, the links between them, and the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.planning.split.stage_placement import ModelParts, stage_bytes, whole_bytes
from barnraise.planning.split.stage_time import (
    FORWARD_SHARE,
    BlockSpeed,
    LinkRates,
    StageOrder,
    fill_unknown,
)


class SplitMachine(NamedTuple):
    """Machine of a split model. ``memory_bytes``: of its device; 0 if unknown.

    ``host_bytes``: memory of the computer beside that. ``host_rate`` and ``disk_rate``: bytes per second from
    there to the device; 0 if they are assumed. ``move_s``: what moving each block to it adds to a step; empty
    if that does not matter.
    """

    name: str
    memory_bytes: int
    speed: BlockSpeed = BlockSpeed()
    host_bytes: int = 0
    host_rate: float = 0.0
    disk_rate: float = 0.0
    move_s: tuple[float, ...] = ()


class SplitProblem(NamedTuple):
    """Model, machines and links. ``batches``: micro-batches of a step.

    ``sent_bytes``: what travels of a micro-batch from a stage to the next one. ``has_mirrors``: a stage also
    has memory for what another one trains.
    """

    parts: ModelParts
    machines: tuple[SplitMachine, ...]
    links: LinkRates
    batches: int
    sent_bytes: int
    order: StageOrder = "1F1B"
    has_mirrors: bool = True

    def stage_bytes(self, first: int, end: int, *, stages: int, place: int) -> int:
        """Return the memory that a stage needs."""
        return stage_bytes(
            self.parts,
            first,
            end,
            stages=stages,
            place=place,
            batches=self.batches,
            order=self.order,
            is_mirror=self.has_mirrors,
        )

    @property
    def whole_bytes(self) -> int:
        """Return the memory that the whole model needs on one machine."""
        return whole_bytes(self.parts, self.batches)

    @property
    def speeds(self) -> list[BlockSpeed]:
        """Return the speed of each machine; an unmeasured one counts as the slowest of the others."""
        return fill_unknown([machine.speed for machine in self.machines])

    def only(self, numbers: Sequence[int]) -> SplitProblem:
        """Return the problem with some of the machines, in this order."""
        rates, latencies = (
            tuple(tuple(table[a][b] for b in numbers) for a in numbers) for table in self.links
        )
        machines = tuple(self.machines[number] for number in numbers)
        return self._replace(machines=machines, links=LinkRates(rates, latencies))

    def measured(self, block_s: Sequence[float]) -> SplitProblem:
        """Return the problem with measured seconds of a block by machine; 0: as it was."""
        machines = []
        for machine, seconds in zip(self.machines, block_s, strict=True):
            speed = machine.speed
            share = speed.forward_s / speed.block_s if speed.block_s else FORWARD_SHARE
            if seconds > 0:
                speed = speed._replace(forward_s=share * seconds, backward_s=(1 - share) * seconds)
            machines.append(machine._replace(speed=speed))
        return self._replace(machines=tuple(machines))
