"""Helpers of the finder tests: a recorder of sightings, and a wait with a deadline."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from barnraise.discovery import Sighting, namespace_tag

# Random, so that another run of these tests on this machine is not sighted.
OURS, THEIRS = (namespace_tag(os.urandom(32)) for _ in range(2))


def loopback() -> list[str]:
    return ["127.0.0.1"]


class SightingRecorder:
    """Callback for `start` that records sightings."""

    def __init__(self) -> None:
        self.sightings: list[Sighting] = []

    def __call__(self, sighting: Sighting) -> None:
        self.sightings.append(sighting)

    def places(self) -> set[tuple[str, int, str]]:
        return {(sighting.address, sighting.port, sighting.tag) for sighting in self.sightings}


async def until(condition: Callable[[], bool], patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)
