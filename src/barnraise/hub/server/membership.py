"""Decisions about members: admission, seats at regions, and which seats are over. Pure.

A member came with an invite of this hub, or the hub above sent it. One member has one seat: at this hub, or
at one of its regions. A region learns from its parent which of its seats are over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.admission import ASK_FOR_INVITE
from barnraise.hub.protocol.invites import InviteGrant, use_grant
from barnraise.hub.protocol.messages import MOST_SEATS, JoinRequest, RegionOrders
from barnraise.hub.storage.log import MemberRecord, RegionSeat

SEAT_S = 600  # in which a member must use the proof that its hub gave it for a region
_MOST_SEATS_OF_MEMBER = 16
ENDED_ABOVE = "the hub above ended this seat"
_JOIN_AGAIN = "Join the run again with the same invite."


class Admission(NamedTuple):
    """A member after it joined, and its invite. The invite is None if the hub above sent the member."""

    member: MemberRecord
    grant: InviteGrant | None


class SeatsForParent(NamedTuple):
    """Seats that a region keeps for members of its parent, and what the parent said last, and when."""

    max_members: int = 0
    orders: RegionOrders | None = None
    received: float = 0.0  # by this machine's monotonic clock

    def parents_clock(self, now: float) -> float:
        """Return the time of the parent's clock, which its proofs follow."""
        return 0.0 if self.orders is None else self.orders.time + now - self.received


def admit_by_invite(
    request: JoinRequest, node: str, grant: InviteGrant, members: Mapping[str, MemberRecord], clock: float
) -> Admission:
    """Admit a member that has an invite of this hub. It has no seat at a region any more.

    Raise HubRefused (403) if the invite cannot be used, or while a member that came with it is excluded.
    """
    after = use_grant(grant, request, node, clock)
    member = members.get(node)
    if member is not None:
        return Admission(_without_seats(member), after)
    _check_others(members[other] for other in grant.used_by if other in members)
    return Admission(_new_member(request, node, clock), after)


def _check_others(members: Iterable[MemberRecord]) -> None:
    """Raise HubRefused (403) if one of these members, which came with the same invite, is excluded here."""
    if any(member.quarantine not in ("", ENDED_ABOVE) for member in members):
        message = "a machine that came with this invite is in quarantine"
        raise HubRefused(403, "invite-held", message, hint=ASK_FOR_INVITE)


def admit_by_parent(
    request: JoinRequest,
    node: str,
    seats: SeatsForParent,
    members: Mapping[str, MemberRecord],
    clock: float,
) -> Admission:
    """Admit a member that the hub above sent. ``clock``: the parent's.

    Raise HubRefused if its proof has expired or is older than the end of its seat, or if there is no seat.
    """
    orders = seats.orders
    if orders is None:
        message = "this region has not heard from the hub above yet"
        raise HubRefused(503, "busy", message, hint="Try again in a minute.", retry_s=5.0)
    if clock > request.expires:
        raise HubRefused(403, "invite-expired", "the hub's permission has expired", hint=_JOIN_AGAIN)
    if request.role not in ("friend", "stranger"):
        raise HubRefused(403, "role", f"the hub above sends no {request.role}", hint=_JOIN_AGAIN)
    if node in orders.ended and request.expires - SEAT_S <= orders.time:
        raise HubRefused(403, "quarantine", ENDED_ABOVE, hint=_JOIN_AGAIN)
    member = members.get(node)
    if member is not None:
        quarantine = "" if member.quarantine == ENDED_ABOVE else member.quarantine
        return Admission(msgspec.structs.replace(_without_seats(member), quarantine=quarantine), None)
    _check_others(other for other in members.values() if other.invite == request.invite)
    if taken_seats(members) >= seats.max_members:
        raise HubRefused(403, "seats", "this region has no seat left", hint=_JOIN_AGAIN)
    return Admission(_new_member(request, node, clock), None)


def _new_member(request: JoinRequest, node: str, clock: float) -> MemberRecord:
    return MemberRecord(node=node, name=request.name, role=request.role, since=clock, invite=request.invite)


def taken_seats(members: Mapping[str, MemberRecord]) -> int:
    """Return the number of members, without the owner and those that are excluded."""
    return sum(member.role != "owner" and not member.quarantine for member in members.values())


def give_seat(member: MemberRecord, region: str, id_there: str) -> MemberRecord:
    """Return the member with this seat as its only one. Raise HubRefused (403) if it had too many."""
    if member.role not in ("friend", "stranger") or not member.invite:
        raise HubRefused(403, "role", f"a {member.role} gets no seat at a region", hint=_JOIN_AGAIN)
    others = tuple(
        seat for seat in _without_seats(member).seats if (seat.region, seat.member) != (region, id_there)
    )
    if len(others) >= _MOST_SEATS_OF_MEMBER:
        raise HubRefused(403, "seats", "this member had too many seats at regions", hint=_JOIN_AGAIN)
    return msgspec.structs.replace(member, seats=(*others, RegionSeat(region, id_there)))


def expelled(member: MemberRecord, why: str) -> MemberRecord:
    """Return the member in quarantine, without a seat at any region."""
    return msgspec.structs.replace(_without_seats(member), refusals=0, quarantine=why)


def has_seat_below(member: MemberRecord) -> bool:
    """Return True if the member trains at a region, and not here."""
    return any(not seat.is_over for seat in member.seats)


def ended_seats(members: Iterable[MemberRecord], region: str) -> tuple[str, ...]:
    """Return the ids of members of a region whose seats are over."""
    ended = [
        seat.member
        for member in members
        for seat in member.seats
        if seat.region == region and (seat.is_over or member.quarantine)
    ]
    return tuple(ended[-MOST_SEATS:])


def newly_ended(members: Mapping[str, MemberRecord], orders: RegionOrders) -> list[MemberRecord]:
    """Return the members of this region that its parent has ended, as they are afterwards."""
    ended = (members[node] for node in orders.ended if node in members)
    return [
        expelled(member, ENDED_ABOVE) for member in ended if not member.quarantine and member.role != "owner"
    ]


def came_together(members: Mapping[str, MemberRecord], node: str) -> tuple[str, ...]:
    """Return the names of the other members that came with the same invite and still take part."""
    invite = members[node].invite
    return tuple(
        member.name
        for other, member in members.items()
        if invite and member.invite == invite and other != node and not member.quarantine
    )[:MOST_SEATS]


def _without_seats(member: MemberRecord) -> MemberRecord:
    seats = tuple(msgspec.structs.replace(seat, is_over=True) for seat in member.seats)
    return msgspec.structs.replace(member, seats=seats)
