"""Notices in words and as data."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.notifications.notice import Notice, clean, with_progress
from barnraise.agent_client.run_requests import TrainingProgress


def notice(**changes: Any) -> Notice:
    fields: dict[str, Any] = {
        "event": "failed",
        "key": "end 1",
        "run": "train-k3f9",
        "state": "failed",
        "reason": "rank 1 on h1 exited with code 1",
        "at": 1000.0,
        "sender": "h0",
    }
    return Notice(**{**fields, **changes})


def test_text_has_reason_step_loss_and_machines() -> None:
    progress = TrainingProgress(1200, 5000, "loss", 0.03125)
    full = with_progress(notice(machines=("h0", "h1")), progress)
    assert full.title == "train-k3f9 failed"
    assert full.text == "rank 1 on h1 exited with code 1; step 1,200 of 5,000; loss 0.03125; on h0, h1"


def test_text_without_progress_is_the_reason() -> None:
    assert with_progress(notice(), None).text == "rank 1 on h1 exited with code 1"


def test_items_of_a_map_and_an_unknown_end_are_counted_so() -> None:
    assert with_progress(notice(), TrainingProgress(1, counts="item")).text.endswith("code 1; 1 item")
    assert with_progress(notice(), TrainingProgress(0)).text.endswith("; 0 steps")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loss_that_is_no_number_leaves_valid_json(value: float) -> None:
    broken = with_progress(notice(), TrainingProgress(3, 9, "loss", value))
    assert json.loads(json.dumps(broken.to_json(), allow_nan=False))["value"] is None
    assert "loss" not in broken.text


def test_id_is_the_same_for_the_same_event_only() -> None:
    assert notice().id == notice(at=2000.0, reason="other words").id
    assert len({notice().id, notice(key="end 2").id, notice(run="train-k3fa").id}) == 3


def test_name_of_a_metric_is_cleaned() -> None:
    shown = with_progress(notice(), TrainingProgress(3, 9, "lo\x1b[31mss\n", 1.0))
    assert shown.metric == "lo?[31mss"


def test_clean_text_is_one_short_line_without_logins() -> None:
    assert clean("a\n\tb  c") == "a b c"
    assert clean("git+https://me:pw@x.org/r and ssh://k@y") == "git+https://…@x.org/r and ssh://…@y"
    assert clean("http://me:p@ss@x.org:80/r@2") == "http://…@x.org:80/r@2"
    assert "S3CRET" not in clean(f"{' ' * 2380}https://me:S3CRET-of-a-login@x.org/")
    assert len(clean("x" * 10_000)) == 300
    assert clean("\x1b]0;title\x07") == "?]0;title?"


@pytest.mark.parametrize("name", ["@everyone", "<!channel>", "<@123>", "[free](https://evil.org)"])
def test_name_of_a_machine_is_no_mention_and_no_link_in_a_chat(name: str) -> None:
    sent = replace(notice(), event="machine-gone", lost_machine=name).to_json()
    for line in (str(sent["text"]), str(sent["content"])):
        assert name not in line
        assert name in line.replace("\u200b", "")
    assert sent["lost_machine"] == name


def test_json_holds_what_services_read() -> None:
    sent = replace(notice(), event="machine-gone", lost_machine="h2").to_json()
    assert sent["text"] == sent["content"] == "h2 is gone from train-k3f9: rank 1 on h1 exited with code 1"
    assert sent["lost_machine"] == "h2"
