"""Record of a day: 86,400 steps in the logs of several machines, as their agents write and shrink them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from barnraise.history.columns import pack_column
from barnraise.history.entries import (
    CheckpointSaved,
    Entry,
    GroupStart,
    LogHead,
    MachineFacts,
    MachineSample,
    PlanAdopted,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)
from barnraise.history.log_file import RunLogWriter, log_path, read_entries
from barnraise.history.log_format import encode_frames
from benchmarks.invented_run import RUN, START

STEPS = 86_400
_SAMPLE_S, _CHECKPOINT_S = 15, 900


def day_nodes(machines: int) -> list[bytes]:
    """Return the ids of the machines."""
    return [bytes([0, number]) * 16 for number in range(1, machines + 1)]


def day_entries(node: bytes, steps: range) -> Iterator[list[Entry]]:
    """Yield what the agent of a machine writes with each step of one second."""
    for step in steps:
        noise, at = random.Random(step), START + 40.0 + step
        compute, communication = noise.randrange(7000, 7600), noise.randrange(2000, 2400)
        phases = tuple((ticks,) for ticks in (20, compute, communication, 10, 0, 15))
        loss = 0.4 + 4.0 / (1 + step / 1000) + noise.gauss(0, 0.05)
        entries: list[Entry] = [
            StepBatch(1, step, at, (compute + communication + 45,), (192,), phases),
            ValueBatch(1, step, ("loss", "lr"), (pack_column([loss]), pack_column([1e-3]))),
        ]
        if step % _SAMPLE_S == 0:
            sample = MachineSample(at, node, 6e9, 60.0, 150.0, 150.0 * step, load=0.9)
            entries += [sample, MachineSample(at + 0.5, node, samples_per_s=24.0, share=0.125)]
        if step % _CHECKPOINT_S == 0:
            entries.append(CheckpointSaved(at, step, node, 1.2e9))
        yield entries


def write_day(state: Path, machines: int, steps: int = STEPS) -> None:
    """Write the logs of all machines below a state directory."""
    nodes = day_nodes(machines)
    head = LogHead(RUN, nodes[0], "agent", bytes(16), START)
    writer = RunLogWriter(log_path(state, RUN, nodes[0]), head)
    writer.append(_events(nodes))
    for entries in day_entries(nodes[0], range(steps)):
        writer.append(entries)
    writer.close()
    written = read_entries(log_path(state, RUN, nodes[0]))
    for node in nodes[1:]:
        _write_same(state, node, written)


def _events(nodes: Sequence[bytes]) -> list[Entry]:
    return [
        *(
            MachineFacts(node, f"machine-{place}", "NVIDIA GeForce RTX 3060")
            for place, node in enumerate(nodes)
        ),
        RunStart(START, "barnraise run train.py", started_by="machine-0"),
        TrainingGoal(START + 39, 2 * STEPS, 192),
        GroupStart(START + 39, 1, 0, tuple(nodes), "start"),
        PlanAdopted(START + 39, 0, "ring-exact", "exact gradients in a ring", "faster than alone", 1.0),
    ]


def _write_same(state: Path, node: bytes, written: Sequence[Entry]) -> None:
    """Write the log of another machine, which has the same steps and measurements of its own."""
    path = log_path(state, RUN, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = [
        msgspec.structs.replace(entry, node=node)
        if isinstance(entry, LogHead | MachineSample | CheckpointSaved)
        else entry
        for entry in written
    ]
    frames = [encode_frames(own[:1]), *(encode_frames(own[at : at + 4]) for at in range(1, len(own), 4))]
    path.write_bytes(b"".join(frames))
