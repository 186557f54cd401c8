"""The port of what a hub does with its closed rounds: what goes in, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from barnraise.hub.aggregation.update_checks import Verdict
from barnraise.hub.storage.log import Arrival, Committed, Contribution, Seen


class Figures(NamedTuple):
    """Of an update, for admission."""

    norm: float
    sketch: bytes


class Closed(NamedTuple):
    """A round to be merged."""

    arrivals: tuple[Arrival, ...]
    strangers: frozenset[str]
    head: Committed
    chain: tuple[Committed, ...]  # from the last base on
    time: float
    seen: tuple[Seen, ...] = ()


class Merged(NamedTuple):
    versions: tuple[Committed, ...]  # none: nothing of the round may count
    contributions: tuple[Contribution, ...]
    refused: dict[str, Verdict]  # by update: what did not fit the others after all
    spent: frozenset[str] = frozenset()  # blobs that were needed on the way, and go unless the hub has a use


class Finisher(Protocol):
    """What a hub does with its closed rounds: an outer step of its own, or one update for its parent."""

    def measure(self, path: Path, version: int) -> Figures: ...

    def most_bytes(self) -> int: ...

    def finish(self, closed: Closed) -> Merged: ...

    def close(self) -> None: ...
