"""Placement of new members: each joins the nearest region that has a seat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from barnraise.cli.hub.region import settle
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.invites import Invite, invite_text
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    JoinRequest,
    JoinResponse,
    RegionOffer,
    Role,
    RunDescription,
)
from barnraise.hub.region import placement
from barnraise.hub.region.placement import (
    DETOUR_S,
    REPEATED_S,
    Regions,
    add_offer,
    invites_for,
    nearest_regions,
)
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused

FRIENDS = ("barnraise-invite:f1", "barnraise-invite:f2")
STRANGERS = ("barnraise-invite:s1",)
OFFER = RegionOffer(friends=FRIENDS, strangers=STRANGERS)


def _told(regions: Regions, member: str, role: Role, now: float) -> tuple[str, ...]:
    return invites_for(regions, member, role, now)[1]


def test_region_offer_expires_unless_repeated() -> None:
    regions = add_offer({}, "a", OFFER, 0.0)
    regions = add_offer(regions, "b", OFFER, REPEATED_S)
    assert len(_told(regions, "ann", "friend", 2 * REPEATED_S)) == 2
    assert len(_told(regions, "ann", "friend", 3.5 * REPEATED_S)) == 1
    assert list(add_offer(regions, "b", OFFER, 3.5 * REPEATED_S)) == ["b"]


def test_new_member_gets_invite_of_its_role() -> None:
    regions = add_offer({}, "a", OFFER, 0.0)
    assert _told(regions, "ann", "friend", 1.0) == FRIENDS[:1]
    assert _told(regions, "ann", "stranger", 1.0) == STRANGERS
    roles: tuple[Role, ...] = ("owner", "mirror", "region")
    assert not any(_told(regions, "ann", role, 1.0) for role in roles)


def test_new_member_gets_one_invite_per_region() -> None:
    regions: Regions = add_offer({}, "a", OFFER, 0.0)
    all_invites = []
    for member in ("ann", "ben", "ann", "cem", "ann"):
        regions, invites = invites_for(regions, member, "friend", 1.0)
        all_invites.append(invites)
    assert all_invites == [FRIENDS[:1], FRIENDS[1:], FRIENDS[:1], (), FRIENDS[:1]]
    fresh = RegionOffer(friends=(FRIENDS[1], "barnraise-invite:f3"), strangers=())
    regions = add_offer(regions, "a", fresh, 2.0)
    assert _told(regions, "cem", "friend", 3.0) == ("barnraise-invite:f3",)
    assert _told(regions, "ann", "friend", 3.0) == FRIENDS[:1]


def test_invites_are_limited_to_message_size() -> None:
    regions: Regions = {}
    for number in range(40):
        regions = add_offer(regions, str(number), OFFER, 0.0)
    joined = JoinResponse(
        role="friend", description=_description(), regions=_told(regions, "ann", "friend", 1.0)
    )
    assert msgspec.convert(msgspec.to_builtins(joined), JoinResponse) == joined


def test_nearest_region_is_first_and_far_ones_are_left_out() -> None:
    reached = [("far", 0.02 + 1.1 * DETOUR_S), ("near", 0.01), ("so so", 0.02 + 0.9 * DETOUR_S)]
    assert [name for name, _ in nearest_regions(0.02, reached)] == ["near", "so so"]
    assert len(nearest_regions(float("inf"), reached)) == 3, "the hub itself does not answer any more"


class _Slow(httpx.BaseTransport):
    """Transport that delays every request."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._line = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        time.sleep(self._delay_s)
        return self._line.handle_request(request)

    def close(self) -> None:
        self._line.close()


