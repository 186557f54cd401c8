"""Placement of new members: each joins the nearest region that has a seat."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from barnraise.cli.hub.region import JoinedPlace, settle, until_region_is_gone
from barnraise.core.errors import HubError, HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.private_options import PrivateOptions
from barnraise.hub.protocol.invites import HubPlace, invite_text
from barnraise.hub.protocol.messages import (
    ExpelResponse,
    HubDataOrder,
    JoinResponse,
    Lease,
    LeaseRequest,
    RegionOffer,
    RegionOrders,
    RegionPlace,
    Role,
    RunDescription,
    SeatGrant,
    SeatRequest,
)
from barnraise.hub.region import placement
from barnraise.hub.region.placement import (
    DETOUR_S,
    REPEATED_S,
    Regions,
    add_offer,
    nearest_regions,
    open_regions,
    take_seat,
)
from barnraise.hub.storage.log import HubLog, MemberRecord
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused

OFFER = RegionOffer(addresses=("https://region.test",), pinned=True, seats=2)


def _hubs(regions: Regions, now: float) -> list[str]:
    return [place.hub for place in open_regions(regions, now)]


def test_region_offer_expires_unless_repeated() -> None:
    regions = add_offer({}, "a", OFFER, 0.0)
    regions = add_offer(regions, "b", OFFER, REPEATED_S)
    assert sorted(_hubs(regions, 2 * REPEATED_S)) == ["a", "b"]
    assert _hubs(regions, 3.5 * REPEATED_S) == ["b"]
    assert take_seat(regions, "a", 3.5 * REPEATED_S) is None
    assert list(add_offer(regions, "b", OFFER, 3.5 * REPEATED_S)) == ["b"]


def test_region_without_seats_is_not_offered() -> None:
    regions: Regions | None = add_offer({}, "a", OFFER, 0.0)
    for left in (1, 0):
        assert regions is not None
        regions = take_seat(regions, "a", 1.0)
        assert regions is not None
        assert regions["a"].seats == left
    assert _hubs(regions, 1.0) == []
    assert take_seat(regions, "a", 1.0) is None
    assert _hubs(add_offer(regions, "a", OFFER, 2.0), 3.0) == ["a"]


def test_regions_are_limited_to_message_size() -> None:
    regions: Regions = {}
    for _ in range(40):
        regions = add_offer(regions, str(NodeKey.generate().id), OFFER, 0.0)
    joined = JoinResponse(role="friend", description=_description(), regions=open_regions(regions, 1.0))
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
            private = PrivateOptions(parent=invite_text(invite), offer=(region.address,))
            region.start("--seats", "1", private=private)
        self.delays[self.regions[1].invite().hub_id] = 0.25

    def close(self) -> None:
        for hub in (self.parent, *self.regions):
            hub.kill()

    def connect(self, place: HubPlace, answer_s: float = 30.0) -> HubClient:
        slow = _Slow(self.delays.get(place.hub, 0.0))
        return HubClient(place.addresses, place.hub, self.key, transport=slow, answer_s=answer_s)

    def join(self, role: Role = "friend", key: NodeKey | None = None) -> JoinedPlace:
        """Join as a new member with a key of its own."""
        self.key = key or NodeKey.generate()
        invite = self.parent.invite(role)
        with contextlib.closing(self.connect(invite.place)) as client:
            request = invite.request(self.key.id, "ann")
            joined = client.ask("POST", "/v1/members", JoinResponse, request)
            return JoinedPlace(invite.place, request, joined, "machine")

    def settle(self, joined: JoinedPlace) -> NodeId:
        return settle(joined, self.connect, lambda _: self.key.id).hub

    def await_regions(self, count: int) -> JoinedPlace:
        """Join as a stranger again and again until this number of regions has offered seats."""
        until = time.monotonic() + 150
        key = NodeKey.generate()
        while len((joined := self.join("stranger", key)).joined.regions) < count:
            assert time.monotonic() < until, [region.output() for region in self.regions]
            time.sleep(0.5)
        return joined


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
    tree.await_regions(2)
    near, far = (region.invite().hub_id for region in tree.regions)
    assert tree.settle(tree.join()) == near
    assert tree.settle(tree.join()) == far, "the only seat of the nearer region is taken"
    last = tree.join()
    assert last.joined.regions == ()
    assert tree.settle(last) == last.place.hub


@pytest.mark.slow
def test_member_of_lost_region_gets_another_seat(tree: Tree) -> None:
    tree.await_regions(2)
    near, far = (region.invite().hub_id for region in tree.regions)
    joined = tree.join()
    place = settle(joined, tree.connect, lambda _: tree.key.id)
    assert place.hub == near

    async def watch(seconds: float) -> None:
        loss = until_region_is_gone(place, joined.place, tree.connect, gone_s=1.0, look_s=0.2)
        await asyncio.wait_for(loss, seconds)

    with pytest.raises(TimeoutError):  # it answers
        asyncio.run(watch(4.0))
    tree.regions[0].kill()
    asyncio.run(watch(60.0))
    assert tree.settle(tree.join(key=tree.key)) == far
    tree.parent.kill()
    with pytest.raises(TimeoutError):  # no hub could give another seat
        asyncio.run(watch(4.0))


@pytest.mark.slow
def test_members_of_region_verify_its_chain_with_key_of_parent(tree: Tree) -> None:
    tree.await_regions(2)
    joined = tree.join()
    place = settle(joined, tree.connect, lambda _: tree.key.id)
    assert (place.root, place.led_from) == (joined.place.hub, "machine")
    for root, is_right in ((place.root, True), (NodeKey.generate().id, False)):
        client = HubClient(place.addresses, place.hub, tree.key, root=root, led_from=place.led_from)
        with contextlib.closing(client):
            if is_right:
                assert client.head(None).version == 0
                continue
            with pytest.raises(HubError, match="did not sign version 0"):
                client.head(None)


@pytest.mark.slow
def test_member_of_region_has_no_seat_above_and_no_second_region(tree: Tree) -> None:
    """One join at the parent brings one seat in the whole tree."""
    tree.await_regions(2)
    joined = tree.join()
    regions = joined.joined.regions
    with contextlib.closing(tree.connect(joined.place)) as client:
        assert tree.settle(joined) == tree.regions[0].invite().hub_id
        with pytest.raises(HubRefused, match="seat at a region"):
            client.ask("POST", "/v1/leases", Lease, LeaseRequest(version=0))
        for region in regions:  # each proof is for its own region, and ends the seat before
            message = SeatRequest(region=region.hub, member=str(tree.key.id), name="ann")
            with contextlib.suppress(HubRefused):
                client.ask("POST", "/v1/seats", SeatGrant, message)
    (record,) = [member for member in _members(tree.parent) if member.node == str(tree.key.id)]
    assert sum(not seat.is_over for seat in record.seats) == 1


@pytest.mark.slow
def test_proof_for_one_region_is_refused_by_another(tree: Tree) -> None:
    """A proxy, or the member itself, shows the parent's proof elsewhere and under other keys."""
    joined = tree.await_regions(2)
    first, second = joined.joined.regions
    message = SeatRequest(region=first.hub, member=str(tree.key.id), name="eve")
    with contextlib.closing(tree.connect(joined.place)) as client:
        seat = client.ask("POST", "/v1/seats", SeatGrant, message)
    for region, key in ((second, tree.key), (first, NodeKey.generate())):
        friend = Friend(region.addresses[0], NodeId.parse(region.hub), key)
        with pytest.raises(Refused) as refused:
            friend.ask("POST", "/v1/members", JoinResponse, seat.request)
        assert refused.value.problem.kind == "invite"
        friend.close()


