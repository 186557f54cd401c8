"""Three real processes that train with Fabric; test_fabric_groups.py runs them and reads their results.

They connect through a file instead of an agent. The process c is killed between backward and step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from barnraise.integrations.fabric import BarnraiseStrategy
from tests.unit.forked import fork_all
from tests.unit.integrations.fabric_training import data, train
from tests.unit.training.mapping.map_workers import FileGroupManager, session

DIES_AT = 5  # iterations of c


def member(machine: str, room: Path) -> None:
    torch.set_num_threads(1)
    manager = FileGroupManager(machine, room, ["bac", "ab"])
    strategy = BarnraiseStrategy(session(manager), max_norm=0.5)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    seen: list[Any] = []

    def die(count: int) -> None:
        if machine == "c" and count == DIES_AT:
            (room / "killed").write_text(str(strategy.run.step))
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(net: Any, optimizer: Any) -> None:
        rank, world = fabric.global_rank, fabric.world_size
        with torch.no_grad():
            own = net(data()[rank::world][0]).sum()
        rows = fabric.all_gather({"own": own})["own"]
        seen.append(
            [rows.tolist(), fabric.all_reduce(own, reduce_op="sum").item(), world, fabric.is_global_zero]
        )
        fabric.barrier()
        fabric.save(room / machine / f"{len(seen)}.ckpt", {"model": net, "epochs": len(seen)})

    trained = train(
        fabric, strategy.epochs, shuffle=True, max_norm=0.5, on_iteration=die, after_epoch=evaluate
    )
    result = {"parameters": trained.parameters, "iterations": trained.iterations, "seen": seen}
    (room / f"{machine}.json").write_text(json.dumps(result | {"step": strategy.run.step}))
    manager.group.close()


def main() -> int:
    room = Path(sys.argv[1])
    # What an optimizer imports at its first use is imported once, before the processes are forked.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    fork_all(partial(member, machine, room) for machine in "abc")
    return 0


if __name__ == "__main__":
    sys.exit(main())
