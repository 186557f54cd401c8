"""A cluster of Linux x86-64, Windows (Wine) and Linux arm64 (qemu) trains together.

    python -m lab prepare windows arm64    once
    python -m benchmarks.mixed --quick

The machines pair without addresses. They compare collectives, DDP and FSDP2 with exact results. They train a
session of 200 steps, in which the worker of each machine is killed once. Another run is stopped, and resumed
on machines of other systems. A model is split over all machines, one of which is killed. A folder with names
that Windows refuses is not sent. At the end, the second machine removes the others. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agents.commits import Commit, judge, read_commits
from benchmarks.agents.machines import until
from benchmarks.agents.runs import PAIRING_CODE
from benchmarks.mixed.machines import PATIENCE_S, MixedMachine
from benchmarks.report import environment_line, last_line
from lab import ARM64, LINUX, WINDOWS, Lab, LabProcess
from lab.systems import System

PROGRAMS = Path(__file__).parent
UNITS = 8
_READ_DEEP_FILE = """
from pathlib import Path
print("READ", next(Path().rglob("größe.txt")).read_text(encoding="utf-8"), flush=True)
"""
STEPS, SPLIT_STEPS = 200, 60


class Bench:
    """The machines of one cluster, and what was measured on them."""

    def __init__(self, machines: list[MixedMachine], room: Path) -> None:
        self.machines, self._room = machines, room
        self.figures: dict[str, Any] = {}

    def measure(self, optimizers: Sequence[str]) -> None:
        """Pair, compare, train and resume."""
        self.pair()
        self.check_names()
        self.check_collectives()
        self.resume_elsewhere()
        self.split_model()
        for optimizer in reversed(optimizers):  # the figures are those of the first
            self.train(optimizer)
        self.remove_all()

    def pair(self) -> None:
        """Pair all machines with the first, by codes alone."""
        for machine in self.machines:
            machine.start_agent()
        first, *others = self.machines
        for machine in self.machines:
            until(machine.answers, PATIENCE_S, f"the agent of {machine.name} answers")
            machine.type("rename", machine.name)
        begin = time.monotonic()
        for machine in others:
            pairing = first.start("pair")
            code = _code_of(pairing)
            print(machine.type("join", code), flush=True)
            pairing.wait(120)
        count = len(self.machines)
        online = f"{count} of {count} machines are online"
        until(lambda: online in first.try_to_type("status").stdout, PATIENCE_S, "all are online")
        self.figures["pairing_s"] = round(time.monotonic() - begin, 1)
        print(first.type("status"), flush=True)

    def check_names(self) -> None:
        """Check that names which a system refuses are named before anything starts, and letters arrive."""
        first = self.machines[0]
        refused = self._folder("collectives.py")
        for name in ("aux.txt", "what?.txt", "Data.csv", "data.csv"):
            (refused / name).write_text("")
        printed = first.try_to_type("run", "--all", "train.py", folder=refused)
        text = printed.stdout + printed.stderr
        assert printed.returncode != 0, text
        assert all(word in text for word in ("aux.txt", "what?.txt", "data.csv")), text
        folder = self._folder("collectives.py")
        deep = folder / "ein langer Ordner mit Umlauten äöü" / ("x" * 120) / ("y" * 120)
        deep.mkdir(parents=True)
        (deep / "größe.txt").write_text("14", encoding="utf-8")
        (folder / "train.py").write_text(_READ_DEEP_FILE, encoding="utf-8")
        printed_all = first.type("run", "--all", "--separate", "train.py", folder=folder)
        assert printed_all.count("READ 14") == len(self.machines), printed_all

    def check_collectives(self) -> None:
        folder = self._folder("collectives.py")
        begin = time.monotonic()
        printed = self.machines[0].type("run", "--all", "train.py", folder=folder)
        reports = [json.loads(text) for text in re.findall(r"CHECKED (\{.*\})", printed)]
        checked = {each["rank"]: each for each in reports}
        for each in reports:
            print(f"rank {each['rank']}: {each['checked']} checked, wrong: {each['wrong']}", flush=True)
        assert len(checked) == len(self.machines), printed
        self.figures["collectives_checked"] = sum(each["checked"] for each in checked.values())
        self.figures["collectives_wrong"] = sum(len(each["wrong"]) for each in checked.values())
        self.figures["collectives_s"] = round(time.monotonic() - begin, 1)

    def train(self, optimizer: str) -> None:
        """Train 200 steps, and kill the worker of each machine once."""
        folder, trace, hold = self._session(optimizer)
        begin = time.monotonic()
        running = self.machines[0].start("run", "train.py", folder=folder)
        everyone = len(self.machines)
        until(lambda: _world(trace) == everyone or running.poll() is not None, PATIENCE_S, "all train")
        backs = {}
        for machine in reversed(self.machines):
            generation = _newest(trace).generation
            assert machine.kill_workers("train.py") == 1, f"{machine.name} has no worker"

            def is_back(generation: int = generation) -> bool:
                newest = _newest(trace)
                return running.poll() is not None or (
                    newest.generation > generation + 1 and newest.world == everyone
                )

            backs[machine.host.system.name] = round(until(is_back, PATIENCE_S, f"{machine.name} is back"), 1)
            assert running.poll() is None, running.output()[-3000:]
            print(
                f"{machine.name} was killed, and is back after {backs[machine.host.system.name]} s",
                flush=True,
            )
        hold.unlink()
        assert running.wait(900) == 0, running.output()
        commits = _commits(trace)
        verdict = judge(commits, UNITS)
        print(running.output()[-3000:], flush=True)
        steps = max(commit.step for commit in commits)
        self.figures |= {
            "steps": steps,
            "kills": len(backs),
            "back_s": backs,
            "hash_violations": verdict.hash_violations,
            "samples_lost": verdict.units_lost + verdict.steps_missing,
            "samples_doubled": verdict.units_doubled,
            "session_s": round(time.monotonic() - begin, 1),
        }
        assert steps == STEPS, f"{steps} steps instead of {STEPS}"

    def resume_elsewhere(self) -> None:
        """Stop a run of the last machine, and resume it on the others, whose systems are others."""
        folder, trace, hold = self._session("sgd", checkpoint_s=2, held_s=0.1)
        first, *_, last = self.machines
        running = first.start("run", "--on", last.name, "train.py", folder=folder)
        until(
            lambda: running.poll() is not None or (_world(trace) == 1 and _newest(trace).step >= 20),
            PATIENCE_S,
            "it trains",
        )
        run = re.findall(r"run (train-\w+)", running.output())[0]
        first.type("stop", run)
        running.wait(120)
        stopped = _newest(trace)
        hold.unlink()
        others = ",".join(machine.name for machine in self.machines[:-1])
        printed = first.type("resume", run, "--on", others, folder=folder)
        commits = _commits(trace)
        assert commits[-1].step == STEPS, printed
        first_again = min(commit.step for commit in commits if commit.at > stopped.at)
        print(
            f"stopped on {last.name} at step {stopped.step}, resumed on {others} at step {first_again}",
            flush=True,
        )
        assert 1 < first_again <= stopped.step + 1, "it began again"
        self.figures["resumed_from_other_system"] = True

    def split_model(self) -> None:
        """Train a model of which each machine holds some blocks, kill one machine, and compare the losses."""
        folder = self._folder("split.py")
        base, alone, split, hold = (
            folder.with_suffix(f".{kind}") for kind in ("base", "alone", "split", "hold")
        )
        given = {"base": str(base), "hold": str(hold), "held_s": 0.5, "epochs": SPLIT_STEPS // 10}
        first, *_, last = self.machines
        (folder / "variables.json").write_text(json.dumps(given | {"results": str(alone)}))
        first.python("train.py", folder=folder)
        (folder / "variables.json").write_text(json.dumps(given | {"results": str(split)}))
        expected = {row.step: row.loss for row in _split_steps(alone)}
        everyone, begin = len(self.machines), time.monotonic()
        hold.touch()
        running = first.start("run", "--all", "train.py", folder=folder)

        def trains(world: int, after: int = 0) -> bool:
            rows = [row for row in _split_steps(split) if row.step > after]
            return running.poll() is not None or (bool(rows) and _newest_step(rows).world == world)

        until(lambda: trains(everyone), PATIENCE_S, "all train the split model")
        killed_after = _newest_step(_split_steps(split)).step
        assert last.kill_workers("train.py") == 1, f"{last.name} has no worker"
        until(lambda: trains(everyone - 1, killed_after), PATIENCE_S, "the others go on")
        until(lambda: trains(everyone, killed_after + 1), PATIENCE_S, f"{last.name} is back")
        hold.unlink()
        assert running.wait(900) == 0, running.output()
        rows = _split_steps(split)
        print(running.output()[-2000:], flush=True)
        blocks = sorted({str(row.blocks) for row in rows})
        print(f"{last.name} was killed after step {killed_after}; blocks: {', '.join(blocks)}", flush=True)
        assert {row.step for row in rows} == set(expected), "a step is missing"
        gaps = [abs(row.loss - expected[row.step]) for row in rows]
        self.figures |= {
            "split_steps": len(expected),
            "split_loss_gap": max(gaps),
            "split_machines": len({row.blocks for row in rows if row.world == everyone and row.blocks}),
            "split_s": round(time.monotonic() - begin, 1),
        }

    def remove_all(self) -> None:
        """Let the second machine, which has another system, remove all others."""
        remover = self.machines[1]
        others = [machine for machine in self.machines if machine is not remover]
        for machine in others:
            print(remover.type("unpair", machine.name, "--yes"), flush=True)
        shown = remover.type("status")
        assert not any(machine.name in shown for machine in others), shown
        self.figures["removed"] = len(others)

    def _session(
        self, optimizer: str, checkpoint_s: float = 20, held_s: float = 2.0
    ) -> tuple[Path, Path, Path]:
        """Write a session whose micro-batches take ``held_s`` as long as the file ``hold`` exists."""
        folder = self._folder("session.py")
        trace, hold = folder.with_suffix(".trace"), folder.with_suffix(".hold")
        hold.touch()
        given = {
            "trace": str(trace),
            "hold": str(hold),
            "held_s": held_s,
            "optimizer": optimizer,
            "epochs": STEPS // 10,
            "checkpoint_s": checkpoint_s,
        }
        (folder / "variables.json").write_text(json.dumps(given))
        return folder, trace, hold

    def _folder(self, program: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="project-", dir=self._room))
        shutil.copy(PROGRAMS / program, folder / "train.py")
        return folder


def _code_of(pairing: LabProcess) -> str:
    """Wait until a code is shown, and return it."""
    until(lambda: PAIRING_CODE.search(pairing.output()), 60.0, "a code is shown")
    return str(PAIRING_CODE.findall(pairing.output())[-1])


def _commits(trace: Path) -> list[Commit]:
    """Return the commits of all systems, which share one clock here, in order."""
    files = trace.parent.glob(f"{trace.name}.*")
    return sorted((commit for file in files for commit in read_commits(file)), key=lambda commit: commit.at)


class SplitStep(NamedTuple):
    """A step of a split model on one machine. ``blocks``: the first one there, and the one after the last."""

    step: int
    world: int
    loss: float
    blocks: tuple[int, int] | None


def _split_steps(results: Path) -> list[SplitStep]:
    """Return the steps that all machines have written; the last line of one may be cut off."""
    lines = [
        line
        for file in results.parent.glob(f"{results.name}.*")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("]\n")
    ]
    return [
        SplitStep(step, world, loss, tuple(blocks) if blocks else None)
        for step, loss, blocks, world in map(json.loads, lines)
    ]


def _newest_step(rows: Sequence[SplitStep]) -> SplitStep:
    return max(rows, key=lambda row: row.step)


def _newest(trace: Path) -> Commit:
    return _commits(trace)[-1]


def _world(trace: Path) -> int:
    commits = _commits(trace)
    return commits[-1].world if commits else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one session (the default trains two)")
    parser.add_argument("--without", choices=["windows", "arm64"], action="append", default=[])
    options = parser.parse_args()
    systems: list[System] = [LINUX, *(each for each in (WINDOWS, ARM64) if each.name not in options.without)]
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-mix-", ignore_cleanup_errors=True) as directory,
        Lab(hosts=systems) as lab,
    ):
        room = Path(directory)
        machines = [MixedMachine(host, room, host.system.name) for host in lab.hosts]
        bench = Bench(machines, room)
        try:
            bench.measure(optimizers=("sgd",) if options.quick else ("sgd", "adamw"))
        except BaseException:
            for machine in machines:
                print(f"--- agent of {machine.name}\n{machine.agent_log[-4000:]}", flush=True)
            raise
        last_line({"systems": len(systems), **bench.figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
