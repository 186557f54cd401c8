"""One measurement at a time, and nobody keeps the others waiting for long."""

from __future__ import annotations

from barnraise.topology.measurement_slots import AGAIN_S, EACH_S, LONGEST_S, QUIET_S, MeasurementSlots


def test_two_at_once_share_no_line() -> None:
    turns = MeasurementSlots()
    assert turns.arrives("ann", 1, 0.0) == "counts"
    assert turns.measured_by(0.0) == {"ann"}
    assert turns.arrives("bob", 7, 0.1) == "declined"
    assert turns.arrives("bob", 7, 0.2) == "ignored", "said once"
    assert turns.arrives("ann", 1, 0.3) == "counts"
    turns.over("ann")
    assert turns.arrives("bob", 7, 0.4) == "ignored", "what was on its way would be half a measurement"
    assert turns.arrives("bob", 8, 0.5) == "counts"
    assert turns.measured_by(0.5) == {"bob"}


def test_who_measures_is_not_measured() -> None:
    turns = MeasurementSlots()
    turns.is_sending = True
    assert turns.arrives("ann", 1, 0.0) == "declined"
    turns.is_sending = False
    turns.is_probing = True
    assert turns.arrives("ann", 2, 1.0) == "declined", "its processor is busy"
    turns.is_probing = False
    assert turns.arrives("ann", 3, 2.0) == "counts"


def test_who_has_no_turn_for_us_keeps_us_from_nobody_else() -> None:
    turns = MeasurementSlots()
    turns.put_off("eve", 10.0)
    assert turns.is_put_off("eve", 10.0)
    assert not turns.is_put_off("bob", 10.0)
    assert not turns.is_put_off("eve", 10.0 + AGAIN_S)


def test_who_falls_silent_is_not_waited_for() -> None:
    turns = MeasurementSlots()
    turns.arrives("ann", 1, 0.0)
    assert turns.arrives("bob", 1, QUIET_S + 0.1) == "counts"


def test_who_never_ends_keeps_others_waiting_for_moments_only() -> None:
    """Whatever one member does, the others have most of the time."""
    for trick in ("one for ever", "one after the other"):
        turns, free, now = MeasurementSlots(), 0, 0.0
        for number in range(1200):
            now += 0.1
            turns.arrives("eve", 1 if trick == "one for ever" else number, now)
            free += not turns.measured_by(now)
        assert free > 1200 * (1 - 1.2 * LONGEST_S / EACH_S), trick
