"""Reader and judge of the commits that the members of a session record (BARNRAISE_TRACE_COMMITS)."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_LONGEST_LINE = 400  # bytes


class Commit:
    """One line of a commit trace: a member's time, step, group, digest and computed units."""

    def __init__(self, line: str) -> None:
        head, _, units = line.partition("[")
        at, step, generation, rank, world, digest, pid, *of = head.split()
        self.of = int(of[0]) if of else 0  # number of units of the step; 0 if the line does not have it
        self.at, self.step, self.digest, self.pid = float(at), int(step), digest, int(pid)
        self.generation, self.rank, self.world = int(generation), int(rank), int(world)
        self.units = [int(number) for number in units.strip(" ]\n").split(",") if number.strip()]


class Judgement(NamedTuple):
    """Verdict on a trace; lost units are counted only in steps that every member of the group recorded."""

    commits: int
    steps: int
    steps_not_judged: int  # for lost units: a member died between holding the result and writing it down
    hash_violations: int
    step_regressions: int
    units_doubled: int
    units_lost: int
    steps_missing: int

    @property
    def violations(self) -> int:
        """Count all that should be zero."""
        return sum(self._replace(commits=0, steps=0, steps_not_judged=0))


def read_commits(trace: Path) -> list[Commit]:
    """Read the whole lines of a trace: a member may have been killed while it wrote the last line."""
    return _whole(trace.read_bytes()) if trace.exists() else []


def last_commits(trace: Path, count: int) -> list[Commit]:
    """Return at most ``count`` of the last commits, without reading the whole file, for polling."""
    with trace.open("rb") as file:
        first = max(0, file.seek(0, os.SEEK_END) - count * _LONGEST_LINE)
        file.seek(first)
        text = file.read()
    if first:
        text = text.partition(b"\n")[2]
    return _whole(text)[-count:]


def _whole(text: bytes) -> list[Commit]:
    lines = text.decode(errors="replace").splitlines()
    return [Commit(line) for line in lines if line.endswith("]")]


def judge(commits: list[Commit], units: int) -> Judgement:
    by_step: dict[int, list[Commit]] = defaultdict(list)
    last: dict[int, int] = {}
    regressions = 0
    for commit in commits:
        by_step[commit.step].append(commit)
        regressions += commit.step <= last.get(commit.pid, 0)
        last[commit.pid] = commit.step
    doubled = lost = violations = unjudged = 0
    for members in by_step.values():
        violations += len({commit.digest for commit in members}) > 1
        counted = [unit for commit in members for unit in commit.units]
        doubled += len(counted) - len(set(counted))
        together = len({commit.generation for commit in members}) == 1 and len(members) == members[0].world
        unjudged += not together
        if together:
            lost += (members[0].of or units) - len(set(counted))
    missing = (max(by_step) - min(by_step) + 1 - len(by_step)) if by_step else 0
    return Judgement(len(commits), len(by_step), unjudged, violations, regressions, doubled, lost, missing)
