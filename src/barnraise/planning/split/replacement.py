"""Decision to place the blocks of a model again while it trains, because another placement is faster. Pure.

Measured times vary, and moving blocks costs time. So another placement must be predicted to be clearly faster
several times in a row. After each change twice as many times are needed, so that blocks do not go to and fro.
"""

from __future__ import annotations

from typing import NamedTuple

from barnraise.core.units import format_duration

GAIN = 0.15  # of the predicted speed
_FIRST_NEEDED = 3
_MOST_NEEDED = 48


class ReplacementState(NamedTuple):
    """State between two checks. ``favourable``: checks in a row in which another placement was faster.

    ``needed``: how many there must be.
    """

    favourable: int = 0
    needed: int = _FIRST_NEEDED


class ReplacementDecision(NamedTuple):
    """Decision about the blocks and its reason. ``is_due``: they move. ``state``: for the next check."""

    is_due: bool
    why: str
    state: ReplacementState


def decide_replacement(state: ReplacementState, current_s: float, best_s: float) -> ReplacementDecision:
    """Decide after a check. ``current_s``: the predicted step now; ``best_s``: that of the best placement."""
    gain = current_s / best_s - 1 if best_s > 0 else 0.0
    steps = f"a step takes {format_duration(current_s)}, and {format_duration(best_s)} if blocks are moved"
    if gain < GAIN:
        return ReplacementDecision(False, f"{steps}: too small a gain", state._replace(favourable=0))
    favourable = state.favourable + 1
    if favourable < state.needed:
        why = f"{steps}; that was predicted {favourable} of {state.needed} times"
        return ReplacementDecision(False, why, state._replace(favourable=favourable))
    needed = min(_MOST_NEEDED, 2 * state.needed)
    return ReplacementDecision(True, f"{steps}; that is stable", ReplacementState(0, needed))
