"""Reports of the training's progress: the speed is an average, and values are those that were logged."""

from __future__ import annotations

import math

import pytest

from barnraise.training.progress_report import StepRate, newest_value


def test_step_rate_is_unknown_before_the_second_step() -> None:
    rate = StepRate()
    assert rate.steps_per_s == 0
    rate.add(10.0, 5)
    rate.add(11.0, 5)
    assert rate.steps_per_s == 0


def test_step_rate_follows_the_last_twenty_seconds() -> None:
    rate = StepRate()
    for second in range(60):
        rate.add(float(second), 2 * second)
    for second in range(60, 120):
        rate.add(float(second), 120 + 10 * (second - 60))
    assert rate.steps_per_s == pytest.approx(10.0, rel=0.05)


def test_step_rate_of_steps_longer_than_the_window_is_known() -> None:
    rate = StepRate()
    for place in range(5):
        rate.add(50.0 * place, place)
    assert rate.steps_per_s == pytest.approx(0.02)


def test_step_rate_starts_again_after_an_earlier_step() -> None:
    rate = StepRate()
    rate.add(0.0, 100)
    rate.add(1.0, 110)
    rate.add(2.0, 90)
    assert rate.steps_per_s == 0
    rate.add(3.0, 93)
    assert rate.steps_per_s == pytest.approx(3.0)


def test_newest_value_is_the_loss_or_the_first_logged_one() -> None:
    assert newest_value([]) == ("", 0.0)
    assert newest_value([{"loss": 1.0}, {"accuracy": 0.5, "loss": 0.25}]) == ("loss", 0.25)
    assert newest_value([{"accuracy": 0.5, "error": 0.1}]) == ("accuracy", 0.5)
    rare = [{"loss": 1.0, "accuracy": 0.5}, {"loss": 0.5}]
    assert newest_value(rare, "accuracy") == ("accuracy", 0.5), "the one that was asked for"
    assert newest_value(rare, "error") == ("", 0.0)
    name, value = newest_value([{"x\x1b" * 40: math.nan}])
    assert (len(name), math.isnan(value)) == (24, True)
    assert name.isprintable()
