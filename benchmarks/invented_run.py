"""Example of a run's record: three machines, a death, a pause, a return, two plans and checkpoints.

The machines, the times and the loss are invented; the entries are those that a real run writes.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from barnraise.history.columns import pack_column
from barnraise.history.entries import (
    TICKS_PER_S,
    CheckpointSaved,
    Entry,
    FailureNote,
    GroupStart,
    LinkSample,
    LogHead,
    MachineFacts,
    MachineSample,
    MembershipChange,
    PlanAdopted,
    RunEnd,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)

RUN = "train-k3f9"
STEPS = 600
BATCH = 192
START = 1_790_000_000.0
DESK, MAC, NAS = (bytes([number]) * 32 for number in (1, 2, 3))
NAMES = {DESK: "desk", MAC: "mac", NAS: "nas"}
_SPEEDS = {DESK: 96.0, MAC: 60.0, NAS: 9.0}  # samples per second
_POWERS = {DESK: 310.0, MAC: 38.0, NAS: 22.0}

# Generation, first step, machines: the nas is paused at 150, the mac dies at 320 and returns at 410.
_GROUPS: tuple[tuple[int, int, tuple[bytes, ...]], ...] = (
    (1, 0, (DESK, MAC, NAS)),
    (2, 150, (DESK, MAC)),
    (3, 320, (DESK,)),
    (4, 410, (DESK, MAC)),
)
_PAUSE_REASON = "its link slows the others"


def _step_s(members: Sequence[bytes]) -> tuple[float, float]:
    """Return the seconds of computing and communication of a step."""
    compute = BATCH / sum(_SPEEDS[node] for node in members)
    return compute, {1: 0.0, 2: 0.12, 3: 0.9}[len(members)]


def _loss(step: int, noise: random.Random) -> float:
    return 0.4 + 4.0 * math.exp(-step / 140) + noise.gauss(0, 0.05)


def _steps(last: int) -> Iterator[tuple[int, int, float, tuple[float, ...], tuple[bytes, ...]]]:
    """Yield generation, step, commit time, phases and members of each step."""
    at, noise = START + 40.0, random.Random(5)
    bounds = [first for _, first, _ in _GROUPS[1:]] + [STEPS]
    for (generation, first, members), end in zip(_GROUPS, bounds, strict=True):
        at += 6.0 if generation > 1 else 0.0
        compute, communication = _step_s(members)
        for step in range(first, min(end, last)):
            checkpoint = 0.3 if step % 100 == 99 else 0.0
            phases = (
                0.02,
                compute * noise.uniform(0.95, 1.05),
                communication * noise.uniform(0.9, 1.3),
                0.01,
                checkpoint,
                0.015,
            )
            at += sum(phases)
            yield generation, step, at, phases, members


def step_entries(last: int = STEPS, rows: int = 5) -> list[Entry]:
    """Return the entries of all steps before ``last``, in batches of at most ``rows`` rows."""
    table, noise = list(_steps(last)), random.Random(7)
    entries: list[Entry] = []
    before = START + 40.0
    start = 0
    while start < len(table):
        part = [row for row in table[start : start + rows] if row[0] == table[start][0]]
        times = [before, *(at for _, _, at, _, _ in part)]
        ticks = [round((after - at) * TICKS_PER_S) for at, after in pairwise(times)]
        columns = zip(*(phases for *_, phases, _ in part), strict=True)
        entries.append(
            StepBatch(
                generation=part[0][0],
                first=part[0][1],
                at=part[0][2],
                ticks=tuple(ticks),
                samples=(BATCH,) * len(part),
                phases=tuple(tuple(round(s * TICKS_PER_S) for s in column) for column in columns),
            )
        )
        losses = [_loss(step, noise) for _, step, *_ in part]
        rates = [1e-3 * (1 - step / STEPS) for _, step, *_ in part]
        entries.append(
            ValueBatch(part[0][0], part[0][1], ("loss", "lr"), (pack_column(losses), pack_column(rates)))
        )
        before, start = times[-1], start + len(part)
    return entries


@functools.cache
def _times() -> dict[int, float]:
    return {step: at for _, step, at, _, _ in _steps(STEPS)}


def _time_of(step: int) -> float:
    return _times().get(step, START)


def _plans() -> list[Entry]:
    three, two = _step_s((DESK, MAC, NAS)), _step_s((DESK, MAC))
    total = sum(_SPEEDS.values())
    return [
        PlanAdopted(
            at=START + 39,
            step=0,
            name="ring-exact",
            sync="exact gradients in a ring, every step",
            reason="all machines together are 1.2 times as fast as desk alone",
            step_s=sum(three) + 0.03,
            phases_s=(0.0, three[0], three[1], 0.03, 0.0, 0.0),
            shares=tuple((node, BATCH * speed / total) for node, speed in _SPEEDS.items()),
        ),
        PlanAdopted(
            at=_time_of(150) - 6,
            step=150,
            name="pair-exact",
            sync="exact gradients between two machines, every step",
            reason="without nas a step takes 1.4 s instead of 2.2 s",
            step_s=sum(two) + 0.03,
            phases_s=(0.0, two[0], two[1], 0.03, 0.0, 0.0),
            shares=((DESK, 118.0), (MAC, 74.0)),
        ),
    ]


def _events() -> list[Entry]:
    paused, died, back = _time_of(150) - 6.5, _time_of(320) - 6.5, _time_of(410) - 6.5
    return [
        MembershipChange(paused, NAS, "paused", _PAUSE_REASON, 150, 2),
        FailureNote(
            died, MAC, "the worker was killed by signal 9", rank=1, signal=9, start=1, tail="step 319"
        ),
        MembershipChange(died, MAC, "died", "its worker was killed by signal 9", 320, 3),
        MembershipChange(back - 20, MAC, "joining", "it receives the state while desk trains", 395, 3),
        MembershipChange(back, MAC, "recovered", "", 410, 4),
    ]


def _samples(end: float) -> list[Entry]:
    entries: list[Entry] = []
    for node, power in _POWERS.items():
        for count, at in enumerate(range(int(START) + 15, int(end), 15)):
            warm = 1 - math.exp(-count / 8)
            entries.append(
                MachineSample(
                    at=float(at),
                    node=node,
                    used_bytes=6.1e9 + 2e8 * warm,
                    temperature_c=41 + 30 * warm if node != NAS else None,
                    power_w=power * (0.4 + 0.6 * warm),
                    energy_j=power * 15.0 * count,
                    samples_per_s=_SPEEDS[node],
                    share=_SPEEDS[node] / sum(_SPEEDS.values()),
                    load=0.2 + 0.7 * warm,
                )
            )
    return entries


def _links() -> list[Entry]:
    pairs = ((DESK, MAC, 940.0, 0.4), (DESK, NAS, 88.0, 3.1), (MAC, NAS, 84.0, 3.4))
    links = [(a, b, mbps, rtt) for a, b, mbps, rtt in pairs]
    return [LinkSample(START + 30, tuple(links + [(b, a, mbps, rtt) for a, b, mbps, rtt in pairs]))]


def example_run(last: int = STEPS, *, rows: int = 5) -> list[Entry]:
    """Return the entries of the run as they are after ``last`` steps; with all 600 steps, it has ended."""
    steps = step_entries(last, rows)
    end = max((at for _, _, at, _, _ in _steps(last)), default=START + 40)
    facts = {DESK: ("NVIDIA GeForce RTX 3090", 24e9), MAC: ("Apple M2 Pro", 32e9), NAS: ("Intel N100", 16e9)}
    systems = {DESK: "Linux 6.8", MAC: "macOS 15.1", NAS: "Linux 6.1"}
    entries: list[Entry] = [
        LogHead(RUN, DESK, "agent", bytes(16), START),
        *(MachineFacts(node, NAMES[node], *facts[node], systems[node]) for node in NAMES),
        RunStart(
            at=START,
            command="barnraise run train.py --epochs 3",
            title="train.py",
            started_by="desk",
            options=(("copies", "2"), ("env", "auto")),
            environment=(("python", "3.12.7"), ("torch", "2.13.0")),
        ),
        TrainingGoal(START + 39, STEPS, BATCH, metric="loss"),
        *(
            GroupStart(_time_of(first) - 2, generation, first, members, "kept" if generation > 1 else "start")
            for generation, first, members in _GROUPS
            if first <= last
        ),
        *_plans(),
        *_events(),
        *(
            CheckpointSaved(_time_of(step - 1) + 1.5 * copy, step, node, 1.2e9)
            for step in range(100, last + 1, 100)
            for copy, node in enumerate((DESK, MAC) if step != 400 else (DESK, NAS))
        ),
        *_links(),
        *_samples(end),
    ]
    entries = [entry for entry in entries if getattr(entry, "at", 0.0) <= end]
    if last >= STEPS:
        entries.append(RunEnd(end + 2, 0, "the script ended"))
    return [*entries, *steps]
