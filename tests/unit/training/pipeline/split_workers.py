"""Real processes that train one split model; test_split_loop.py runs them and reads their results.

They connect through a file instead of an agent, and the members of all groups are known. Each act has its own
groups. In the act "kill", c is killed in the middle of a step, and later d joins a and b. In the act "wait",
a and b have too little memory for the model, also without mirrors, so they wait for d. In the act "order", a
has memory for a block between those of b and c only, and d for none. In the act "replica", a has memory for
the whole model, and the others are one pipeline. In the act "refuse", d joins a and b with a model that
trains other parameters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from barnraise.core import metrics
from barnraise.history.entries import Entry
from barnraise.history.log_format import encode_frames
from barnraise.planning.split.replica_placement import SplitPlacement, place_pipelines
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_time import BlockSpeed
from barnraise.training.pipeline import split_loop, split_training
from barnraise.training.pipeline.members.member_stage import MemberStage
from barnraise.training.pipeline.prediction import forecast
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.forked import fork_all
from tests.unit.training.mapping.map_workers import FileGroupManager
from tests.unit.training.pipeline.block_model import BLOCKS, BlockModel, loader, train_only, write_base

DIES_AT, WAITS_AT = 2, 4  # steps that c has trained, and those before which d is here
GROUPS = {"two": ["ab"], "three": ["abc"], "kill": ["abc", "ab", "abd"], "first": ["cab", "ab"]}
GROUPS |= {"wait": GROUPS["kill"], "order": ["abcd"], "replica": ["abcd"]}
GROUPS |= {"refuse": ["ab", "abd", "ab"]}
MEMORY = 10000  # of a machine: enough for two of the five blocks
MEMORIES = {"wait": {"b": 7500}, "order": {"a": 6200, "d": 1000}, "replica": {"a": 30000}}


def train(
    run: Session,
    folder: Path,
    results: Path | None = None,
    wait_for: Path | None = None,
    trained: Sequence[int] | None = range(BLOCKS),
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train the model of a folder for two epochs, and return the losses.

    ``wait_for``: a file that must exist before the last step. ``trained``: the blocks that are not frozen;
    None: nothing is.
    """
    with run.empty():
        model = train_only(BlockModel(), trained)
    run.clip_grad_norm(0.4)
    split, batches = run.split(
        model,
        loader(),
        weights=folder,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
    )
    losses = []
    for _ in run.epochs(2):
        for batch in batches:
            while wait_for is not None and run.done == WAITS_AT and not wait_for.exists():
                time.sleep(0.01)
            loss = split.train_step(batch)
            run.log(loss=loss)
            losses.append(loss)
            after_step()
    if results is not None:
        run.save(results)
    return losses


def kill_in_step(run: Session, room: Path) -> None:
    """Kill this process in the backward pass of a later step."""

    def watch(_: Session) -> None:
        if run.done == DIES_AT:
            hold = torch.nn.Module.__call__

            def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                (room / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
                return hold(module, *args, **kwargs)

            torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    run._split.loop.record.on_commit.append(lambda: watch(run))  # type: ignore[union-attr]


class FrameSink:
    """Sink of a worker's record: frames in a file of its machine."""

    def __init__(self, room: Path, machine: str) -> None:
        self.node, self._path = machine.encode(), room / f"{machine}.log"

    def write(self, entries: Sequence[Entry]) -> None:
        with open(self._path, "ab") as file:
            file.write(encode_frames(entries))

    def close(self) -> None:
        return


class DyingSession(Session):
    """Session of a worker that is killed while it computes a step."""

    room: Path

    def epochs(self, count: int) -> Any:
        kill_in_step(self, self.room)
        return super().epochs(count)


def place_by_memory(block_s: float, problem: SplitProblem) -> SplitPlacement:
    """Place stages as if all machines were equally fast; ``block_s``: 0 if that is not known."""
    speed = BlockSpeed(block_s / 3, 2 * block_s / 3)
    machines = tuple(machine._replace(speed=speed) for machine in problem.machines)
    return place_pipelines(problem._replace(machines=machines))


class RefusingGroupManager(FileGroupManager):
    """Group manager of the act in which d joins the first group, and leaves the second one."""

    def newest_generation(self) -> int:
        return 2 if self.generation == 1 and (self._room / "d").exists() else self.generation

    def wait_for_admission(self) -> None:
        super().wait_for_admission()
        if self._machine == "d":
            self._agent.generation = 1


def member(machine: str, room: Path, act: str) -> None:
    torch.set_num_threads(1)
    while machine == "d" and len(GROUPS[act]) > 1 and act != "refuse" and not (room / "killed").exists():
        time.sleep(0.01)
    groups = GROUPS[act]
    if act in ("wait", "order", "replica"):
        memory = MEMORIES.get(act, {}).get(machine, MEMORY)
        split_loop.free_memory = lambda device: memory
        MemberStage.held_bytes = lambda self: 0  # what is free above includes it
        split_training.with_kept = forecast.with_kept = lambda parts, kept: parts  # only weights take memory
    split_loop.place_pipelines = partial(place_by_memory, 1.0 if act == "replica" else 0.0)
    manager = (RefusingGroupManager if act == "refuse" else FileGroupManager)(machine, room, groups)
    dies = machine == "c" and len(groups) > 1
    run = (DyingSession if dies else Session)(
        manager, seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1)
    )
    if isinstance(run, DyingSession):
        run.room = room
    split_training.open_sink = lambda worker: FrameSink(room, machine)
    wait_for = room / "d" if act in ("kill", "refuse") else None
    trained: Sequence[int] = [3] if act == "refuse" and machine == "d" else range(BLOCKS)
    losses = train(run, room / "base", room / f"{machine}.safetensors", wait_for, trained)
    assert run._split is not None
    run._split.recorder.close()
    values = {sample.name: sample.value for sample in metrics.registry.samples()}
    (room / f"metrics-{machine}").write_text(json.dumps(values))
    manager.group.close()
    runs = run._split.loop.runs
    (room / f"{machine}.json").write_text(json.dumps([losses, run.world, run.done, runs]))


def main() -> int:
    room, act = Path(sys.argv[1]), os.environ["ACT"]
    write_base(room / "base")
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports once what the first use imports
    fork_all(partial(member, machine, room, act) for machine in sorted(set("".join(GROUPS[act]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
