"""Members that train by drawing random numbers, and a check of what their hub has written."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch

from barnraise.core.errors import BarnraiseError
from barnraise.hub.protocol.messages import HubDataOrder
from barnraise.hub.storage.create import hub_blobs
from barnraise.hub.storage.log import HubLog
from tests.unit.hub.hub_process import LAYOUT, Friend, HubProcess, Refused

COURSE = HubDataOrder(samples=100_000, batch=10)


class Worker(threading.Thread):
    """Member that pulls, trains by drawing numbers, and pushes.

    It retries every failure with the same bytes.
    """

    def __init__(self, friend: Friend, folder: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self.friend, self.folder = friend, folder
        self.random = torch.Generator().manual_seed(seed)
        self.stopped = threading.Event()
        self.heads: list[int] = []
        self.accepted: list[str] = []
        self.refused: list[str] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._round()
            except Refused as error:
                self.refused.append(error.problem.kind)
                time.sleep(0.1)
            except (httpx.TransportError, httpx.HTTPStatusError, BarnraiseError):
                time.sleep(0.3)

    def _round(self) -> None:
        self.heads.append(self.friend.pull(self.folder, wait=1.0).version)
        lease = self.friend.lease()
        update = torch.randn(LAYOUT.numel, generator=self.random) * 0.01
        while not self.stopped.is_set():
            try:
                self.friend.push(lease, update)
                self.accepted.append(lease.id)
                return
            except httpx.TransportError:
                time.sleep(0.3)


def stop(workers: Sequence[Worker], seconds: float) -> None:
    for worker in workers:
        worker.stopped.set()
    for worker in workers:
        worker.join(seconds)


def checked(hub: HubProcess, workers: list[Worker], known: dict[int, str]) -> int:
    """Check a dead hub: each version, lease and sample counts once, and no accepted update is missing."""
    log, blobs = HubLog(hub.directory), hub_blobs(hub.directory)
    everything = log.read()
    numbers = [version.number for version in everything.versions]
    assert numbers == list(range(len(numbers)))
    for version in everything.versions:
        assert known.setdefault(version.number, version.step.sha256) == version.step.sha256, (
            "history was rewritten"
        )
    head = everything.versions[-1]
    for name in (head.step.sha256, head.momentum, head.feedback):
        assert name is None or blobs.has(name), "the log names a blob that is not there"
    parts = [part for number in numbers for part in log.contributions(number)]
    log.close()
    leases = Counter(part.lease for part in parts)
    assert not leases or max(leases.values()) == 1
    places = Counter(place for part in parts for span in part.spans for place in range(span.first, span.last))
    assert not places or max(places.values()) == 1
    waiting = {arrival.update.lease for arrival in everything.arrivals}
    accepted = {lease for worker in workers for lease in list(worker.accepted)}
    assert accepted <= set(leases) | waiting, "an update that was accepted is gone"
    assert max((version for worker in workers for version in list(worker.heads)), default=0) <= numbers[-1]
    return numbers[-1]
