"""Hub under a thousand emulated members, under SIGKILL, and with hostile workers. Loopback; needs no root.

    python -m benchmarks.hub --quick         1,000 members with 1 MB each, 12 kills, 20 workers
    python -m benchmarks.hub                 more rounds, 200 kills
    python -m benchmarks.hub --only kills

Members have real connections, signatures and payloads. They push all at once, without training in between. So
a round's time is that of the hub and the members, which share the machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from barnraise.core.errors import BarnraiseError
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import (
    JoinResponse,
    RoundConfig,
    RunDescription,
    VersionHead,
    VersionStep,
)
from barnraise.hub.protocol.vector_file import VectorForm, add_vector
from barnraise.hub.storage.log import HubLog
from barnraise.identity.keys import NodeKey
from benchmarks.hub.emulated_members import Leaf, Round, create_run, play_round
from benchmarks.hub.process import HubProcess
from benchmarks.hub.training_members import KINDS, Task, Worker, await_all
from benchmarks.ranks.hosts import prepare_driver, tail, working_directory
from benchmarks.report import environment_line, last_line, table

_MEGABYTE = 1_000_000
_CROWD_TERMS = RoundConfig(round_s=600.0)
_KILL_TERMS = RoundConfig(round_s=0.5, grace=0.5)
_TRAIN_TERMS = RoundConfig(round_s=2.0, grace=0.5)
_WORKERS, _HOSTILE = 20, 5
_SERVES_AGAIN_S = 5.0  # at most, after a kill
_NEVER = ("updates_lost", "rounds_lost", "leases_counted_twice", "samples_counted_twice")


class Amount(NamedTuple):
    sizes: tuple[int, ...]
    rounds: int
    kills: int
    samples: int  # that each of the runs with and without hostile workers trains on
    repeats: int


QUICK = Amount((10, 100, 1000), 2, 12, 61_440, 2)
FULL = Amount((10, 100, 1000), 5, 200, 122_880, 4)


# load


def crowd(size: int, rounds: int, plain: bool, role: Any = "friend") -> dict[str, Any]:
    """Measure rounds with ``size`` members at one hub."""
    with working_directory() as room, HubProcess(room / "hub", _CROWD_TERMS, plain=plain) as hub:
        idle_mb = hub.memory_mb()
        figures = asyncio.run(_crowd(hub, size, rounds, role))
        return figures | {"hub_idle_mb": idle_mb, "hub_peak_mb": hub.peak_mb}


async def _crowd(hub: HubProcess, size: int, rounds: int, role: Any) -> dict[str, Any]:
    owner = Leaf(hub.invite("owner"), "owner", hub.owner)
    description = await create_run(owner, _MEGABYTE)
    invite = hub.invite(role, size)
    leaves = [Leaf(invite, f"leaf {number}") for number in range(size)]
    return await _play(leaves, description, rounds, [hub])


def tree(size: int, regions: int, rounds: int, plain: bool) -> dict[str, Any]:
    """Measure rounds with the same number of members at regional hubs, which are the members of one hub.

    A region's first lease has enough for all members; otherwise that would take some rounds.
    """
    terms = msgspec.structs.replace(_CROWD_TERMS, first_batches=_CROWD_TERMS.first_batches * size)
    with working_directory() as room, ExitStack() as stack:
        hub = stack.enter_context(HubProcess(room / "hub", terms, plain=plain))
        owner = Leaf(hub.invite("owner"), "owner", hub.owner)
        description = asyncio.run(create_run(owner, _MEGABYTE))
        region_hubs = []
        for number in range(regions):
            parent = hub.invite("friend")
            region = HubProcess(room / f"region{number}", None, plain=plain, parent=parent)
            region_hubs.append(stack.enter_context(region))
        invites = [region.invite("friend", size) for region in region_hubs]
        leaves = [Leaf(invites[number % regions], f"leaf {number}") for number in range(size)]
        figures = asyncio.run(_play(leaves, description, rounds, [hub, *region_hubs]))
        peaks = {"hub_peak_mb": hub.peak_mb, "region_peak_mb": max(region.peak_mb for region in region_hubs)}
        return figures | peaks | {"regions": regions}


async def _play(
    leaves: Sequence[Leaf], description: RunDescription, rounds: int, hubs: Sequence[HubProcess]
) -> dict[str, Any]:
    begin = time.monotonic()
    await asyncio.gather(*[leaf.join() for leaf in leaves])
    joined_s = time.monotonic() - begin
    for leaf in leaves:
        leaf.version = description.version  # as if it had fetched the base, which costs each once
        leaf.wire.sent = leaf.wire.received = 0
    cpu = sum(hub.cpu_s() for hub in hubs)
    played = [await play_round(leaves, description, _MEGABYTE, number) for number in range(rounds)]
    cpu = sum(hub.cpu_s() for hub in hubs) - cpu
    for leaf in leaves:
        leaf.wire.close()
    return _figures(leaves, played) | {"joined_s": joined_s, "hub_cpu_s_per_round": cpu / rounds}


def _figures(leaves: Sequence[Leaf], played: Sequence[Round]) -> dict[str, Any]:
    pushes = [seconds for leaf in leaves for seconds in leaf.pushes]
    pulls = [seconds for leaf in leaves for seconds in leaf.pulls]
    rounds = len(played)
    traffic = sum(leaf.wire.sent + leaf.wire.received for leaf in leaves)
    refused: dict[str, int] = {}
    for played_round in played:
        for kind, count in played_round.refused.items():
            refused[kind] = refused.get(kind, 0) + count
    return {
        "members": len(leaves),
        "rounds": rounds,
        "round_s": statistics.mean(played_round.seconds for played_round in played),
        "lease_s": statistics.mean(played_round.lease_s for played_round in played),
        "push_s": statistics.mean(played_round.push_s for played_round in played),
        "commit_and_pull_s": statistics.mean(played_round.commit_and_pull_s for played_round in played),
        "updates_counted": sum(played_round.counted for played_round in played),
        "updates_lost": len(leaves) * rounds - sum(played_round.counted for played_round in played),
        "refused": refused,
        "push_p50_s": _part(pushes, 0.5),
        "push_p99_s": _part(pushes, 0.99),
        "pull_p50_s": _part(pulls, 0.5),
        "pull_p99_s": _part(pulls, 0.99),
        "leaf_bytes": traffic / len(leaves) / rounds,
    }


def _part(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


# kills


class Witness(threading.Thread):
    """Observer that records every version that the hub has ever announced, with its content hash."""

    def __init__(self, hub: HubProcess) -> None:
        super().__init__(daemon=True)
        invite = hub.invite("friend")
        self._invite = invite
        self._key = NodeKey.generate()
        self.client = HubClient(invite.addresses, invite.hub_id, self._key, say=lambda words: None)
        self.announced: dict[int, VersionStep] = {}
        self.times: list[float] = []
        self.changed: list[int] = []
        self.lost = 0
        self.ended = threading.Event()

    def run(self) -> None:
        with suppress(BarnraiseError):
            self.client.ask_with_retries(
                "POST", "/v1/members", JoinResponse, self._invite.request(self._key.id, "witness")
            )
        while not self.ended.is_set():
            newest = max(self.announced, default=None)
            query: dict[str, str | int | float] = {} if newest is None else {"after": newest, "wait": 5}
            try:
                head = self.client.ask("GET", "/v1/head", VersionHead, query=query, wait_s=5.0)
            except BarnraiseError:
                time.sleep(0.05)
                continue
            self.note(head, newest)

    def note(self, head: VersionHead, newest: int | None) -> None:
        if newest is not None and head.version < newest:
            self.lost = max(self.lost, newest - head.version)
        for step in head.steps:
            if (
                step.version in self.announced
                and self.announced[step.version] != step
                and step.kind == "delta"
            ):
                self.changed.append(step.version)
            self.announced.setdefault(step.version, step)
        if newest is None or head.version > newest:
            self.times.append(time.monotonic())


def kills(count: int, seed: int) -> dict[str, Any]:
    """Send SIGKILL at random instants while six workers train; compare announced versions with the log."""
    source, task = random.Random(seed), Task()
    with working_directory() as room, HubProcess(room / "hub", _KILL_TERMS) as hub:
        workers = _workers(hub, task, room, honest=6, samples=1 << 60)
        witness = Witness(hub)
        witness.start()
        restarts, next_rounds, used = [], [], []
        for number in range(count):
            _await_round(witness, 60.0)
            time.sleep(source.uniform(0.0, 1.5))
            hub.kill()
            restarts.append(hub.start())
            if restarts[-1] > _SERVES_AGAIN_S:
                print(f"start {number} took {restarts[-1]:.1f} s\n{tail(hub.log)}", flush=True)
            used.append(hub.cpu_s())
            begin = time.monotonic()
            _await_round(witness, 120.0)
            next_rounds.append(time.monotonic() - begin)
        for worker in workers:
            worker.stopping.set()
        for worker in workers:
            worker.join(60.0)
        witness.ended.set()
        witness.join(30.0)
        hub.kill()
        checked = _check_log(hub.directory, witness)
    return checked | {
        "kills": count,
        "restart_s_median": statistics.median(restarts),
        "restart_s_worst": max(restarts),
        "restart_cpu_s_median": statistics.median(used),
        "next_round_s_median": statistics.median(next_rounds),
        "next_round_s_worst": max(next_rounds),
        "workers_ended_by": [worker.ended_by for worker in workers if worker.ended_by],
    }


def _await_round(witness: Witness, longest_s: float) -> None:
    """Wait until there is one version more than now."""
    before, deadline = len(witness.times), time.monotonic() + longest_s
    while len(witness.times) == before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no round in {longest_s:g} s")
        time.sleep(0.01)


def _check_log(directory: Path, witness: Witness) -> dict[str, Any]:
    """Check the final log: each announced version is there unchanged, and no sample counted twice."""
    log = HubLog(directory)
    try:
        versions = {version.number: version for version in log.read().versions}
        parts = [part for number in versions for part in log.contributions(number)]
    finally:
        log.close()
    differ = [
        number
        for number, step in witness.announced.items()
        if step.kind == "delta" and (number not in versions or versions[number].step != step)
    ]
    spans = sorted(span for part in parts for span in part.spans)
    doubled = sum(
        max(0, earlier.last - later.first)
        for earlier, later in pairwise(spans)
        if earlier.epoch == later.epoch
    )
    leases = [part.lease for part in parts]
    return {
        "rounds": max(versions),
        "rounds_lost": witness.lost + len(differ) + len(witness.changed),
        "leases_counted_twice": len(leases) - len(set(leases)),
        "samples_counted_twice": doubled,
    }


def _workers(
    hub: HubProcess,
    task: Task,
    room: Path,
    *,
    honest: int,
    samples: int,
    is_together: bool = False,
    hostile: Sequence[tuple[str, ...]] = (),
    role: Any = "friend",
) -> list[Worker]:
    """Create and start the workers; the first is the owner."""
    seen: list[torch.Tensor] = []
    start = threading.Barrier(honest + len(hostile)) if is_together else None
    made = []
    for number in range(honest + len(hostile)):
        folder = room / f"worker{number}"
        folder.mkdir()
        invite = hub.invite("owner" if number == 0 else role)
        kinds = hostile[number - honest] if number >= honest else ()
        key = hub.owner if number == 0 else None
        name = f"worker {number}"
        worker = Worker(
            invite, name, task, folder, samples=samples, start=start, owner_key=key, kinds=kinds, seen=seen
        )
        made.append(worker)
    for worker in made:
        worker.start()
    return made


# hostile


def train(hostile: Sequence[tuple[str, ...]], samples: int) -> dict[str, Any]:
    """Train with twenty strangers on ``samples`` samples; return the loss on held-out samples."""
    task = Task()
    with working_directory() as room, HubProcess(room / "hub", _TRAIN_TERMS) as hub:
        workers = _workers(
            hub,
            task,
            room,
            honest=_WORKERS - len(hostile),
            samples=samples,
            is_together=True,
            hostile=hostile,
            role="stranger",
        )
        begin = time.monotonic()
        await_all(workers, 400.0)
        took = time.monotonic() - begin
        state, version = _head_state(hub, task)
        hub.kill()
        log = HubLog(hub.directory)
        content = log.read()
        log.close()
    kinds: dict[str, int] = {}
    for refusal in content.refusals:
        kinds[refusal.kind] = kinds.get(refusal.kind, 0) + 1
    return {
        "loss": task.held_out_loss(state),
        "version": version,
        "samples": sum(committed.samples for committed in content.versions),
        "seconds": took,
        "refused": kinds,
        "quarantined": sum(bool(member.quarantine) for member in content.members.values()),
        "honest_quarantined": sum(not worker.kinds and bool(worker.ended_by) for worker in workers),
    }


def _head_state(hub: HubProcess, task: Task) -> tuple[torch.Tensor, int]:
    """Rebuild the newest state from the chain of versions alone."""
    invite = hub.invite("friend")
    key = NodeKey.generate()
    client = HubClient(invite.addresses, invite.hub_id, key)
    client.ask("POST", "/v1/members", JoinResponse, invite.request(key.id, "judge"))
    description = client.ask("GET", "/v1/run", RunDescription)
    state = torch.zeros(task.layout.numel)
    head = client.head(None)
    with working_directory() as room:
        for step in head.steps:
            client.fetch(step.sha256, room / step.sha256, size=step.size)
            form = VectorForm(state.numel(), description.terms.chunk, step.codec, step.version)
            add_vector(room / step.sha256, form, state, is_base=step.kind == "base")
    client.close()
    return state, head.version


def hostile(samples: int, repeats: int) -> dict[str, Any]:
    """Compare training without and with hostile workers; the spread of clean runs gives the scale."""
    kinds: list[tuple[str, ...]] = [("sign-flip",), ("random",), ("x100", "nan"), ("copied",)]
    kinds.append(("stale", "oversize", "malformed"))
    assert {kind for several in kinds for kind in several} == set(KINDS)
    clean: list[dict[str, Any]] = []
    attacked: list[dict[str, Any]] = []
    for _ in range(repeats):
        for runs, some in ((clean, kinds[:0]), (attacked, kinds[:_HOSTILE])):
            runs.append(train(some, samples))
            print(f"{time.strftime('%X')} {len(some)} hostile: {runs[-1]}", flush=True)
    losses = [run["loss"] for run in clean]
    mean = statistics.mean(losses)
    return {
        "clean_losses": losses,
        "hostile_losses": [run["loss"] for run in attacked],
        "hostile_loss_gap": statistics.mean(run["loss"] for run in attacked) / mean - 1,
        "clean_loss_spread": (max(losses) - min(losses)) / mean,
        "hostile_refused": [run["refused"] for run in attacked],
        "hostile_quarantined": [run["quarantined"] for run in attacked],
        "honest_quarantined": sum(run["honest_quarantined"] for run in (*clean, *attacked)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("load", "tree", "kills", "hostile"), action="append")
    parser.add_argument("--plain", action="store_true", help="the crowd without TLS, as behind a proxy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--regions", type=int, default=4)
    options = parser.parse_args()
    prepare_driver()
    torch.set_num_threads(1)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    amount = QUICK if options.quick else FULL
    amount = amount._replace(kills=options.kills or amount.kills, rounds=options.rounds or amount.rounds)
    amount = amount._replace(sizes=tuple(options.sizes or amount.sizes))
    print(environment_line(), flush=True)
    begin = time.monotonic()
    figures: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "load": lambda: load(amount, options.plain),
        "tree": lambda: {"tree": tree(amount.sizes[-1], options.regions, amount.rounds, options.plain)},
        "kills": lambda: kills(amount.kills, options.seed),
        "hostile": lambda: hostile(amount.samples, amount.repeats),
    }
    for name in options.only or parts:
        result = parts[name]()
        print(f"{time.strftime('%X')} {name}: {result}", flush=True)
        figures |= result
    last_line({**figures, "seconds": time.monotonic() - begin})
    return 1 if any(figures.get(name) for name in _NEVER) else 0


def load(amount: Amount, plain: bool) -> dict[str, Any]:
    by_size = {}
    for size in amount.sizes:
        by_size[size] = crowd(size, amount.rounds, plain)
        print(f"{time.strftime('%X')} {size} members: {by_size[size]}", flush=True)
    names = list(by_size[amount.sizes[0]])
    rows = [[name, *(result[name] for result in by_size.values() if name != "refused")] for name in names]
    print(table(["", *map(str, amount.sizes)], [row for row in rows if row[0] != "refused"]))
    smallest, largest = amount.sizes[0], amount.sizes[-1]
    return {
        "nodes": largest,
        "rounds_per_min": 60 / by_size[largest]["round_s"],
        "push_p50_s": by_size[largest]["push_p50_s"],
        "push_p99_s": by_size[largest]["push_p99_s"],
        "pull_p50_s": by_size[largest]["pull_p50_s"],
        "pull_p99_s": by_size[largest]["pull_p99_s"],
        f"leaf_bytes_{largest}_over_{smallest}": by_size[largest]["leaf_bytes"]
        / by_size[smallest]["leaf_bytes"],
        "updates_lost": sum(result["updates_lost"] for result in by_size.values()),
        f"hub_rss_mb_{largest}": by_size[largest]["hub_peak_mb"],
        f"hub_rss_mb_{smallest}": by_size[smallest]["hub_peak_mb"],
        "flat": {str(size): result for size, result in by_size.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
