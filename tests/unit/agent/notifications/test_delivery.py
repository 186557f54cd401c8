"""Results of attempts to deliver a notice, and retries."""

from __future__ import annotations

import pytest

from barnraise.agent.notifications.delivery import (
    DELIVERED,
    MAX_ATTEMPTS,
    RETRIES,
    Delivery,
    gives_up,
    http_delivery,
    mail_delivery,
)


@pytest.mark.parametrize(
    ("status", "is_delivered", "is_final"),
    [
        (200, True, False),
        (204, True, False),
        (301, False, True),
        (307, False, True),
        (400, False, True),
        (401, False, True),
        (404, False, True),
        (408, False, False),
        (429, False, False),
        (500, False, False),
        (503, False, False),
    ],
)
def test_status_decides_about_another_attempt(status: int, is_delivered: bool, is_final: bool) -> None:
    result = http_delivery(status)
    assert (not result.failure, result.is_final) == (is_delivered, is_final)
    assert is_delivered or str(status) in result.failure


def test_mail_server_with_a_temporary_refusal_is_tried_again() -> None:
    assert not mail_delivery(451, "the mail").is_final
    assert mail_delivery(535, "the login") == Delivery("the mail server refused the login with 535", True)


def test_attempts_end_after_about_a_day() -> None:
    temporary = Delivery("the server answered 503")
    assert not gives_up(temporary, 1)
    assert gives_up(temporary, MAX_ATTEMPTS)
    assert gives_up(Delivery("gone", is_final=True), 1)
    waits = [RETRIES.wait(attempt) for attempt in range(MAX_ATTEMPTS - 1)]
    assert waits == sorted(waits)
    assert 20 * 3600 < sum(waits) < 28 * 3600
    assert DELIVERED.failure == ""
