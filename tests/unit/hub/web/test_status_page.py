"""The picture of a run's members on the status page."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from msgspec.structs import replace

from barnraise.hub.storage.log import MemberRecord
from barnraise.hub.web.status_page import by_invite, draw_members

_SVG = "{http://www.w3.org/2000/svg}"


def _members(*samples: int) -> list[MemberRecord]:
    return [
        MemberRecord(node=f"n{place}", name=f"m{place}", role="friend", since=0.0, samples=count)
        for place, count in enumerate(samples)
    ]


def _circles(picture: str) -> list[tuple[float, float, float]]:
    """Return position and radius of the members' circles."""
    _, *circles = ElementTree.fromstring(picture).iter(f"{_SVG}circle")
    return [
        (float(circle.attrib["cx"]), float(circle.attrib["cy"]), float(circle.attrib["r"]))
        for circle in circles
    ]


def test_circle_area_is_share_of_samples() -> None:
    (_, _, large), (_, _, small) = _circles(draw_members(_members(400, 100), set()))
    assert large == pytest.approx(2 * small, rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 7, 24, 25, 200])
def test_circles_do_not_overlap_and_fit_picture(count: int) -> None:
    circles = _circles(draw_members(_members(*[1000] * count), set()))
    assert len(circles) == count
    for place, (x, y, r) in enumerate(circles):
        assert r <= x <= 720 - r
        assert r <= y <= 340 - r
        assert all(math.dist((x, y), other[:2]) >= r + other[2] - 1e-6 for other in circles[:place])


def test_members_that_came_with_one_invite_stand_together() -> None:
    ann, ben, cem, own = _members(10, 500, 20, 100)
    members = [replace(member, invite=invite) for member, invite in ((ann, "J"), (ben, "I"), (cem, "J"))]
    assert [member.name for member in by_invite([*members, own])] == ["m1", "m3", "m2", "m0"]


def test_member_without_samples_is_visible() -> None:
    assert all(radius >= 1.5 for _, _, radius in _circles(draw_members(_members(0, 0, 5), {"n0"})))


def test_member_name_is_escaped() -> None:
    evil = MemberRecord(node="n", name="<script>'\"&" * 30, role="region", since=0.0, quarantine="norm")
    root = ElementTree.fromstring(draw_members([evil, *_members(1)], {"n0"}))
    assert not list(root.iter("script"))
    assert not list(root.iter(f"{_SVG}script"))
    (first, second) = root.iter(f"{_SVG}line")
    assert (first.get("stroke-width"), second.get("stroke-width")) == ("3", "1")
    assert (first.get("stroke"), second.get("stroke")) == ("#c33", "#3a7")
