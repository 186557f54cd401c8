"""Plans for the workers of a simulation: groups opened in any order, operations in almost any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from barnraise.collectives.algorithms.cost_model import CostTable
from tests.sim.operations import Collective, Message, Tags, collective, message
from tests.sim.world import Machine, Side, Simulation

Item = Collective | Message


@dataclass
class Plan:
    """One group and its operations, the same on every rank but for their order."""

    sim: Simulation
    name: str
    machines: list[Machine]
    items: list[Item]
    generation: int = 1
    sides: dict[Machine, Side] = field(default_factory=dict)

    def launch(self, *, measured: bool = False, without: Machine | None = None) -> None:
        """Let every worker open the group, then give its commands; ``without`` opens but calls nothing."""
        for machine in self.machines:
            table = None if measured else CostTable.default()

            def enter(machine: Machine = machine, table: CostTable | None = table) -> bool:
                side = machine.open(self.name, self.machines, self.generation, table)
                self.sides[machine] = side
                self.sim.give(machine, side, [] if machine is without else self.commands(machine, side))
                return True

            self.sim.actions.append((machine, enter))

    def commands(self, machine: Machine, side: Side) -> list[Callable[[], object]]:
        """This rank's calls: messages in order, collectives nearly so, as pieces of two operations start."""
        todo: list[tuple[bool, Callable[[], object]]] = []
        for number, thing in _numbered(self.items):
            if isinstance(thing, Collective):
                todo.append((True, partial(machine.start, side, number, thing)))
            elif thing.source == side.rank:
                todo.append((False, partial(machine.send, side, thing)))
            elif thing.destination == side.rank:
                todo.append((False, partial(machine.receive, side, thing)))
        for place in range(len(todo) - 1):
            if (todo[place][0] or todo[place + 1][0]) and self.sim.random.random() < 0.3:
                todo[place], todo[place + 1] = todo[place + 1], todo[place]
        return [command for _, command in todo]


def _numbered(items: list[Item]) -> list[tuple[int, Item]]:
    sequence, numbered = 0, []
    for item in items:
        numbered.append((sequence, item))
        sequence += isinstance(item, Collective)
    return numbered


def random_items(random: Random, world: int, count: int) -> list[Item]:
    tags = Tags(random)
    return [
        collective(random, world) if random.random() < 0.6 else message(random, world, tags)
        for _ in range(count)
    ]


def random_plans(sim: Simulation, *, most: int = 8) -> list[Plan]:
    """The group of all, and up to two of some."""
    random, machines = sim.random, sim.machines
    plans = [Plan(sim, "all", machines, random_items(random, len(machines), random.randrange(1, most)))]
    for number in range(random.randrange(3) if len(machines) > 2 else 0):
        members = random.sample(machines, random.randrange(2, len(machines) + 1))
        items = random_items(random, len(members), random.randrange(1, most))
        plans.append(Plan(sim, f"sub{number}", members, items))
    return plans