class Tree:
    """Hub with two regions; the new member's line to the second region is slow."""

    def __init__(self, folder: Path) -> None:
        self.parent = HubProcess(folder / "parent", TERMS)
        self.regions = [HubProcess(folder / name, None) for name in ("near", "far")]
        self.key = NodeKey.generate()
        self.delays: dict[NodeId, float] = {}

    def start(self) -> None:
        self.parent.start()
        owner = Friend(self.parent.address, self.parent.invite().hub_id, self.parent.owner)
        owner.push_base(torch.randn(LAYOUT.numel), HubDataOrder(samples=400, batch=10))
        owner.close()
        for region in self.regions:
            invite = self.parent.invite(role="region")
            region.start("--parent", invite_text(invite), "--seats", "1", "--offer", region.address)
        self.delays[self.regions[1].invite().hub_id] = 0.25

    def close(self) -> None:
        for hub in (self.parent, *self.regions):
            hub.kill()

    def connect(self, invite: Invite, answer_s: float = 30.0) -> HubClient:
        slow = _Slow(self.delays.get(invite.hub_id, 0.0))
        return HubClient(invite.addresses, invite.hub_id, self.key, transport=slow, answer_s=answer_s)

    @contextlib.contextmanager
    def joined(
        self, role: Role = "friend", key: NodeKey | None = None
    ) -> Iterator[tuple[Invite, JoinResponse]]:
        """Join as a new member with a key of its own."""
        self.key = key or NodeKey.generate()
        invite = self.parent.invite(role)
        with contextlib.closing(self.connect(invite)) as client:
            request = JoinRequest(token=invite.token_text, name="ann")
            yield invite, client.ask("POST", "/v1/members", JoinResponse, request)

    def regions_for(self, role: Role, key: NodeKey | None = None) -> tuple[str, ...]:
        with self.joined(role, key) as (_, joined):
            return joined.regions

    def settled(self) -> NodeId:
        with self.joined() as (invite, joined):
            return settle(invite, joined, "ann", self.connect).hub_id


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setattr(placement, "DETOUR_S", 10.0)  # a busy machine is no detour
    made = Tree(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def _description() -> RunDescription:
    return RunDescription(protocol=1, hub="A" * 69, name="fireside", owner="A" * 69, terms=TERMS)


@pytest.mark.slow
def test_new_members_are_placed_by_distance_and_seats(tree: Tree) -> None:
    until = time.monotonic() + 150
    stranger = NodeKey.generate()
    while len(tree.regions_for("stranger", stranger)) < 2:
        assert time.monotonic() < until, [region.output() for region in tree.regions]
        time.sleep(0.5)
    near, far = (region.invite().hub_id for region in tree.regions)
    assert tree.settled() == near
    assert tree.settled() == tree.parent.invite().hub_id, "the invite of the only seat is given once"
    with tree.joined() as (invite, joined):
        assert joined.regions == ()
        broken = ("barnraise-invite:x", invite_text(tree.regions[1].invite()))
        odd = msgspec.structs.replace(joined, regions=broken)
        assert settle(invite, odd, "ann", tree.connect).hub_id == far, "what cannot be read is passed over"


@pytest.mark.slow
def test_expelled_member_gets_no_region(tree: Tree) -> None:
    key = NodeKey.generate()
    with tree.joined(key=key):
        pass
    owner = Friend(tree.parent.address, tree.parent.invite().hub_id, tree.parent.owner)
    owner.ask("POST", f"/v1/members/{key.id}/expel", RunDescription)
    until = time.monotonic() + 150
    while not tree.regions_for("friend"):
        assert time.monotonic() < until, [region.output() for region in tree.regions]
        time.sleep(0.5)
    with tree.joined(key=key) as (_, joined):
        assert joined.regions == ()
    owner.close()


@pytest.mark.slow
def test_only_invited_regions_may_offer_seats(tree: Tree) -> None:
    invite = tree.parent.invite()
    friend = Friend(tree.parent.address, invite.hub_id)
    friend.join(invite)
    with pytest.raises(Refused) as refused:
        friend.ask("POST", "/v1/regions", RunDescription, RegionOffer(friends=(), strangers=()))
    assert (refused.value.status, refused.value.problem.kind) == (403, "role")
    assert "invite --region" in refused.value.problem.hint
    friend.close()


@pytest.mark.slow
def test_region_of_another_run_is_not_used(tree: Tree) -> None:
    region = tree.regions[0].invite()
    with tree.joined() as (invite, joined):
        named = msgspec.structs.replace(joined, regions=(invite_text(region),))
        other = msgspec.structs.replace(joined.description, code="0" * 64)
        otherwise = msgspec.structs.replace(named, description=other)
        assert settle(invite, otherwise, "ann", tree.connect) == invite
        assert settle(invite, named, "ann", tree.connect) == region
