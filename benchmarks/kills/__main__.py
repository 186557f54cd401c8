"""Recovery after killed and silent ranks: ``python -m benchmarks.kills [--quick]`` (root).

One of four ranks is killed at random moments inside collectives. The survivors must name it at once, regroup
in the same processes and compute the right result. Then peers fall silent in every possible way. At last one
group is rebuilt often enough to expose a leak. All times are of one monotonic clock.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.kills import silence
from benchmarks.ranks.hosts import Fleet, Rank, RankError, prepare_driver
from benchmarks.ranks.progress import Progress, plan
from benchmarks.ranks.rank_groups import lab_fleet

WORLD = 4
BYTES_PER_SECOND = 117e6
SMALLEST, LARGEST = 4_000_000, 40_000_000
PART_BYTES = 16_384  # more than heartbeats and announcements come to
AIMS = ("trainer", "trainer", "mover", "both")
WARMUP_REBUILDS = 200  # allocators and bounded memories fill up first; a leak goes on after that
PROCESSES = ("worker", "mover", "listener")
BROKEN = "broken before the kill"
NOTICE_SECONDS = 10.0
LIMIT_SECONDS = 0.5


@dataclass
class Quartet:
    """Four places, each with a living rank; a place whose rank was lost gets a new one."""

    fleet: Fleet
    backend: str
    store: Rank = field(init=False)
    ranks: list[Rank] = field(default_factory=list)
    spares: dict[int, Rank] = field(default_factory=dict)
    generation: int = 0
    joins: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = self.fleet.fork(0, "store")
        self._address = self.fleet.hosts[0].address
        self._port = self.store.ask("serve_store", address=self._address)
        self.ranks = [self._born(place) for place in range(WORLD)]
        self.spares = {place: self._born(place) for place in range(WORLD)}

    def _born(self, place: int) -> Rank:
        rank = self.fleet.fork(place, f"host{place}/{time.monotonic_ns()}")
        rank.ask("connect_store", address=self._address, port=self._port)
        return rank

    def pids(self, place: int, which: str) -> list[int]:
        """Return the processes of a rank: the trainer, its communication process, or both."""
        trainer = [self.ranks[place].pid]
        comm_pids = [int(pid) for pid in self.ranks[place].ask("comm_process_pids")]
        return {"trainer": trainer, "mover": comm_pids, "both": trainer + comm_pids}[which]

    def join(self, members: Sequence[Rank], timeout: float = 60.0) -> float:
        """Create a new group of these ranks; return the seconds until the last rank has joined."""
        self.generation += 1
        prefix = f"generation{self.generation}"
        for index, rank in enumerate(members):
            arguments = {"prefix": prefix, "rank": index, "world": len(members), "timeout": timeout}
            rank.tell("join", backend=self.backend, **arguments)
        return max(float(rank.answer(60.0)) for rank in members)

    def leave(self, members: Sequence[Rank]) -> float:
        for rank in members:
            rank.tell("leave")
        return max(float(rank.answer(60.0)) for rank in members)

    def checked(self, members: Sequence[Rank], seed: int) -> bool:
        for rank in members:
            rank.tell("checked_all_reduce", count=100_000, seed=seed)
        answers = [rank.answer(30.0) for rank in members]
        return all(answers)

    def replace(self, place: int) -> None:
        """Replace the rank by its spare, and fork the next spare while nothing is measured."""
        self.fleet.retire(self.ranks[place])
        self.ranks[place] = self.spares[place]
        self.spares[place] = self._born(place)

    def replace_all(self) -> None:
        for place in range(WORLD):
            self.replace(place)


@dataclass(frozen=True)
class Kill:
    """One kill that counts, or why it does not."""

    counts: bool
    why: str
    aim: str = ""
    latencies: tuple[float, ...] = ()
    right_peer: bool = False
    split: bool = False
    rebuild_seconds: float | None = None
    right_sum: bool = False


def kill_one(quartet: Quartet, source: random.Random, directory: Path) -> Kill:
    """Join four ranks, kill one inside a collective, and check the errors of the other three."""
    quartet.join(quartet.ranks)
    victim, seed, target = source.randrange(WORLD), source.randrange(1 << 30), source.randrange(1, 4)
    aim = source.choice(AIMS)
    pids = quartet.pids(victim, aim)
    page = directory / "progress"
    Progress.prepare(page)
    sizes = {"seed": seed, "smallest": SMALLEST, "largest": LARGEST}
    for place, rank in enumerate(quartet.ranks):
        rank.tell("collectives_until_error", progress=str(page) if place == victim else None, **sizes)
    if not _await_part(page, target):
        raise RankError("the collectives did not begin")
    moment = Progress.read(page).started_ns / 1e9
    moment += source.random() * _expected_seconds(*plan(seed, target, SMALLEST, LARGEST))
    time.sleep(max(moment - time.monotonic(), 0.0))
    killed_at = time.monotonic_ns()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    survivors = [rank for place, rank in enumerate(quartet.ranks) if place != victim]
    try:
        return replace(_aftermath(quartet, survivors, page, (victim, killed_at, seed)), aim=aim)
    except RankError as error:
        quartet.replace_all()
        return Kill(True, f"after the kill: {error}", aim, latencies=(NOTICE_SECONDS,))
    finally:
        quartet.replace(victim)


def _aftermath(quartet: Quartet, survivors: Sequence[Rank], page: Path, about: tuple[int, int, int]) -> Kill:
    """Collect the errors of the survivors, regroup them, and check an all-reduce."""
    victim, killed_at, seed = about
    ends = [rank.answer(NOTICE_SECONDS) for rank in survivors]
    kill = _judge(Progress.read(page), ends, victim, killed_at)
    rebuild = quartet.leave(survivors) + quartet.join(survivors)
    right_sum = quartet.checked(survivors, seed)
    quartet.leave(survivors)
    return replace(kill, rebuild_seconds=rebuild, right_sum=right_sum)


def _await_part(page: Path, target: int) -> bool:
    """Wait until the victim has sent part of its target operation, or is past it; False on a timeout."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        now = Progress.read(page)
        begun = now.running and now.sent_now - now.sent_before >= PART_BYTES
        if now.operation > target or (now.operation == target and begun):
            return True
        time.sleep(0.0005)
    return False


