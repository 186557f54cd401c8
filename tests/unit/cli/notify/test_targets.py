"""Targets as they are typed, and the list of them."""

from __future__ import annotations

import pytest

from barnraise.agent_client.notifications.requests import TargetRow
from barnraise.agent_client.notifications.targets import (
    DesktopTarget,
    EmailTarget,
    NtfyTarget,
    Target,
    WebhookTarget,
)
from barnraise.cli.notify.targets import TargetOptions, describe, read_target
from barnraise.core.errors import ConfigError

MAIL = TargetOptions(smtp="smtp.home.org:465", user="me", sender="nas@home.org")


@pytest.mark.parametrize(
    ("text", "options", "typed", "target"),
    [
        ("desktop", TargetOptions(), [], DesktopTarget()),
        ("webhook=https://x.org/a", TargetOptions(), [], WebhookTarget("https://x.org/a")),
        (
            "webhook=-",
            TargetOptions(token=True),
            ["https://x.org/a", "t0ken"],
            WebhookTarget("https://x.org/a", "t0ken"),
        ),
        ("ntfy=-", TargetOptions(), ["https://ntfy.sh/a"], NtfyTarget("https://ntfy.sh/a")),
        (
            "email=me@home.org",
            TargetOptions(smtp="smtp.home.org"),
            [],
            EmailTarget(address="me@home.org", host="smtp.home.org", sender="me@home.org"),
        ),
        (
            "email=me@home.org",
            MAIL,
            ["pass word"],
            EmailTarget(
                address="me@home.org",
                host="smtp.home.org",
                port=465,
                user="me",
                password="pass word",
                sender="nas@home.org",
            ),
        ),
    ],
)
def test_target_is_read_with_the_secrets_that_are_typed(
    text: str, options: TargetOptions, typed: list[str], target: Target
) -> None:
    assert read_target(text, options, lambda what: typed.pop(0)) == target
    assert typed == []


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("desktop", TargetOptions(token=True)),
        ("desktop", MAIL),
        ("ntfy=https://ntfy.sh/a", MAIL),
        ("webhook=https://x.org/a", TargetOptions(user="me")),
        ("email=me@home.org", TargetOptions()),
        ("email=me@home.org", TargetOptions(smtp="smtp.home.org", token=True)),
        ("slack=https://x.org/a", TargetOptions()),
    ],
)
def test_options_of_another_kind_of_target_are_rejected(text: str, options: TargetOptions) -> None:
    with pytest.raises(ConfigError):
        read_target(text, options, lambda what: "typed")


def test_list_without_targets_names_the_first_command() -> None:
    assert describe(()) == "No notices are sent. Add a target: barnraise notify add desktop"


def test_list_shows_what_was_sent_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = (
        TargetRow(name="desktop", address="this machine's desktop", events=("done",), delivered=3),
        TargetRow(
            name="webhook",
            address="https://x.org/…",
            events=("done", "failed"),
            waiting=2,
            dropped=1,
            failure="the server answered 503",
            failed_at=0.0,
        ),
    )
    text = describe(rows)
    assert "desktop" in text
    assert "done, failed" in text
    last = " ".join(text.splitlines()[3:])
    assert last.endswith("the server answered 503. 2 notices will be tried again; 1 notice not sent.")


def test_failure_of_a_target_without_waiting_notices_is_one_sentence() -> None:
    row = TargetRow(name="ntfy", address="x", events=("done",), failure="the server answered 404", dropped=2)
    assert describe([row]).endswith("ntfy failed: the server answered 404. 2 notices not sent.")
