"""Decisions about members: admission, seats, and the end of seats."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.invites import InviteGrant
from barnraise.hub.protocol.messages import JoinRequest, RegionOrders, Role
from barnraise.hub.server.membership import (
    ENDED_ABOVE,
    SEAT_S,
    SeatsForParent,
    admit_by_invite,
    admit_by_parent,
    came_together,
    ended_seats,
    expelled,
    give_seat,
    has_seat_below,
    newly_ended,
    taken_seats,
)
from barnraise.hub.storage.log import MemberRecord

GRANT = InviteGrant(key="I" * 69, role="friend", uses=9, expires=1000)
REQUEST = JoinRequest(invite="I" * 69, role="friend", expires=1000, proof="A" * 86, name="ann")
SEATS = SeatsForParent(2, RegionOrders(ended=(), time=0))


def _member(node: str, role: Role = "friend", invite: str = "I" * 69) -> MemberRecord:
    return MemberRecord(node=node, name=node, role=role, since=0.0, invite=invite)


def test_invite_of_an_excluded_machine_admits_no_other() -> None:
    """One person with several keys: the first is expelled or in quarantine, the next tries to join."""
    first = admit_by_invite(REQUEST, "ann", GRANT, {}, 1.0)
    assert first.grant is not None
    bad = {"ann": replace(first.member, quarantine="3 updates were refused")}
    with pytest.raises(HubRefused) as refused:
        admit_by_invite(REQUEST, "ann again", first.grant, bad, 1.0)
    assert refused.value.kind == "invite-held"
    assert admit_by_invite(REQUEST, "ann", first.grant, bad, 1.0).member.quarantine, "it stays excluded"
    pardoned = {"ann": first.member}
    assert admit_by_invite(REQUEST, "ben", first.grant, pardoned, 1.0).member.role == "friend"


def test_members_that_came_with_one_invite_are_named() -> None:
    members = {node: _member(node) for node in ("ann", "ben")} | {"cem": _member("cem", invite="J" * 69)}
    assert came_together(members, "ann") == ("ben",)
    assert came_together(members | {"ben": replace(members["ben"], quarantine="expelled")}, "ann") == ()
    assert came_together(members, "cem") == ()
    assert came_together({"own": _member("own", "owner", ""), **members}, "own") == ()


def test_member_has_one_seat_at_a_time() -> None:
    member = give_seat(_member("ann"), "east", "ann there")
    assert has_seat_below(member)
    member = give_seat(member, "west", "ann too")
    assert ended_seats([member], "east") == ("ann there",)
    assert ended_seats([member], "west") == ()
    member = admit_by_invite(REQUEST, "ann", replace(GRANT, used_by=("ann",)), {"ann": member}, 1.0).member
    assert not has_seat_below(member), "it joined the hub itself again"
    assert ended_seats([member], "west") == ("ann too",)
    assert ended_seats([give_seat(member, "west", "ann too")], "west") == ()


def test_expelled_member_loses_its_seat_at_a_region() -> None:
    member = expelled(give_seat(_member("ann"), "east", "ann there"), "expelled")
    assert ended_seats([member], "east") == ("ann there",)
    quarantined = replace(give_seat(_member("ann"), "east", "ann there"), quarantine="refused")
    assert ended_seats([quarantined], "east") == ("ann there",)


def test_member_cannot_collect_seats_under_many_ids() -> None:
    member = _member("ann")
    for number in range(16):
        member = give_seat(member, "east", f"id {number}")
    with pytest.raises(HubRefused, match="too many seats"):
        give_seat(member, "east", "id 16")
    assert has_seat_below(give_seat(member, "east", "id 0")), "one that it had before"
    for role in ("owner", "mirror", "region"):
        with pytest.raises(HubRefused, match="gets no seat"):
            give_seat(_member("ann", role), "east", "id")


def test_region_admits_members_of_its_parent_while_seats_are_left() -> None:
    members: dict[str, MemberRecord] = {"own": _member("own", "owner")}
    for node in ("ann", "ben"):
        members[node] = admit_by_parent(REQUEST, node, SEATS, members, 1.0).member
    assert taken_seats(members) == 2
    with pytest.raises(HubRefused, match="no seat left"):
        admit_by_parent(REQUEST, "cem", SEATS, members, 1.0)
    assert admit_by_parent(REQUEST, "ann", SEATS, members, 1.0).member == members["ann"]
    with pytest.raises(HubRefused, match="expired"):
        admit_by_parent(REQUEST, "ann", SEATS, members, 1001.0)
    with pytest.raises(HubRefused, match="not heard"):
        admit_by_parent(REQUEST, "ann", SeatsForParent(2), members, 1.0)
    for role in ("owner", "mirror", "region"):
        with pytest.raises(HubRefused, match="sends no"):
            admit_by_parent(replace(REQUEST, role=role), "dan", SEATS, {}, 1.0)


def test_region_that_expelled_a_machine_refuses_the_next_key_of_its_invite() -> None:
    """The person asks the hub above for a seat under another id at the same region."""
    members = {"ann": replace(_member("ann"), quarantine="the owner expelled this machine")}
    with pytest.raises(HubRefused) as refused:
        admit_by_parent(REQUEST, "ann again", SEATS, members, 1.0)
    assert refused.value.kind == "invite-held"
    moved = {"ann": replace(_member("ann"), quarantine=ENDED_ABOVE)}
    assert admit_by_parent(REQUEST, "ben", SEATS, moved, 1.0).member.role == "friend"


def test_parents_clock_follows_its_last_word() -> None:
    """The region's own clock may be wrong by years."""
    seats = SeatsForParent(2, RegionOrders(ended=(), time=5000), received=70.0)
    assert seats.parents_clock(75.0) == 5005.0


def test_seat_that_the_parent_ended_needs_a_newer_proof() -> None:
    """An expelled member shows the region the proof that it got before."""
    issued = 1000 - SEAT_S
    orders = RegionOrders(ended=("ann",), time=issued + 5)
    members = {"ann": _member("ann"), "ben": _member("ben"), "own": _member("own", "owner")}
    (after,) = newly_ended(members, orders)
    assert (after.node, after.quarantine) == ("ann", ENDED_ABOVE)
    members["ann"] = after
    assert newly_ended(members, orders) == []
    seats = SeatsForParent(5, orders)
    with pytest.raises(HubRefused, match=ENDED_ABOVE):
        admit_by_parent(REQUEST, "ann", seats, members, float(issued + 6))
    newer = replace(REQUEST, expires=issued + 6 + SEAT_S)
    assert admit_by_parent(newer, "ann", seats, members, float(issued + 6)).member.quarantine == ""
    members["ann"] = replace(after, quarantine="the owner expelled this machine")
    assert admit_by_parent(newer, "ann", seats, members, float(issued + 6)).member.quarantine, (
        "the region's own decision stays"
    )
