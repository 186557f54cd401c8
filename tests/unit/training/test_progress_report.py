"""Reports of the training's progress: the speed is an average, and values are those that were logged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from barnraise.agent_client.queue.requests import METRIC_VARIABLE
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.training import progress_report
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.progress_report import ProgressReporter, StepRate, newest_value


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


class Status:
    """Session that has committed three steps, and logs the loss."""

    done, is_main, total_steps = 3, True, 3

    def __init__(self) -> None:
        self.history = [{"loss": 1.0}]


def test_value_that_is_known_after_the_last_commit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[TrainingProgress] = []
    monkeypatch.setenv(METRIC_VARIABLE, "eval_accuracy")
    monkeypatch.setattr(progress_report, "_INTERVAL_S", 3600.0)
    monkeypatch.setattr(ProgressReporter, "_send", lambda self, progress, timeout_s: sent.append(progress))
    status = Status()
    reporter = ProgressReporter(WorkerId("run-1", 0, 1, Path(), "00"), status, 8)
    reporter()
    reporter._report(1.0)
    reporter._report(1.0)
    status.history[-1] = {"loss": 1.0, "eval_accuracy": 0.5}
    reporter.close()
    assert [(progress.metric, progress.value) for progress in sent] == [("", 0.0), ("eval_accuracy", 0.5)]
