"""`hub status` with long names on a terminal of 80 columns."""

from __future__ import annotations

import pytest

from barnraise.cli.hub.status import HubStatusReport, MemberContribution, RoundRules, _described

REASON = "its update was 40 times as large as those of the others, three times in a row, since Monday"


def test_hub_status_with_long_names_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    members = (
        MemberContribution(
            "anna's computer in the attic " + "x" * 40, "1EF2-CVGK", "friend", 120, 9_876_543, ""
        ),
        MemberContribution("bob", "1EF2-CVGK", "stranger", 3, 4, REASON),
    )
    addresses = {"hub.example.org:52417": "", "[2001:db8::1]:52417": f"does not answer: {REASON}"}
    text = _described(HubStatusReport("spiral", 7, 0.25, members, addresses, f"waits for bob: {REASON}"))
    assert max(map(len, text.splitlines())) <= 80
    assert "9,876,543" in text
    assert "quarantined: its update was" in " ".join(text.split())


@pytest.mark.parametrize(("wait_for", "shown"), [(1, False), (3, True)])
def test_status_shows_rules_of_rounds(wait_for: int, shown: bool) -> None:
    rules = RoundRules(30.0, "int8", wait_for, 0.75, 1)
    text = " ".join(_described(HubStatusReport("spiral", None, None, (), {}, "it waits", rules)).split())
    assert "rounds of 30 s in int8: " in text
    assert "75 % of the members end one, and an update may be 1 version late" in text
    assert ("the first one starts with 3 members" in text) == shown
