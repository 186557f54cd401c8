"""Four real processes that map together; test_mapper_groups.py runs them and reads their results.

They connect through a file instead of an agent, and the members of all groups are known: first a, b and c.
Then c is killed while it computes an item. Then d joins the others. In the second act a, b and c train, and
c is killed in a map between two steps. In the third act d joins when the scripts of a and b end, and c comes
when all others are gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from barnraise.collectives.c10d.create import create_group
from barnraise.core.errors import CollectiveError
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import RecoveryGroup
from barnraise.training.group.manager import AgentGroupManager
from barnraise.training.group.process_group import TrainingGroup
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.forked import fork_all

ITEMS = 60
DIES_AT = 5  # items that c computes before


class FileGroupManager(AgentGroupManager):
    """Group manager whose groups are given in advance; the last of them starts when d is here."""

    def __init__(self, machine: str, room: Path, groups: list[str]) -> None:
        super().__init__(WorkerId("run-1", 0, 1, room / "state", machine))
        self._machine, self._room, self._groups = machine, room, groups

    def machines(self) -> tuple[str, ...]:
        return tuple(self._groups[self.generation - 1])

    def newest_generation(self) -> int:
        newest = len(self._groups)
        is_complete = 0 < self.generation == newest - 1 and (self._room / "d").exists()
        return newest if is_complete and "d" in self._groups[-1] else self.generation

    def is_member(self, generation: int) -> bool | None:
        return self._machine in self._groups[generation - 1]

    def wait_for_recovery_group(self) -> RecoveryGroup | None:
        return None

    def wait_for_admission(self) -> None:
        if self._machine == "d":
            (self._room / "d").touch()
            self._agent.generation = len(self._groups) - 1

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.group.close()
        members = self._groups[self.generation]
        self._agent.generation += 1
        self.rank, self.world = members.index(self._machine), len(members)
        store = dist.FileStore(str(self._room / f"{self._groups[0]}-{self.generation}"), self.world)
        group = create_group(store, self.rank, self.world, 60.0, self.generation)
        self.group = TrainingGroup(group, self.rank, self.world, self.world)


class LateGroupManager(FileGroupManager):
    """Group manager of a worker that is started again when the others have ended."""

    finished = True  # type: ignore[assignment]

    def join_next_group(self, error: CollectiveError | None) -> None:
        super().join_next_group(error)
        self.is_first_start = False


def session(manager: FileGroupManager) -> Session:
    return Session(manager, seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))


class Computing:
    """The function of a map, which notes what this process has computed."""

    def __init__(self, machine: str, room: Path, act: str) -> None:
        self._machine, self._room, self._act = machine, room, act
        self._count = 0

    def __call__(self, item: int) -> torch.Tensor:
        time.sleep(0.03 if self._machine != "b" else 0.09)
        if self._machine == "c" and self._count == DIES_AT:
            (self._room / f"killed-{self._act}").write_text(str(item))
            os.kill(os.getpid(), signal.SIGKILL)
        if self._machine == "a" and self._act == "join" and item == ITEMS - 10:
            while not (self._room / "d").exists():
                time.sleep(0.01)
        with open(self._room / f"computed-{self._act}", "a", encoding="ascii") as file:
            file.write(f"{self._machine} {item}\n")
        self._count += 1
        return torch.rand(1000 + item, dtype=torch.float64)


def map_twice(machine: str, room: Path, manager: FileGroupManager) -> list[Any]:
    run = session(manager)
    first = run.map(str, range(3))  # d gets these results when it joins
    results = run.map(Computing(machine, room, "join"), range(ITEMS))
    return [first, [[float(value.sum()), value.numel()] for value in results], run.world]


def train(machine: str, room: Path, manager: FileGroupManager) -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(32, 3, dtype=torch.float64)
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    run = session(manager)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    net, optimizer, batches = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    predictions: list[Any] = []
    compute = Computing(machine, room, "train")
    for _ in run.epochs(2):
        for batch in batches:
            for part, y in batch:
                torch.nn.functional.mse_loss(net(part), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if run.step == 3:
                predictions.append([float(value.sum()) for value in run.map(compute, range(ITEMS))])
        with torch.no_grad():
            predictions.append([value.tolist() for value in run.map(lambda row: net(x[row]), range(4))])
    return [predictions, net.weight.tolist(), run.step]


def map_late(machine: str, room: Path) -> list[Any]:
    """Map twice; d comes when a and b have computed everything, and c when all have ended."""
    groups = {"c": ["c"]}.get(machine, ["ab", "abd"])
    manager = (LateGroupManager if machine == "c" else FileGroupManager)(machine, room, groups)
    while machine in "cd" and not (room / "mapped-a").exists():
        time.sleep(0.01)
    run = session(manager)

    def compute(item: int) -> str:
        with open(room / "computed-late", "a", encoding="ascii") as file:
            file.write(f"{machine} {item}\n")
        return f"{machine} {item}"

    results = [run.map(compute, range(5)), run.map(compute, range(ITEMS))]
    (room / f"mapped-{machine}").touch()
    while not (room / "d").exists():
        time.sleep(0.01)
    run._mapper._send_results_at_exit()
    manager.group.close()
    return results


def member(machine: str, room: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if os.environ["ACT"] == "late":
        results["late"] = map_late(machine, room)
    elif machine == "d":
        while not (room / "killed-join").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        manager = FileGroupManager(machine, room, ["abc", "ab", "abd"])
        results["join"] = map_twice(machine, room, manager)
        manager.group.close()
    else:
        which = "join" if os.environ["ACT"] == "join" else "train"
        groups = ["abc", "ab", "abd"] if which == "join" else ["bac", "ab"]
        manager = FileGroupManager(machine, room, groups)
        results[which] = (map_twice if which == "join" else train)(machine, room, manager)
        manager.group.close()
    (room / f"{machine}-{os.environ['ACT']}.json").write_text(json.dumps(results))


def main() -> int:
    room = Path(sys.argv[1])
    # What an optimizer imports at its first use is imported once, before the processes are forked.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    machines = "abc" if os.environ["ACT"] == "train" else "abcd"
    fork_all(partial(member, machine, room) for machine in machines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
