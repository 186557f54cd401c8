"""Numbers and examples of docs/notifications.md: computed from the code."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import accumulate

import pytest
from msgspec.structs import replace

from barnraise.agent.notifications.changes import MOST_FILES_S
from barnraise.agent.notifications.delivery import MAX_ATTEMPTS, RETRIES, TIMEOUT_S
from barnraise.agent.notifications.notice import MAX_REASON, Notice, with_progress
from barnraise.agent.notifications.outbox import MAX_OF_RUN
from barnraise.agent.notifications.stall import FACTOR, StepPace, stall_reason
from barnraise.agent_client.notifications.requests import TargetRow
from barnraise.agent_client.notifications.targets import EVENTS, NtfyTarget
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.cli.notify.targets import describe
from barnraise.core.config import NotificationSettings
from barnraise.history.sentences import duration
from tests.repository import ROOT

PAGE = (ROOT / "docs" / "notifications.md").read_text(encoding="utf-8")
LEAST_S = NotificationSettings().stalled_s
GONE = Notice(
    event="machine-gone",
    key="gone h2 2",
    run="train-dqfh",
    state="running",
    reason="the machine does not answer",
    at=1795110304.5,
    sender="h0",
    lost_machine="h2",
    machines=("h0", "h1"),
)


def at_step(notice: Notice, step: int, loss: float) -> Notice:
    return with_progress(notice, TrainingProgress(step, 20_000, "loss", loss))


def stalled() -> Notice:
    pace = StepPace(step=48, silent_s=LEAST_S + 0.1, recent_s=(0.143,), heard_s=LEAST_S)
    notice = replace(
        GONE, event="stalled", state="stalled", lost_machine="", reason=stall_reason(pace, LEAST_S)
    )
    return at_step(notice, 48, 1.319)


def failed() -> Notice:
    reason = "rank 0 on h0 exited with code 1"
    notice = replace(GONE, event="failed", state="failed", lost_machine="", machines=("h0",), reason=reason)
    return at_step(notice, 60, 1.018)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_numbers_are_those_of_the_code() -> None:
    waits = [RETRIES.wait(attempt) for attempt in range(MAX_ATTEMPTS - 1)]
    steps = list(dict.fromkeys(waits))
    retries = ", ".join(map(duration, steps[:-1]))
    total_s = list(accumulate(waits))[-1]
    assert total_s == pytest.approx(86400, rel=0.05)
    for phrase in (
        f"for {FACTOR:g} times the usual time of a step",
        f"(settings.md) ({duration(LEAST_S)})",
        f"After {MOST_FILES_S:g} s the notice comes",
        f"At most {MAX_OF_RUN} notices of one run",
        f"tried again after {retries}, and then each {duration(steps[-1])}: {MAX_ATTEMPTS} times,",
        f"each answer may take {duration(TIMEOUT_S)}.",
        f"one line of at most {MAX_REASON} characters",
    ):
        assert phrase in PAGE


def test_texts_of_the_example_are_those_of_notices() -> None:
    notices = [at_step(GONE, 9, 1.225), stalled(), failed()]
    assert "".join(f"{notice.to_json()['text']}\n" for notice in notices) in PAGE


def test_json_of_the_example_is_that_of_a_notice() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(block) == at_step(GONE, 9, 1.225).to_json()


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of the process cannot be changed")
def test_list_of_the_example_is_printed_so(utc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    at = 1795110324.0
    events = ("done", "failed")
    rows = (
        TargetRow(
            name="ntfy",
            address=NtfyTarget("http://127.0.0.1:8080/topic").masked,
            events=events,
            dropped=2,
            failure="the server answered 404",
            failed_at=at,
        ),
        TargetRow(
            name="webhook",
            address="http://127.0.0.1:8080/…",
            events=EVENTS,
            delivered=3,
            delivered_at=at,
        ),
    )
    assert describe(rows) in PAGE
