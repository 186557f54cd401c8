"""Who joins a run with regions goes to the nearest one that takes it in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from backyard.cli.friend_region import Place, settle
from backyard.hub.client import HubClient
from backyard.hub.invites import Invite, invite_text, read_invite
from backyard.hub.messages import Course, Description, Join, Joined, Offer, Role
from backyard.hub.taking_in import DETOUR_S, REPEATED_S, Regions, by_distance, open_to, with_offer
from backyard.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused

OFFER = Offer(friend="backyard-invite:friends", stranger="backyard-invite:strangers")


def test_an_offer_lapses_unless_it_is_repeated() -> None:
    regions = with_offer({}, "a", OFFER, 0.0)
    regions = with_offer(regions, "b", OFFER, REPEATED_S)
    assert len(open_to(regions, "friend", 2 * REPEATED_S)) == 2
    assert len(open_to(regions, "friend", 3.5 * REPEATED_S)) == 1
    assert list(with_offer(regions, "b", OFFER, 3.5 * REPEATED_S)) == ["b"]


def test_each_gets_the_invite_of_its_role() -> None:
    regions = with_offer({}, "a", OFFER, 0.0)
    assert open_to(regions, "friend", 1.0) == (OFFER.friend,)
    assert open_to(regions, "stranger", 1.0) == (OFFER.stranger,)
    roles: tuple[Role, ...] = ("owner", "mirror", "region")
    assert not any(open_to(regions, role, 1.0) for role in roles)


def test_nobody_is_told_more_than_a_message_holds() -> None:
    regions: Regions = {}
    for number in range(40):
        regions = with_offer(regions, str(number), OFFER, 0.0)
    joined = Joined(role="friend", description=_description(), regions=open_to(regions, "friend", 1.0))
    assert msgspec.convert(msgspec.to_builtins(joined), Joined) == joined


def test_the_nearest_comes_first_and_no_detour_is_long() -> None:
    reached = [("far", 0.02 + 1.1 * DETOUR_S), ("near", 0.01), ("so so", 0.02 + 0.9 * DETOUR_S)]
    assert [name for name, _ in by_distance(0.02, reached)] == ["near", "so so"]
    assert len(by_distance(float("inf"), reached)) == 3, "the hub itself does not answer any more"


class _Slow(httpx.BaseTransport):
    """A line that takes its time."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._line = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        time.sleep(self._delay_s)
        return self._line.handle_request(request)

    def close(self) -> None:
        self._line.close()


class Tree:
    """A hub and two regions; the newcomer's line to the second one is slow."""

    def __init__(self, folder: Path) -> None:
        self.parent = HubProcess(folder / "parent", TERMS)
        self.regions = [HubProcess(folder / name, None) for name in ("near", "far")]
        self.key = NodeKey.generate()
        self.delays: dict[NodeId, float] = {}

    def start(self) -> None:
        self.parent.start()
        owner = Friend(self.parent.address, self.parent.invite().hub_id, self.parent.owner)
        owner.push_base(torch.randn(LAYOUT.numel), Course(samples=400, batch=10))
        owner.close()
        for region in self.regions:
            invite = self.parent.invite(role="region")
            region.start("--parent", invite_text(invite), "--seats", "1", "--offer", region.address)
        self.delays[self.regions[1].invite().hub_id] = 0.06

    def close(self) -> None:
        for hub in (self.parent, *self.regions):
            hub.kill()

    def connect(self, invite: Invite) -> HubClient:
        slow = _Slow(self.delays.get(invite.hub_id, 0.0))
        return HubClient(invite.addresses, invite.hub_id, self.key, transport=slow)

    @contextlib.contextmanager
    def joined(self, role: Role = "friend") -> Iterator[tuple[Place, Joined]]:
        """A newcomer, who has a key of its own."""
        self.key = NodeKey.generate()
        invite = self.parent.invite(role)
        with contextlib.closing(self.connect(invite)) as client:
            asked = Join(token=invite.token_text, name="ann")
            yield Place(invite, client), client.ask("POST", "/v1/members", Joined, asked)

    def regions_for(self, role: Role) -> tuple[str, ...]:
        with self.joined(role) as (_, joined):
            return joined.regions

    def settled(self) -> NodeId:
        with self.joined() as (place, joined):
            return settle(place, joined, "ann", self.connect).hub_id


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def _description() -> Description:
    return Description(protocol=1, hub="A" * 69, name="fireside", owner="A" * 69, terms=TERMS)


@pytest.mark.slow
def test_newcomers_are_spread_by_distance_and_seats(tree: Tree) -> None:
    until = time.monotonic() + 90
    while len(tree.regions_for("friend")) < 2:
        assert time.monotonic() < until, [region.said() for region in tree.regions]
        time.sleep(0.5)
    near, far = (region.invite().hub_id for region in tree.regions)
    assert tree.settled() == near
    assert tree.settled() == far, "the near one has no seat left"
    assert tree.settled() == tree.parent.invite().hub_id, "nobody has"
    texts = [*tree.regions_for("stranger"), *tree.regions_for("friend")]
    assert len({read_invite(text).token for text in texts}) == 4


@pytest.mark.slow
def test_only_who_was_invited_as_a_region_may_take_others_in(tree: Tree) -> None:
    invite = tree.parent.invite()
    friend = Friend(tree.parent.address, invite.hub_id)
    friend.join(invite)
    with pytest.raises(Refused) as refused:
        friend.ask("POST", "/v1/regions", Description, OFFER)
    assert (refused.value.status, refused.value.problem.kind) == (403, "role")
    assert "invite --region" in refused.value.problem.hint
    friend.close()


@pytest.mark.slow
def test_a_region_with_another_run_is_not_gone_to(tree: Tree) -> None:
    region = tree.regions[0].invite()
    with tree.joined() as (place, joined):
        named = msgspec.structs.replace(joined, regions=(invite_text(region),))
        other = msgspec.structs.replace(joined.description, code="0" * 64)
        otherwise = msgspec.structs.replace(named, description=other)
        assert settle(place, otherwise, "ann", tree.connect) == place.invite
        assert settle(place, named, "ann", tree.connect) == region