def _expected_seconds(kind: str, size: int) -> float:
    """Estimate how long the operation takes at 1 Gbit/s, so that a kill falls inside it."""
    passes = 2.0 if kind == "all_reduce" else 1.0
    return passes * (WORLD - 1) / WORLD * size / BYTES_PER_SECOND


def _judge(last: Progress, ends: Sequence[Mapping[str, Any]], victim: int, killed_at: int) -> Kill:
    latencies = tuple((end["at_ns"] - killed_at) / 1e9 for end in ends)
    right = all(end["error"] == "PeerLost" and end["peer"] == victim for end in ends)
    split = len({end["operation"] for end in ends}) > 1
    if not last.running:
        return Kill(False, "between operations", latencies=latencies, right_peer=right, split=split)
    if last.sent_now - last.sent_before < PART_BYTES:
        return Kill(False, "nothing sent yet", latencies=latencies, right_peer=right, split=split)
    if min(end["operation"] for end in ends) > last.operation:
        return Kill(False, "already complete everywhere", latencies=latencies, right_peer=right, split=split)
    return Kill(True, "; ".join(_faults(ends, victim)), latencies=latencies, right_peer=right, split=split)


def _faults(ends: Sequence[Mapping[str, Any]], victim: int) -> list[str]:
    return [
        f"expected PeerLost({victim}), got {end['error']}({end['peer']}): {end['text']}"
        for end in ends
        if end["error"] != "PeerLost" or end["peer"] != victim
    ]


def kills(quartet: Quartet, wanted: int, source: random.Random, directory: Path) -> list[Kill]:
    """Kill ranks until enough kills count; a round that fails before its kill does not count."""
    done: list[Kill] = []
    while sum(kill.counts for kill in done) < wanted and len(done) < 4 * wanted:
        try:
            kill = kill_one(quartet, source, directory)
        except RankError as error:
            print(f"  before the kill: {error}", flush=True)
            kill = Kill(False, BROKEN)
            quartet.replace_all()
        if kill.counts and kill.why:
            print(f"  {kill.why}", flush=True)
        done.append(kill)
    return done


def kill_figures(done: Sequence[Kill]) -> dict[str, Any]:
    counted = [kill for kill in done if kill.counts]
    latencies = [latency for kill in counted for latency in kill.latencies]
    rebuilds = [kill.rebuild_seconds for kill in done if kill.rebuild_seconds is not None]
    return {
        "kills": len(counted),
        "kills_not_counted": dict(Counter(kill.why for kill in done if not kill.counts)),
        "kills_by_aim": dict(Counter(kill.aim for kill in counted)),
        "broken_rounds": sum(kill.why == BROKEN for kill in done),
        "right_peer": sum(kill.right_peer for kill in counted),
        "within_limit": sum(max(kill.latencies) <= LIMIT_SECONDS for kill in counted),
        "worst_s": max(latencies, default=float("nan")),
        "median_s": report.Spread.of(latencies).median,
        "median_s_iqr": [report.Spread.of(latencies).low, report.Spread.of(latencies).high],
        "survivors_disagreed_on_operation": sum(kill.split for kill in counted),
        "next_allreduce_wrong": sum(not kill.right_sum for kill in counted),
        "survivors_rebuild_ms_median": report.Spread.of(rebuilds).median * 1e3,
    }