@pytest.mark.slow
def test_expelled_member_gets_no_region(tree: Tree) -> None:
    key = NodeKey.generate()
    tree.join(key=key)
    tree.await_regions(1)
    owner = Friend(tree.parent.address, tree.parent.invite().hub_id, tree.parent.owner)
    owner.ask("POST", f"/v1/members/{key.id}/expel", ExpelResponse)
    assert tree.join(key=key).joined.regions == ()
    owner.close()


@pytest.mark.slow
def test_only_invited_regions_may_offer_seats(tree: Tree) -> None:
    invite = tree.parent.invite()
    friend = Friend(tree.parent.address, invite.hub_id)
    friend.join(invite)
    with pytest.raises(Refused) as refused:
        friend.ask("POST", "/v1/regions", RegionOrders, OFFER)
    assert (refused.value.status, refused.value.problem.kind) == (403, "role")
    assert "invite --region" in refused.value.problem.hint
    friend.close()


@pytest.mark.slow
def test_region_of_another_run_is_not_used(tree: Tree) -> None:
    joined = tree.await_regions(2)
    other = msgspec.structs.replace(joined.joined.description, code="0" * 64)
    changed = msgspec.structs.replace(joined.joined, description=other)
    assert tree.settle(joined._replace(joined=changed)) == joined.place.hub
    unreadable = RegionPlace(hub="A" * 69, addresses=("http://hub.example.org",), pinned=True)
    odd = msgspec.structs.replace(joined.joined, regions=(unreadable, *joined.joined.regions))
    assert tree.settle(joined._replace(joined=odd)) == tree.regions[0].invite().hub_id


def _members(hub: HubProcess) -> list[MemberRecord]:
    log = HubLog(hub.directory)
    try:
        return list(log.read().members.values())
    finally:
        log.close()
