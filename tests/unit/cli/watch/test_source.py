"""Source of the screen for a run whose record is not on this machine, and the age of its news."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.cli.watch.plain import PlainOutput
from barnraise.cli.watch.snapshot import Freshness, Snapshot, newest_entry_at
from barnraise.cli.watch.source import RunSource
from barnraise.display.row_view import view_of_row
from barnraise.history.logs.record_reader import RecordReader
from barnraise.history.view_builder import RunHistory, build_view
from benchmarks.invented_run import DESK, RUN, example_run
from tests.unit.cli.runs.progress.test_waiting_line import response, workers


def test_run_without_a_record_shows_what_the_cluster_knows() -> None:
    known = response("running", workers(True, True))
    progress = TrainingProgress(30, 100, "loss", 0.5, steps_per_s=2.0, samples_per_s=64.0)
    view = view_of_row(replace(known, row=replace(known.row, progress=progress)), None, now=1000.0)
    assert (view.step, view.total_steps, view.eta_s, view.samples_per_s) == (30, 100, 35.0, 64.0)
    assert view.state == "running"
    assert view.curve() is not None
    assert [machine.state for machine in view.machines] == ["trains"] * len(known.row.machines)


@pytest.mark.parametrize(
    ("freshness", "is_live"),
    [
        (Freshness(), True),
        (Freshness(answer_s=4.0, news_s=20.0), True),
        (Freshness(answer_s=6.0), False),
        (Freshness(news_s=31.0), False),
    ],
)
def test_old_answers_and_old_news_are_not_live(freshness: Freshness, is_live: bool) -> None:
    view = build_view(example_run(300), run=RUN)
    assert freshness.is_live(view) == is_live
    assert freshness.sentence(view).startswith("NOT LIVE") != is_live
    assert freshness.is_live(build_view(example_run(600), run=RUN)), "an ended run does not change"
    slow = replace(view, step_s=60.0)
    assert Freshness(news_s=200.0).is_live(slow)


def test_newest_entry_is_that_of_the_newest_step_sample_or_event() -> None:
    times = [newest_entry_at(build_view(example_run(step), run=RUN)) for step in (1, 100, 300, 600)]
    assert times == sorted(set(times))


def test_silent_record_of_a_run_that_nothing_else_knows_has_ended() -> None:
    source = RunSource(RUN)
    source._record = RecordReader(RUN, RunHistory(RUN))
    source._record.history.add(DESK, example_run(300))
    assert source._view(None).state == "stopped"
    assert source._view(response("running", workers(True, True))).state == "running"


def test_plain_lines_say_each_thing_once() -> None:
    lines: list[str] = []
    now = [0.0]
    output = PlainOutput(lines.append, clock=lambda: now[0])
    for step in (100, 100, 103, 200, 200):
        output.show(Snapshot(build_view(example_run(step), run=RUN)))
        now[0] += 4.0
    view = build_view(example_run(200), run=RUN)
    now[0] += 10.0
    output.failed(view, "no agent runs on this machine")
    output.failed(view, "no agent runs on this machine")
    output.show(Snapshot(view))
    text = "\n".join(lines)
    assert [text.count(words) for words in ("all 3 machines train", "nas is paused: its")] == [1, 2]
    assert [line for line in lines if "step 103" in line] == []
    assert sum("NOT LIVE: no agent runs" in line for line in lines) == 1
    assert lines[-1] == "live again"
    assert len(lines) == len(set(lines))
