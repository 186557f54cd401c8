"""Records that stay on a disk: those that changed last, and none that a person removed. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from barnraise.agent_client.history.requests import KeptLog
from barnraise.history.entries import RunId, Seconds

MOST_REMOVALS = 1024
_SLACK_S = 86_400.0  # by which the clocks of machines may differ
_BLOCK = 4096  # bytes that the smallest file takes on a disk


class RemovedRecord(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Record that a person removed. Logs that were made up to ``at`` do not come back."""

    at: Seconds
    run: RunId


def removal(run: str, now: float, made_at: Iterable[float]) -> RemovedRecord:
    """Return the removal of a record whose logs were made at these times.

    A later run of the same name keeps its record, if it starts a day later.
    """
    return RemovedRecord(max([now, *made_at]) + _SLACK_S, run)


def newest_removals(removals: Iterable[RemovedRecord]) -> tuple[RemovedRecord, ...]:
    """Return one removal for each run, and only the newest ones if there are too many."""
    latest = {item.run: item for item in sorted(removals)}
    return tuple(sorted(latest.values())[-MOST_REMOVALS:])


def removals_digest(removals: Sequence[RemovedRecord]) -> bytes:
    """Return bytes that differ if two machines know of different removals."""
    return hashlib.sha256(msgspec.msgpack.encode(removals)).digest()[:16]


def is_removed(run: str, made_at: float, removals: Mapping[str, float]) -> bool:
    """Tell whether a log belongs to a record that a person removed. ``removals``: their times, by run."""
    return run in removals and made_at <= removals[run]


def runs_beyond(logs: Iterable[KeptLog], most_bytes: int, active: Collection[str]) -> list[str]:
    """Return the runs whose records are too much for the disk: those without a change for longest first.

    Of a log that is named twice, the larger size and the later change count. Many small logs count as
    large as they are on a disk. Active runs stay.
    """
    sizes: dict[tuple[str, bytes], int] = {}
    changed: dict[str, float] = {}
    for log in logs:
        key = log.run, log.node
        sizes[key] = max(log.size, sizes.get(key, 0), _BLOCK)
        changed[log.run] = max(log.changed_at, changed.get(log.run, 0.0))
    by_run: dict[str, int] = defaultdict(int)
    for (run, _), size in sizes.items():
        by_run[run] += size
    total = sum(by_run.values())
    beyond = []
    for run in sorted(changed, key=lambda run: (changed[run], run)):
        if total <= most_bytes:
            break
        if run not in active:
            total -= by_run[run]
            beyond.append(run)
    return beyond
