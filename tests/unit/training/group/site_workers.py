"""Four real processes at two sites that train with a codec; test_sites.py runs them and reads their results.

They connect through a file instead of an agent, and the members of all groups are known. In the first
training workers overlap with the all-reduce. In the second one a ring is set by name. In the last one a site
leader dies during an all-reduce.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from barnraise.collectives.c10d.create import create_group
from barnraise.compression.allreduce import hierarchical as sites_module
from barnraise.core.errors import CollectiveError
from barnraise.topology.graph import LinkFacts, NodeFacts, TopologyGraph, build_graph
from barnraise.training.group import process_group as group_module
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import RecoveryGroup
from barnraise.training.group.manager import AgentGroupManager
from barnraise.training.group.process_group import TrainingGroup
from barnraise.training.sync import Sync
from tests.unit.forked import fork_all
from tests.unit.training.test_local_sgd import Training

MACHINES = "abcd"  # a and b are at one site; a has the better line to the other one, so it leads
DIES_AT = 5


def surveyed() -> TopologyGraph:
    def rate(source: str, target: str) -> float:
        if (source in "ab") == (target in "ab"):
            return 940.0
        return 21.0 if "a" in (source, target) else 19.0

    links = [LinkFacts(a=a, b=b, rtt_s=0.001, mbps=rate(a, b)) for a, b in combinations(MACHINES, 2)]
    return build_graph([NodeFacts(node=name, name=f"m{name}") for name in MACHINES], links)


class FileGroupManager(AgentGroupManager):
    """Group manager whose groups are given in advance."""

    def __init__(self, machine: str, room: Path, groups: list[str]) -> None:
        super().__init__(WorkerId("run-1", 0, 1, room / "state", machine))
        self._machine, self._folder, self._groups = machine, room, groups
        self._members = ""

    def machines(self) -> tuple[str, ...]:
        return tuple(self._members)

    def survey(self) -> TopologyGraph:
        return surveyed()

    def newest_generation(self) -> int:
        return self.generation

    def wait_for_recovery_group(self) -> RecoveryGroup | None:
        return None

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.group.close()
        self._members = self._groups[self.generation]
        self._agent.generation += 1
        self.rank, self.world = self._members.index(self._machine), len(self._members)
        store = dist.FileStore(str(self._folder / f"{self._groups[0]}-{self.generation}"), self.world)
        group = create_group(store, self.rank, self.world, 60.0, self.generation)
        self.group = TrainingGroup(
            group, self.rank, self.world, self.world, lambda: self._site_map.ranks(self.machines())
        )

    def leave(self) -> None:
        self.group.close()


def noting(crossed: list[list[int]]) -> Callable[..., Any]:
    """Record the sites and the bytes sent to other sites of every compressed all-reduce."""
    real = group_module.sum_over

    def noted(*given: Any, **more: Any) -> Any:
        result = real(*given, **more)
        crossed.append([len(more["sites"]), result.crossed])
        return result

    return noted


def die_in_the_middle() -> None:
    """Exit after the shares of an all-reduce were sent, and before its result."""
    real = sites_module._ChunkReduction.send_sums

    def send_sums(piece: Any) -> None:
        if piece._codec_round.step == DIES_AT:
            os._exit(0)
        real(piece)

    sites_module._ChunkReduction.send_sums = send_sums  # type: ignore[method-assign]


def results_of(training: Training, crossed: list[list[int]], manager: FileGroupManager) -> dict[str, Any]:
    compression, reducer = training.run._step_loop._compression, training.run._step_loop._reducer
    own = compression._feedback.state_dict()["residuals"]
    pooled = compression.sum_residuals(manager.group, reducer.feedback_parts())
    return {
        "hashes": training.hashes,
        "counts": training.counts,
        "parameters": training.flat.tolist(),
        "crossed": crossed,
        "generation": manager.generation,
        "own": torch.cat([own[name] for name in sorted(own)]).tolist(),
        "pooled": torch.cat([pooled[name] for name in sorted(pooled)]).tolist(),
    }


def member(machine: str, room: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    crossed: list[list[int]] = []
    group_module.sum_over = noting(crossed)  # type: ignore[assignment]
    ahead = FileGroupManager(machine, room, [MACHINES])
    results["rounds"] = results_of(Training(ahead, Sync(period=3, codec="int4")).train(3), crossed[:], ahead)
    ahead.leave()
    crossed.clear()
    os.environ["BARNRAISE_COLLECTIVES_STRATEGY"] = "ring"
    flat = FileGroupManager(machine, room, ["bacd"])
    results["ring"] = results_of(Training(flat, Sync(codec="int8")).train(1), crossed[:], flat)
    flat.leave()
    crossed.clear()
    del os.environ["BARNRAISE_COLLECTIVES_STRATEGY"]
    if machine == "a":
        die_in_the_middle()
    broken = FileGroupManager(machine, room, ["".join(reversed(MACHINES)), "dcb"])
    results["broken"] = results_of(Training(broken, Sync(codec="int8")).train(2), crossed, broken)
    broken.leave()
    (room / f"{machine}.json").write_text(json.dumps(results))


def main() -> int:
    room = Path(sys.argv[1])
    return fork_all(partial(member, machine, room) for machine in MACHINES)


if __name__ == "__main__":
    sys.exit(main())
