"""Plans for the workers of a simulation: groups opened in any order, operations in almost any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from barnraise.collectives.algorithms.cost_model import CostTable
from tests.sim.engine_simulation import GroupHandle, Machine, Simulation
from tests.sim.operations import Collective, Message, Tags, collective, message

Item = Collective | Message


@dataclass
class Plan:
    """One group and its operations, the same on every rank but for their order."""

    sim: Simulation
    name: str
    machines: list[Machine]
    items: list[Item]
    generation: int = 1
    handles: dict[Machine, GroupHandle] = field(default_factory=dict)

    def launch(self, *, measured: bool = False, without: Machine | None = None) -> None:
        """Let every worker open the group and give its commands; ``without`` opens it but calls nothing."""
        for machine in self.machines:
            table = None if measured else CostTable.default()

            def enter(machine: Machine = machine, table: CostTable | None = table) -> bool:
                handle = machine.open(self.name, self.machines, self.generation, table)
                self.handles[machine] = handle
                self.sim.give(machine, handle, [] if machine is without else self.commands(machine, handle))
                return True

            self.sim.actions.append((machine, enter))

    def commands(self, machine: Machine, handle: GroupHandle) -> list[Callable[[], object]]:
        """Return the calls of this rank: messages in order, collectives swapped with neighbours at times."""
        todo: list[tuple[bool, Callable[[], object]]] = []
        for number, item in _numbered(self.items):
            if isinstance(item, Collective):
                todo.append((True, partial(machine.start, handle, number, item)))
            elif item.source == handle.rank:
                todo.append((False, partial(machine.send, handle, item)))
            elif item.destination == handle.rank:
                todo.append((False, partial(machine.receive, handle, item)))
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


def random_plans(sim: Simulation, *, max_items: int = 8) -> list[Plan]:
    """Return a plan for a group of all machines, and up to two for subgroups."""
    random, machines = sim.random, sim.machines
    plans = [Plan(sim, "all", machines, random_items(random, len(machines), random.randrange(1, max_items)))]
    for number in range(random.randrange(3) if len(machines) > 2 else 0):
        members = random.sample(machines, random.randrange(2, len(machines) + 1))
        items = random_items(random, len(members), random.randrange(1, max_items))
        plans.append(Plan(sim, f"sub{number}", members, items))
    return plans
