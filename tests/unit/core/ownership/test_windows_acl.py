"""Access lists of Windows, as texts. The calls that read them have never been run on a real Windows."""

from __future__ import annotations

import pytest

from barnraise.core.ownership.windows_acl import refuse_access_list

_ME = "S-1-5-21-1004336348-1177238915-682003330-1001"
_OTHER = "S-1-5-21-1004336348-1177238915-682003330-1002"
_PRIVATE = f"D:PAI(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)(A;OICI;FA;;;{_ME})"


def _refuse(text: str) -> str:
    refusal = refuse_access_list(r"D:\state", text, _ME, r"C:\Users\anna")
    return f"{refusal.reason} {refusal.hint}" if refusal is not None else ""


@pytest.mark.parametrize(
    "text",
    [
        f"O:{_ME}{_PRIVATE}",
        f"O:BAG:DU{_PRIVATE}",
        f"O:{_ME}G:S-1-5-21-1-2-3-513{_PRIVATE}S:AI(AU;OICISAFA;FA;;;WD)",
        f"O:{_ME}D:(D;;FA;;;WD)(A;OICIIO;GA;;;CO)(A;;FA;;;{_ME})",  # a denial admits no one
    ],
)
def test_access_list_of_one_user_is_accepted(text: str) -> None:
    assert _refuse(text) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"O:{_OTHER}{_PRIVATE}", "belongs to another user"),
        (_PRIVATE, "belongs to another user (unknown)"),
        # What a new folder below C:\ gets: all users may read, and logged-in users may create.
        (f"O:{_ME}D:AI(A;OICIID;FA;;;BA)(A;OICIID;0x1200a9;;;BU)(A;ID;0x1301bf;;;AU)", "(BU)"),
        (f"O:{_ME}D:(A;OICI;FA;;;WD)", "(WD)"),
        (f"O:{_ME}D:(A;OICI;FA;;;{_OTHER})", _OTHER),
        (f"O:{_ME}D:(XA;OICI;FA;;;WD;(@User.a==1))", "(WD)"),
        (f"O:{_ME}", "has no access list"),
        (f"O:{_ME}D:NO_ACCESS_CONTROL", "has no access list"),
        ("", "belongs to another user"),
    ],
)
def test_access_list_that_admits_others_is_rejected(text: str, reason: str) -> None:
    assert reason in _refuse(text)
    assert r"inside C:\Users\anna" in _refuse(text)
