"""The port of what a hub does with its closed rounds: what goes in, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from barnraise.hub.aggregation.update_checks import UpdateVerdict
from barnraise.hub.storage.log import AcceptedUpdate, CommittedRound, Contribution, UpdateFingerprint


class RoundFigures(NamedTuple):
    """Of an update, for admission."""

    norm: float
    sketch: bytes


class ClosedRound(NamedTuple):
    """A round to be merged."""

    arrivals: tuple[AcceptedUpdate, ...]
    strangers: frozenset[str]
    head: CommittedRound
    chain: tuple[CommittedRound, ...]  # from the last base on
    time: float
    seen: tuple[UpdateFingerprint, ...] = ()


class RoundResult(NamedTuple):
    versions: tuple[CommittedRound, ...]  # none: nothing of the round may count
    contributions: tuple[Contribution, ...]
    refused: dict[str, UpdateVerdict]  # by update: what did not fit the others after all
    spent: frozenset[str] = frozenset()  # blobs that were needed on the way, and go unless the hub has a use


class Aggregator(Protocol):
    """What a hub does with its closed rounds: an outer step of its own, or one update for its parent."""

    def measure(self, path: Path, version: int) -> RoundFigures: ...

    def most_bytes(self) -> int: ...

    def finish(self, closed: ClosedRound) -> RoundResult: ...

    def close(self) -> None: ...
