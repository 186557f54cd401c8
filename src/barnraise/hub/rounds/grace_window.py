"""Grace window of a round: how long it waits, after its quorum, for updates that are still out. Pure.

It learns from earlier rounds. A long window keeps all members waiting for one that vanished. A short one
makes slow members' updates late, so that they count less.
"""

from __future__ import annotations

import math

import msgspec

from barnraise.hub.protocol.messages import RoundConfig

KEPT = 64
LEAST = 16  # delays before they count
_SHARE = 0.9  # of the late updates, for which a round waits
_SHORTEST, _LONGEST = 0.25, 1.5  # times the configured window: late members cannot stretch it far


class GraceWindow(msgspec.Struct, frozen=True):
    """Seconds from the quorum of a round to each update that came after it, the newest last."""

    delays: tuple[float, ...] = ()

    def with_delay(self, seconds: float) -> GraceWindow:
        """Return the window with the delay of one more update."""
        return GraceWindow((*self.delays, seconds)[-KEPT:])

    def seconds(self, terms: RoundConfig) -> float:
        """Return how long a round waits after its quorum."""
        configured = terms.grace * terms.round_s
        if len(self.delays) < LEAST:
            return configured
        enough = sorted(self.delays)[math.ceil(_SHARE * len(self.delays)) - 1]
        return min(max(enough, _SHORTEST * configured), _LONGEST * configured)
