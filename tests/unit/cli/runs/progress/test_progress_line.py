"""The line about a run's progress fits the terminal, and says only what is known."""

from __future__ import annotations

import math

import pytest

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.cli.runs.progress.progress_line import (
    final_parts,
    format_speed,
    format_time_left,
    format_value,
    join_parts,
    progress_parts,
    time_left_s,
)

USUAL = TrainingProgress(120, 640, "loss", 0.33412, 12.4, 6348.0)


def test_progress_line_shows_step_loss_speed_machines_and_time_left() -> None:
    line = join_parts(progress_parts(USUAL, 3), 68)
    assert line == "step 120 of 640, loss 0.334, 6,348 samples/s, 3 machines, 42 s left"


def test_progress_line_without_total_or_loss_shows_neither() -> None:
    line = join_parts(progress_parts(TrainingProgress(120, None, "", 0.0, 2.0, 64.0), 1), 80)
    assert line == "step 120, 64 samples/s, 1 machine"


def test_progress_line_before_the_second_report_has_no_speed() -> None:
    assert join_parts(progress_parts(TrainingProgress(1, 640), 2), 80) == "step 1 of 640, 2 machines"


def test_progress_line_of_a_map_counts_items() -> None:
    progress = TrainingProgress(120, 640, "", 0.0, 12.4, 12.4, "item")
    assert (
        join_parts(progress_parts(progress, 3), 80) == "item 120 of 640, 12.4 items/s, 3 machines, 42 s left"
    )
    assert "no item for 60 s" in join_parts(progress_parts(progress, 3, 60.0), 80)


@pytest.mark.parametrize("width", range(5, 100))
def test_progress_line_of_large_numbers_fits_every_width(width: int) -> None:
    large = TrainingProgress(10**12 - 2, 10**12 - 1, "perplexity_of_validation", 1e300, 1e-9, 1e15)
    line = join_parts(progress_parts(large, 256), width)
    assert len(line) <= width
    assert line.startswith("step ")


def test_narrow_progress_line_drops_machines_first_and_time_left_late() -> None:
    parts = progress_parts(USUAL, 3)
    assert join_parts(parts, 60) == "step 120 of 640, loss 0.334, 6,348 samples/s, 42 s left"
    assert join_parts(parts, 42) == "step 120 of 640, loss 0.334, 42 s left"


def test_finished_progress_line_has_no_time_left() -> None:
    done = TrainingProgress(640, 640, "loss", 0.1, 12.0, 100.0)
    assert "left" not in join_parts(progress_parts(done, 3, silent_s=100.0), 80)
    assert join_parts(final_parts(done), 80) == "step 640 of 640, loss 0.100"


@pytest.mark.parametrize(("silent_s", "shown"), [(9.0, "42 s left"), (30.0, "no step for 30 s")])
def test_late_step_replaces_the_time_left(silent_s: float, shown: str) -> None:
    assert join_parts(progress_parts(USUAL, 3, silent_s), 80).endswith(shown)


def test_slow_steps_are_not_late() -> None:
    slow = TrainingProgress(3, 10, steps_per_s=0.02)  # 50 s each
    assert "no step" not in join_parts(progress_parts(slow, 1, silent_s=120.0), 80)
    assert "no step" in join_parts(progress_parts(slow, 1, silent_s=260.0), 80)


def test_time_left_is_unknown_without_total_or_speed() -> None:
    assert time_left_s(TrainingProgress(5, None, steps_per_s=2.0)) is None
    assert time_left_s(TrainingProgress(5, 10)) is None
    assert time_left_s(TrainingProgress(5, 10, steps_per_s=2.0)) == 2.5
    assert time_left_s(TrainingProgress(12, 10, steps_per_s=2.0)) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (42, "42 s"),
        (99.6, "2 min"),
        (3000, "50 min"),
        (7800, "2 h 10 min"),
        (273600, "3 d 4 h"),
        (1e30, "over 1000 d"),
        (math.inf, "over 1000 d"),
    ],
)
def test_time_left_is_rough(seconds: float, text: str) -> None:
    assert format_time_left(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.33412, "0.334"),
        (0.0, "0.000"),
        (2e-5, "2.00e-05"),
        (1234.5, "1,234.5"),
        (7e8, "7.00e+08"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_logged_value_is_short_and_may_be_nan(value: float, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("speed", "text"), [(0.25, "0.25"), (12.34, "12.3"), (1230, "1,230"), (45_400, "45k"), (2.5e7, "25M")]
)
def test_speed_has_few_digits(speed: float, text: str) -> None:
    assert format_speed(speed) == text


def test_late_step_is_shown_sooner_on_a_live_line_and_with_its_reason() -> None:
    parts = progress_parts(USUAL, 2, 4.0, reason="mac waits for the checkpoint", patience_s=2.0)
    text = join_parts(parts, 200)
    assert "no step for 4 s, mac waits for the checkpoint" in text
    assert "no step" not in join_parts(progress_parts(USUAL, 2, 4.0, reason="mac waits"), 200)
    assert "mac waits" in join_parts(parts, 60)
