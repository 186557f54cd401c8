"""Targets of notifications: which are accepted, and that nothing shows their secrets."""

from __future__ import annotations

import pytest

from barnraise.agent_client.notifications.targets import (
    EVENTS,
    DesktopTarget,
    EmailTarget,
    NtfyTarget,
    Target,
    WebhookTarget,
    check_target,
    is_unencrypted,
    parse_events,
    split_server,
    split_target,
)
from barnraise.core.errors import ConfigError

HOOK = "https://hooks.home.org/services/T0KEN"


def mail(**changes: object) -> EmailTarget:
    fields: dict[str, object] = {"address": "me@home.org", "host": "smtp.home.org", "sender": "me@home.org"}
    return EmailTarget(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "target",
    [
        DesktopTarget(),
        WebhookTarget(HOOK),
        WebhookTarget("http://nas:8080/x?y=1", "t0ken"),
        NtfyTarget("https://ntfy.sh/my-topic_1"),
        mail(),
        mail(user="me", password="pass word", port=465),
        mail(host="[::1]"),
    ],
)
def test_usable_target_is_accepted(target: Target) -> None:
    check_target(target)


@pytest.mark.parametrize(
    "target",
    [
        WebhookTarget("file:///etc/passwd"),
        WebhookTarget("ftp://home.org/x"),
        WebhookTarget("https:///nowhere"),
        WebhookTarget("https://me:S3CRET@home.org/x"),
        WebhookTarget("https://home.org/S3CRET\r\nHost: other"),
        WebhookTarget("https://home.org:99999/S3CRET"),
        WebhookTarget("https://home.org/ä/S3CRET"),
        WebhookTarget(HOOK, "S3CRET\r\nX: y"),
        WebhookTarget("https://home.org/S3CRET" + "x" * 2000),
        WebhookTarget(HOOK, "S3CRET" * 1000),
        mail(port=0),
        NtfyTarget("https://ntfy.sh"),
        NtfyTarget("https://ntfy.sh/S3CRET topic"),
        NtfyTarget("https://ntfy.sh/S3CRET?x=1#y"),
        mail(address="S3CRET"),
        mail(address="me@home.org\r\nBcc: S3CRET@home.org"),
        mail(sender="me@home.org, S3CRET@home.org"),
        mail(host="smtp.home.org/S3CRET"),
        mail(user="me"),
        mail(password="S3CRET"),
    ],
)
def test_unusable_target_is_rejected_without_a_quote(target: Target) -> None:
    with pytest.raises(ConfigError) as raised:
        check_target(target)
    assert "S3CRET" not in str(raised.value)


@pytest.mark.parametrize(
    ("target", "masked"),
    [
        (DesktopTarget(), "this machine's desktop"),
        (WebhookTarget(HOOK, "S3CRET"), "https://….home.org/…"),
        (WebhookTarget("https://S3CRET.webhook.example/"), "https://….webhook.example/…"),
        (WebhookTarget("https://a.S3CRET.webhook.example.:8443/x"), "https://….webhook.example:8443/…"),
        (WebhookTarget("https://me:S3CRET@home.org/x"), "https://home.org/…"),
        (WebhookTarget("https://S3CRET@10.0.0.7:8080?S3CRET"), "https://10.0.0.7:8080/…"),
        (WebhookTarget("http://[fd00::7]:8080/S3CRET"), "http://[fd00::7]:8080/…"),
        (NtfyTarget("http://nas:8080/S3CRET", "S3CRET"), "http://nas:8080/…"),
        (
            mail(user="S3CRET", password="S3CRET"),
            "m…@home.org by smtp.home.org:587",
        ),
    ],
)
def test_masked_target_shows_the_place_and_no_secret(target: Target, masked: str) -> None:
    assert target.masked == masked
    assert "S3CRET" not in repr(target)
    assert "T0KEN" not in repr(target)


def test_address_without_tls_in_the_network_is_unencrypted() -> None:
    assert is_unencrypted(WebhookTarget("http://nas/x"))
    assert is_unencrypted(NtfyTarget("http://192.168.1.5:80/topic"))
    assert not is_unencrypted(NtfyTarget("http://127.0.0.1:80/topic"))
    assert not is_unencrypted(WebhookTarget(HOOK))
    assert not is_unencrypted(mail())


def test_events_of_a_list_keep_the_usual_order() -> None:
    assert parse_events("machine-gone, done") == ("done", "machine-gone")
    assert parse_events(",".join(EVENTS)) == EVENTS


@pytest.mark.parametrize("text", ["", " , ", "done,begun", "Done"])
def test_list_of_events_with_a_mistake_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_events(text)


def test_target_is_split_into_kind_and_address() -> None:
    assert split_target("desktop") == ("desktop", "")
    assert split_target("webhook=https://x.org/?a=b") == ("webhook", "https://x.org/?a=b")
    for text in ("", "desktop=1", "webhook", "webhook=", "slack=https://x.org", "https://x.org/S3CRET=1"):
        with pytest.raises(ConfigError) as raised:
            split_target(text)
        assert "S3CRET" not in str(raised.value)


def test_server_is_split_into_host_and_port() -> None:
    assert split_server("smtp.home.org") == ("smtp.home.org", 587)
    assert split_server("smtp.home.org:465") == ("smtp.home.org", 465)
    assert split_server("[::1]:25") == ("[::1]", 25)
    assert split_server("[::1]") == ("[::1]", 587)
    for text in ("smtp:", "smtp:x", "smtp:0", "smtp:70000"):
        with pytest.raises(ConfigError):
            split_server(text)
