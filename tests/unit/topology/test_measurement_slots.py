"""Measurement slots: one measurement at a time, and no machine blocks the others for long."""

from __future__ import annotations

from barnraise.topology.measurement_slots import AGAIN_S, EACH_S, LONGEST_S, QUIET_S, MeasurementSlots


def test_slots_never_measure_one_machine_twice_at_once() -> None:
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


def test_sending_machine_declines_measurement() -> None:
    turns = MeasurementSlots()
    turns.is_sending = True
    assert turns.arrives("ann", 1, 0.0) == "declined"
    turns.is_sending = False
    turns.is_probing = True
    assert turns.arrives("ann", 2, 1.0) == "declined", "its processor is busy"
    turns.is_probing = False
    assert turns.arrives("ann", 3, 2.0) == "counts"


def test_declining_machine_does_not_block_others() -> None:
    turns = MeasurementSlots()
    turns.put_off("eve", 10.0)
    assert turns.is_put_off("eve", 10.0)
    assert not turns.is_put_off("bob", 10.0)
    assert not turns.is_put_off("eve", 10.0 + AGAIN_S)


def test_silent_sender_frees_slot() -> None:
    turns = MeasurementSlots()
    turns.arrives("ann", 1, 0.0)
    assert turns.arrives("bob", 1, QUIET_S + 0.1) == "counts"


def test_endless_sender_delays_others_only_briefly() -> None:
    """The other machines get most of the time."""
    for trick in ("one for ever", "one after the other"):
        turns, free, now = MeasurementSlots(), 0, 0.0
        for number in range(1200):
            now += 0.1
            turns.arrives("eve", 1 if trick == "one for ever" else number, now)
            free += not turns.measured_by(now)
        assert free > 1200 * (1 - 1.2 * LONGEST_S / EACH_S), trick
