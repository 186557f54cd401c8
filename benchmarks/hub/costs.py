"""Cost of a hub's work, measured with a small crowd (`emulated_members`) and with single parts of the hub.

A hub's event loop is its first thread. So the CPU time in each phase of a round is known for the loop and for
the other threads. Two sizes of updates separate the cost of each update from the cost of each megabyte.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil
import torch

from barnraise.core.files import sync
from barnraise.hub.aggregation.aggregate import MergeInput, merge_chunk
from barnraise.hub.protocol.messages import RoundConfig, SampleSpan, VersionStep
from barnraise.hub.protocol.vector_file import VectorFile, VectorForm
from barnraise.hub.storage.log import CommittedRound as Version
from barnraise.hub.storage.log import Contribution, HubLog, change
from benchmarks.hub.emulated_members import Leaf, Payloads, Round, create_run, play_round
from benchmarks.hub.process import UNVERIFIED, HubProcess
from benchmarks.ranks.hosts import working_directory
from benchmarks.simulation.hub.hub import Costs, Sizes
from benchmarks.simulation.hub.topologies import CrowdCosts

_TERMS = RoundConfig(round_s=600.0)
_PHASES = ("ask", "push", "pull")
LARGE, SMALL = 1_000_000, 400_000  # parameters, a byte each
_HANDSHAKES = 60


class Spent(NamedTuple):
    """Seconds for each member in a phase of a round: the hubs' loops, their threads, the crowd's process."""

    loop_s: float
    threads_s: float
    crowd_s: float


class Played(NamedTuple):
    members: int
    regions: int
    megabytes: float
    round_s: float  # the middle one
    seconds: dict[str, float]  # of each phase
    spent: dict[str, Spent]
    leaf_bytes: float  # in a round
    peak_mb: float
    handshake_s: float
    others: float  # cores that other processes of the machine used meanwhile


def play(members: int, regions: int, rounds: int, numel: int = LARGE) -> Played:
    """Run rounds with a real crowd, as `benchmarks.hub` does; the first round is not counted."""
    terms = msgspec.structs.replace(_TERMS, first_batches=4 * members) if regions else _TERMS
    with working_directory() as room, ExitStack() as stack:
        hub = stack.enter_context(HubProcess(room / "hub", terms))
        description = asyncio.run(create_run(Leaf(hub.invite("owner"), "owner", hub.owner), numel))
        region_hubs = [
            stack.enter_context(HubProcess(room / f"region{number}", None, parent=hub.invite("friend")))
            for number in range(regions)
        ]
        invites = [entry_hub.invite("friend", members) for entry_hub in region_hubs or [hub]]
        leaves = [Leaf(invites[number % len(invites)], f"leaf {number}") for number in range(members)]
        hubs = [hub, *region_hubs]
        marks: list[tuple[float, float, float]] = []

        def mark() -> None:
            busy = [hub_process.busy_s() for hub_process in hubs]
            marks.append(
                (sum(times[0] for times in busy), sum(times[1] for times in busy), time.process_time())
            )

        machine: list[Machine] = []

        async def rounds_of_all() -> list[Round]:
            for leaf in leaves:
                await leaf.join()
                leaf.version = description.version
            played = [await play_round(leaves, description, numel, 0)]
            for leaf in leaves:
                leaf.wire.sent = leaf.wire.received = 0
            machine.append(_machine(hubs))
            played += [
                await play_round(leaves, description, numel, number + 1, mark) for number in range(rounds)
            ]
            machine.append(_machine(hubs))
            for leaf in leaves:
                leaf.wire.close()
            return played[1:]

        played = asyncio.run(rounds_of_all())
        assert all(played_round.counted == members for played_round in played), "every update counts"
        traffic = sum(leaf.wire.sent + leaf.wire.received for leaf in leaves)
        handshake_s = 0.0 if regions else _handshake_s(hub)
        peak_mb = max(hub_process.peak_mb for hub_process in hubs)
    seconds = {
        "ask": statistics.median(played_round.lease_s for played_round in played),
        "push": statistics.median(played_round.push_s for played_round in played),
        "pull": statistics.median(played_round.commit_and_pull_s for played_round in played),
    }
    return Played(
        members,
        regions,
        numel / 1e6,
        statistics.median(played_round.seconds for played_round in played),
        seconds,
        _by_phase(marks, members * rounds),
        traffic / members / rounds,
        peak_mb,
        handshake_s,
        _others(*machine),
    )


class Machine(NamedTuple):
    at: float
    busy_s: float  # of all cores, for any process
    own_s: float  # of the hubs and this process


def _machine(hubs: Sequence[HubProcess]) -> Machine:
    times = psutil.cpu_times()
    busy_s = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    return Machine(time.monotonic(), busy_s, sum(sum(hub.busy_s()) for hub in hubs) + time.process_time())


def _others(before: Machine, after: Machine) -> float:
    busy_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, busy_s / (after.at - before.at))


def _by_phase(marks: Sequence[tuple[float, float, float]], times: int) -> dict[str, Spent]:
    """Sum the marks, which come in pairs before and after each phase, by phase."""
    spent = {}
    for place, phase in enumerate(_PHASES):
        pairs = [(marks[index], marks[index + 1]) for index in range(2 * place, len(marks), 6)]
        sums = (sum(late[which] - early[which] for early, late in pairs) / times for which in range(3))
        spent[phase] = Spent(*sums)
    return spent


def _handshake_s(hub: HubProcess) -> float:
    """Return the event loop's seconds for a connection that is made and sends no request."""
    parts = urlsplit(hub.address)

    async def connect() -> None:
        for _ in range(_HANDSHAKES):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=UNVERIFIED)
            writer.close()

    before = hub.busy_s()[0]
    asyncio.run(connect())
    return (hub.busy_s()[0] - before) / _HANDSHAKES


