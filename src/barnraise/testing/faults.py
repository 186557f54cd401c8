"""Faults of a simulation, as a test describes them, and their check. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from barnraise.core.errors import ConfigError

MAX_WORLD = 64  # every pair of ranks has two ends of a link, with a buffer each


@dataclass(frozen=True)
class Faults:
    """Delays and deaths of a simulation.

    ``delay_s``: time that every message is on its way. ``delays``: the same from one rank to another.
    ``kills``: for a rank, the number of the operation before which it dies; its first one is 1.
    """

    delay_s: float = 0.0
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    kills: Mapping[int, int] = field(default_factory=dict)

    def delay_between(self, sender: int, receiver: int) -> float:
        """Return the time that a message between two ranks is on its way, in seconds."""
        return self.delays.get((sender, receiver), self.delay_s)


def check_faults(faults: Faults, world: int) -> None:
    """Raise ConfigError if a simulation of ``world`` ranks cannot have these faults."""
    if not 1 <= world <= MAX_WORLD:
        raise ConfigError(
            f"a simulation cannot have {world} ranks", hint=f"Take a world from 1 to {MAX_WORLD}."
        )
    for place, seconds in {"delay_s": faults.delay_s, **_by_name(faults.delays)}.items():
        if not isfinite(seconds) or seconds < 0:
            raise ConfigError(f"{place} is {seconds}, which is no delay", hint="Give seconds from 0 on.")
    for sender, receiver in faults.delays:
        _check_rank(sender, world, "delays")
        _check_rank(receiver, world, "delays")
        if sender == receiver:
            raise ConfigError(
                f"delays names rank {sender} as sender and receiver",
                hint="Leave it out: a rank sends itself nothing.",
            )
    for rank, before in faults.kills.items():
        _check_rank(rank, world, "kills")
        if before < 1:
            raise ConfigError(
                f"rank {rank} cannot die before operation {before}",
                hint="Count the operations of a rank from 1.",
            )


def _by_name(delays: Mapping[tuple[int, int], float]) -> dict[str, float]:
    return {f"delays[{sender}, {receiver}]": seconds for (sender, receiver), seconds in delays.items()}


def _check_rank(rank: int, world: int, what: str) -> None:
    if not 0 <= rank < world:
        raise ConfigError(
            f"{what} names rank {rank}, but the world has {world} ranks",
            hint=f"Name ranks from 0 to {world - 1}.",
        )
