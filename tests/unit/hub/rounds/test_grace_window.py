"""Grace window: it learns from late updates, within bounds."""

from __future__ import annotations

import pytest

from barnraise.hub.protocol.messages import RoundConfig
from barnraise.hub.rounds.grace_window import KEPT, LEAST, GraceWindow

TERMS = RoundConfig(round_s=40.0, grace=0.25)  # ten seconds


def learned(*delays: float) -> float:
    window = GraceWindow()
    for delay in delays:
        window = window.with_delay(delay)
    return window.seconds(TERMS)


def test_configured_window_counts_until_enough_is_known() -> None:
    assert learned() == learned(*[4.0] * (LEAST - 1)) == 10.0
    assert learned(*[4.0] * LEAST) == 4.0


@pytest.mark.parametrize(("delay", "expected"), [(0.01, 2.5), (7.0, 7.0), (600.0, 15.0)])
def test_window_has_bounds(delay: float, expected: float) -> None:
    assert learned(*[delay] * KEPT) == expected


def test_one_of_ten_late_updates_is_not_waited_for() -> None:
    assert learned(*[3.0] * 18, 12.0, 12.0) == 3.0
    assert learned(*[3.0] * 17, 12.0, 12.0, 12.0) == 12.0


def test_old_delays_are_forgotten() -> None:
    assert learned(*[12.0] * KEPT, *[3.0] * KEPT) == 3.0
