"""Metered connections, as each system reports them."""

from __future__ import annotations

import pytest

from barnraise.core.host.metered import is_metered

NMCLI = (
    "GENERAL.STATE:20 (unavailable)\nGENERAL.METERED:yes\n\n"
    "GENERAL.STATE:100 (connected)\nGENERAL.METERED:{}\n"
)


@pytest.mark.parametrize(
    ("platform", "answer", "expected"),
    [
        ("linux", NMCLI.format("no (guessed)"), False),
        ("linux", NMCLI.format("yes (guessed)"), True),
        ("linux", "", False),
        ("win32", "Unrestricted\r\n", False),
        ("win32", "Fixed\r\n", True),
        ("win32", "", False),
        ("darwin", "anything", False),
    ],
)
def test_is_metered_follows_system(platform: str, answer: str, expected: bool) -> None:
    assert is_metered(platform, lambda command: answer) is expected
