"""Decision whether a run is stalled, from the steps that its reports show."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from barnraise.agent.notifications.stall import StepPace, next_pace, no_news_reason, stall_reason


def paced(steps: Iterable[int | None], every_s: float = 1.0) -> StepPace:
    """Return the pace after one report each ``every_s`` seconds."""
    pace = StepPace()
    for step in steps:
        pace = next_pace(pace, step, every_s)
    return pace


def test_usual_time_is_the_median_between_reports() -> None:
    pace = paced([None, 3, 5, 7, 9, 10])
    assert pace.step == 10
    assert pace.usual_s == pytest.approx(0.5)
    assert pace.silent_s == 0.0


def test_run_without_a_second_report_has_no_usual_time() -> None:
    for pace in (paced([None] * 500), paced([4]), paced([4] * 500)):
        assert pace.usual_s is None
        assert stall_reason(pace, 1.0) == ""


@pytest.mark.parametrize(
    ("silent", "least_s", "stalled"),
    [(10, 5.0, False), (11, 5.0, True), (100, 200.0, False), (201, 200.0, True)],
)
def test_silence_must_pass_ten_usual_steps_and_the_least_time(
    silent: int, least_s: float, stalled: bool
) -> None:
    pace = paced([*range(20), *[19] * silent])  # a step each second
    assert bool(stall_reason(pace, least_s)) is stalled


def test_reason_names_the_silence_the_usual_time_and_the_wait() -> None:
    pace = paced([0, 1, 2, *[2] * 30], every_s=2.0)
    assert stall_reason(pace, 1.0) == "no step for 1 min, and a step usually takes 2 s"
    assert stall_reason(pace, 1.0, "waiting for h1").endswith("usually takes 2 s; waiting for h1")


def test_silence_of_a_machine_that_is_not_heard_is_no_stall() -> None:
    pace = paced(range(20))
    for _ in range(30):
        pace = next_pace(pace, 19, 1.0, is_heard=False)
    assert stall_reason(pace, 5.0) == ""
    assert no_news_reason(pace, 5.0, ("h1",)) == "no news from h1 for 30 s; the run may go on there"
    assert no_news_reason(pace, 50.0, ("h1",)) == ""
    again = next_pace(pace, 19, 1.0)
    assert (stall_reason(again, 5.0), no_news_reason(again, 5.0, ("h1",))) == ("", ""), "it may report now"
    for _ in range(10):
        again = next_pace(again, 19, 1.0)
    assert stall_reason(again, 5.0).startswith("no step for 41 s")


def test_slow_step_alone_does_not_become_the_usual_time() -> None:
    pace = paced([*range(10), *[9] * 60, 10])
    assert pace.usual_s == 1.0


def test_rollback_ends_the_silence_and_keeps_the_pace() -> None:
    pace = paced([*range(10), *[9] * 60])
    back = next_pace(pace, 4, 1.0)
    assert (back.step, back.silent_s, back.usual_s) == (4, 0.0, 1.0)


def test_lost_report_does_not_end_the_silence() -> None:
    pace = paced([0, 1, 2, None, None])
    assert (pace.step, pace.silent_s) == (2, 2.0)