def rebuilds(quartet: Quartet, times: int) -> dict[str, Any]:
    """Create and destroy the group repeatedly in the same processes; then with Gloo, to know torch's own
    noise.
    """
    _rebuilt(quartet, quartet.backend, WARMUP_REBUILDS)
    answers = _rebuilt(quartet, quartet.backend, times)
    _rebuilt(quartet, "gloo", WARMUP_REBUILDS // 2)
    gloo = _rebuilt(quartet, "gloo", times // 2)
    seconds = report.Spread.of([max(turn) for turn in zip(*(a["seconds"] for a in answers), strict=True)])
    growth = {who: _growth(answers, who, times) for who in PROCESSES}
    worst = [max((growth[who][column] for who in PROCESSES), key=abs) for column in range(3)]
    return {
        "rebuilds": times,
        "rebuild_ms_median": seconds.median * 1e3,
        "rebuild_ms_iqr": [seconds.low * 1e3, seconds.high * 1e3],
        "fd_growth": worst[0],
        "thread_growth": worst[1],
        "rss_growth_kb_per_rebuild": worst[2],
        "rss_growth_kb_per_rebuild_by_process": {who: growth[who][2] for who in PROCESSES},
        "rss_growth_kb_per_rebuild_gloo": _growth(gloo, "worker", times // 2)[2],
        "rebuild_allreduce_wrong": sum(a["wrong"] for a in answers),
    }


def _rebuilt(quartet: Quartet, backend: str, times: int) -> list[Any]:
    every = max(times // 50, 1)
    quartet.generation += 1
    prefix = f"again{quartet.generation}"
    for index, rank in enumerate(quartet.ranks):
        rank.tell(
            "rebuild", backend=backend, prefix=prefix, rank=index, world=WORLD, times=times, every=every
        )
    return [rank.answer(60.0 + times) for rank in quartet.ranks]


def _growth(answers: Sequence[Any], who: str, times: int) -> list[float]:
    """Return the growth of descriptors and threads over the run, and of kilobytes per rebuild, of the worst
    rank.
    """
    series = [[sample[who] for sample in answer["samples"] if who in sample] for answer in answers]
    slopes = [
        max(
            (report.slope([row[column] for row in rows]) * len(series[0]) / times for rows in series), key=abs
        )
        for column in range(3)
    ]
    return [slopes[0] * times, slopes[1] * times, slopes[2]]


def show(figures: Mapping[str, Any], silent: Sequence[silence.Ended]) -> None:
    if silent:
        head = ["silent peer", "clock s", "ended after s", "over clock s", "errors"]
        print(report.table(head, [ended.row() for ended in silent]), end="\n\n")
    shown = {key: value for key, value in figures.items() if not isinstance(value, (dict, list))}
    print(report.table(["figure", "value"], list(shown.items())))


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="40 kills, 200 rebuilds: about three minutes")
    parser.add_argument("--backend", default="barnraise")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--rebuilds", type=int)
    parser.add_argument("--silence", type=float, help="the link's clock in seconds (quick: 2, else 5)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--only", choices=("kills", "silence", "rebuilds"))
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> Mapping[str, Any]:
    options = arguments(given)
    prepare_driver()
    clock = options.silence or (2.0 if options.quick else 5.0)
    wanted = options.kills or (40 if options.quick else 200)
    times = options.rebuilds or (200 if options.quick else 1000)
    print(f"{report.environment_line()}  seed {options.seed}", flush=True)
    figures: dict[str, Any] = {}
    silent: list[silence.Ended] = []
    start = time.monotonic()
    with lab_fleet(hosts=WORLD, rate="1gbit", ours=options.backend == "barnraise") as (lab, fleet):
        quartet = Quartet(fleet, options.backend)
        if options.only in (None, "kills"):
            figures |= kill_figures(kills(quartet, wanted, random.Random(options.seed), fleet.directory))
        if options.only in (None, "rebuilds"):
            figures |= rebuilds(quartet, times)
    if options.only in (None, "silence"):
        beat = min(1.0, clock / 5)
        settings = {"BARNRAISE_LINK_SILENCE_S": f"{clock:g}", "BARNRAISE_LINK_HEARTBEAT_S": f"{beat:g}"}
        with lab_fleet(hosts=WORLD, rate="1gbit", settings=settings, ours=True) as (lab, fleet):
            silent = silence.all_kinds(Quartet(fleet, options.backend), lab, clock, 1 if options.quick else 5)
            figures |= silence.figures(silent)
    show(figures, silent)
    report.last_line(figures | {"seed": options.seed, "seconds": time.monotonic() - start})
    return figures


if __name__ == "__main__":
    main()