def merge_mb_s(updates: int = 16) -> float:
    """Return the CPU seconds per megabyte of an update, with the hub's own mean."""
    form = VectorForm(LARGE, _TERMS.chunk, _TERMS.codec, 0)
    payloads, source = Payloads(form, 1), random.Random(1)
    torch.set_num_threads(1)
    with working_directory() as room:
        inputs = []
        for number in range(updates):
            path = room / f"update{number}"
            path.write_bytes(payloads.draw(source))
            inputs.append(MergeInput(VectorFile(path, form), 1.0))
        begin = time.process_time()
        for index in range(form.count):
            merge_chunk(inputs, index, None)
        return (time.process_time() - begin) / updates / (LARGE / 1e6)


def sync_s(times: int = 30) -> float:
    """Return the median seconds of a sync of a small file."""
    with working_directory() as room, (room / "synced").open("wb", buffering=0) as file:
        durations = []
        for _ in range(times):
            file.write(bytes(4096))
            begin = time.perf_counter()
            sync(file.fileno())
            durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


_TRIM = """
import resource, sys, torch
from barnraise.hub.aggregation.aggregate import trimmed_mean
torch.set_num_threads(1)
count = int(sys.argv[1])
trimmed_mean(torch.randn(count, 65536), [1.0] * count, 0.25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def trim_mb() -> float:
    """Return the memory in MB that a trimmed mean takes per update, for each core that works on a chunk."""

    def peak(count: int) -> float:
        command = [sys.executable, "-c", _TRIM, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout) * 1024 / 1e6

    return (peak(300) - peak(100)) / 200


class Logged(NamedTuple):
    """Bytes that the log grows by for one update in a version; seconds to read a log at a hub's start."""

    update_bytes: float
    read_s: float


def logged(updates: int = 2000) -> Logged:
    with working_directory() as room:
        log = HubLog(room)
        before = _size(room)
        versions = 5
        for number in range(versions):
            step = VersionStep("delta", number, f"{number:064x}", 1, "int8")
            parts = [_contribution(number, index) for index in range(updates)]
            log.transact([change(HubLog.put_version, Version(number=number, step=step), parts)])
        log.close()
        grown = (_size(room) - before) / versions / updates
        log = HubLog(room)
        begin = time.perf_counter()
        log.read()
        read_s = time.perf_counter() - begin
        log.close()
    return Logged(grown, read_s)


def _contribution(number: int, index: int) -> Contribution:
    node = "-".join(["ABCDEFG"] * 8) + "ABCDEF"
    first = 300 * index
    return Contribution(
        node=node,
        lease=f"{number * 10_000 + index:032x}",
        samples=300,
        spans=(SampleSpan(0, first, first + 300),),
        behind=0,
        weight=300.0,
        scale=1.0,
        sha256=f"{number * 10_000 + index:064x}",
        loss=2.0,
    )


def _size(room: Path) -> int:
    return sum(file.stat().st_size for file in room.iterdir())


def costs_of(
    large: Played, small: Played, merge_s: float, synced_s: float
) -> tuple[Costs, CrowdCosts, Sizes]:
    """Derive the costs from two crowds that differ only in the size of their updates."""

    def split(phase: str, which: int) -> tuple[float, float]:
        """Return the seconds for each member, and for each megabyte."""
        large_s, small_s = large.spent[phase][which], small.spent[phase][which]
        slope = max(0.0, (large_s - small_s) / (large.megabytes - small.megabytes))
        return max(0.0, large_s - slope * large.megabytes), slope

    push_s, push_mb_s = split("push", 0)
    admit_s, admit_mb_s = split("push", 1)
    head_s, pull_mb_s = split("pull", 0)
    read_s, read_mb_s = split("pull", 1)
    costs = Costs(
        ask_s=large.spent["ask"].loop_s + large.spent["ask"].threads_s,
        push_s=push_s,
        push_mb_s=push_mb_s,
        admit_s=admit_s,
        admit_mb_s=admit_mb_s,
        head_s=head_s + read_s,
        pull_mb_s=pull_mb_s,
        read_mb_s=max(0.0, read_mb_s - merge_s),
        merge_mb_s=merge_s,
        sync_s=synced_s,
        handshake_s=large.handshake_s,
    )
    crowd = CrowdCosts(*(large.spent[phase].crowd_s for phase in _PHASES))
    update = int(large.megabytes * 1e6)
    words = int((large.leaf_bytes - 2 * update) / 5)  # questions in a round of the crowd's
    return costs, crowd, Sizes(update, update, words)
