"""Interface of an aggregator: a closed round goes in, versions and refusals come out.

`outer_step` implements it for a hub, `region.region` for a regional hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from barnraise.hub.aggregation.update_checks import UpdateVerdict
from barnraise.hub.storage.log import AcceptedUpdate, CommittedRound, Contribution, UpdateFingerprint


class RoundFigures(NamedTuple):
    """Norm and sketch of an update, for the update checks."""

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
    invites: Mapping[str, str] = MappingProxyType({})  # by member: the invite that it came with

    @property
    def has_strangers(self) -> bool:
        """Return True if a stranger's update is in the round, directly or in the mean of a region."""
        return any(
            arrival.has_strangers or arrival.update.node in self.strangers for arrival in self.arrivals
        )


class RoundResult(NamedTuple):
    """Result of a merged round. ``versions`` is empty if no update may count."""

    versions: tuple[CommittedRound, ...]  # none: nothing of the round may count
    contributions: tuple[Contribution, ...]
    refused: dict[str, UpdateVerdict]  # by update: what did not fit the others after all
    spent: frozenset[str] = frozenset()  # blobs that were needed on the way, and go unless the hub has a use


class Aggregator(Protocol):
    """Interface that turns a closed round into versions.

    A hub takes an outer step; a regional hub sends one update to its parent.
    """

    def measure(self, path: Path, version: int) -> RoundFigures: ...

    def max_update_bytes(self) -> int: ...

    def merge(self, closed: ClosedRound) -> RoundResult: ...

    def close(self) -> None: ...
