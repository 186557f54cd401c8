"""Bounds of what members report about speeds, links and memory."""

from __future__ import annotations

from barnraise.planning.split.stage_time import BlockSpeed
from barnraise.training.pipeline.prediction.kept_activations import KeptBytes
from barnraise.training.pipeline.prediction.plausible import (
    most_kept,
    possible_latency,
    possible_rate,
    possible_seconds,
    possible_speed,
)

MIB = 1 << 20


def test_figures_of_real_machines_stay() -> None:
    speed = BlockSpeed(0.001, 0.002, 0.5, 1.5, 0.0001)
    assert possible_speed(speed) == speed
    for rate in (0.0, 7e3, 1e9, 9e11):
        assert possible_rate(rate) == rate
    assert (possible_latency(0.0), possible_latency(0.3)) == (0.0, 0.3)
    assert (possible_seconds(0.0), possible_seconds(30.0)) == (0.0, 30.0)


def test_impossible_figures_count_as_the_nearest_possible_ones() -> None:
    assert possible_speed(BlockSpeed(5e-324, 1e9, 1e9, 1e9, 1e9)) == (1e-6, 1e5, 1e5, 1e5, 1e5)
    assert possible_speed(BlockSpeed(0.0, 2.0, 3.0)) == BlockSpeed()
    assert (possible_rate(1e-308), possible_rate(1e15)) == (1e3, 1e12)
    assert possible_latency(1e9) == 10.0


def test_largest_report_of_what_a_micro_batch_keeps_counts() -> None:
    reports = [KeptBytes(2 * MIB, 10), KeptBytes(3 * MIB, 30), KeptBytes(2 * MIB, 20)]
    assert most_kept(reports) == (KeptBytes(3 * MIB, 30), [])


def test_report_that_is_much_larger_counts_as_four_times_the_middle_one() -> None:
    honest = KeptBytes(MIB, MIB)
    lie = KeptBytes(1 << 50, 1 << 50)
    groups = ([honest, lie], [honest, lie, honest], [lie, honest, honest], [honest, honest, honest, lie])
    for reports in groups:
        assert most_kept(reports) == (KeptBytes(4 * MIB, 4 * MIB), [reports.index(lie)])


def test_report_that_is_much_smaller_changes_nothing() -> None:
    honest, lie = KeptBytes(MIB, MIB), KeptBytes(0, 0)
    for reports in ([honest, lie], [lie, honest, honest], [honest, lie, lie, honest]):
        assert most_kept(reports) == (honest, [])
