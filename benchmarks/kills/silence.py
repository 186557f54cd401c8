"""Peers that fall silent without dying: stopped processes, cut links, late ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.ranks.hosts import Rank, RankError
from lab import Lab

if TYPE_CHECKING:
    from benchmarks.kills.__main__ import Quartet

SIZE = 8_000_000
FOREVER = 1_000_000
USER_TIMEOUT = 2.0


@dataclass(frozen=True)
class Ended:
    """Result of one silence: the time and the error on each survivor."""

    what: str
    clock: float
    after: tuple[float, ...]
    errors: tuple[str, ...]
    right: bool

    @property
    def over(self) -> float:
        """Return the largest deviation from the expected time, in either direction."""
        return max((after - self.clock for after in self.after), key=abs)

    def row(self) -> Sequence[object]:
        after = " ".join(f"{value:.2f}" for value in self.after)
        return (self.what, self.clock, after, self.over, ", ".join(sorted(set(self.errors))))


def all_kinds(quartet: Quartet, lab: Lab, clock: float, repeats: int) -> list[Ended]:
    """Run every kind of silence, ``repeats`` times, each on a fresh group of four."""
    return [
        ended
        for repeat in range(repeats)
        for ended in (
            *(_stopped(quartet, clock, what, (1 + repeat) % 4) for what in ("trainer", "mover", "both")),
            _cut(quartet, lab, clock, repeat % 2, 2 + repeat % 2),
            _late(quartet, (1 + repeat) % 4),
        )
    ]


def _stopped(quartet: Quartet, clock: float, what: str, victim: int) -> Ended:
    """Send SIGSTOP to a rank: the kernel keeps its connections open, but no more bytes arrive."""
    members = list(quartet.ranks)
    quartet.join(members)
    comm_pids = [int(pid) for pid in members[victim].ask("comm_process_pids")]
    stopped = {
        "trainer": [members[victim].pid],
        "mover": comm_pids,
        "both": [members[victim].pid, *comm_pids],
    }[what]
    for rank in members:
        rank.tell("all_reduces", operations=FOREVER, size=SIZE)
    time.sleep(0.5)
    since = time.monotonic_ns()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    others = [rank for rank in members if rank is not members[victim]]
    ended = _ends(f"{what} of one rank stopped", clock, since, others, {victim})
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    quartet.replace_all()
    return ended


def _cut(quartet: Quartet, lab: Lab, clock: float, first: int, second: int) -> Ended:
    """Cut the link between two of the four; every rank survives, and its operation must still fail."""
    members = list(quartet.ranks)
    quartet.join(members)
    for rank in members:
        rank.tell("all_reduces", operations=FOREVER, size=SIZE)
    time.sleep(0.5)
    since = time.monotonic_ns()
    lab.cut(lab.hosts[first], lab.hosts[second])
    ended = _ends("link between two ranks cut", clock, since, members, {first, second})
    lab.heal_all()
    quartet.replace_all()
    return ended


def _late(quartet: Quartet, victim: int) -> Ended:
    """Skip a collective on one living rank: the operation times out and names that rank as late."""
    members = list(quartet.ranks)
    quartet.join(members, timeout=USER_TIMEOUT)
    for place, rank in enumerate(members):
        rank.tell("all_reduces", operations=1, size=SIZE, skip=place == victim)
    since = time.monotonic_ns()
    others = [rank for place, rank in enumerate(members) if place != victim]
    ended = _ends("one rank alive but late", USER_TIMEOUT, since, others, {victim}, error="OperationTimeout")
    quartet.replace_all()
    return ended


def _ends(
    what: str, clock: float, since: int, ranks: Sequence[Rank], guilty: set[int], error: str = "PeerLost"
) -> Ended:
    after, errors, right = [], [], True
    for rank in ranks:
        try:
            end: Mapping[str, Any] = rank.answer(clock + 10.0)
        except RankError:
            end = {"error": "no end", "at_ns": time.monotonic_ns(), "peer": None, "late": None}
        named = {end["peer"]} if error == "PeerLost" else set(end["late"] or ())
        after.append((end["at_ns"] - since) / 1e9)
        errors.append(f"{end['error']}({', '.join(str(peer) for peer in sorted(named, key=str))})")
        right = right and end["error"] == error and bool(named) and named <= guilty
    return Ended(what, clock, tuple(after), tuple(errors), right)


def figures(ended: Sequence[Ended]) -> dict[str, Any]:
    over = [after - case.clock for case in ended for after in case.after]
    return {
        "silent_worst_over_clock_s": max(over),
        "silent_furthest_from_clock_s": max(over, key=abs),
        "silent_cases": len(ended),
        "silent_right": sum(case.right for case in ended),
        "silence_clock_s": max(case.clock for case in ended),
    }
