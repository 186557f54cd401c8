"""Seats of one tree: a parent and its region in this process, and a member that both of them know."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.messages import (
    LeaseRequest,
    Problem,
    RegionOffer,
    RegionOrders,
    SeatGrant,
    SeatRequest,
    decode_message,
    encode_message,
)
from barnraise.hub.server.membership import ENDED_ABOVE, SeatsForParent
from barnraise.hub.storage.create import create_hub, create_invite, hub_key
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import TERMS
from tests.unit.hub.in_process_hub import ADDRESS, InProcessHub, opened, play

OFFER = RegionOffer(addresses=("https://region.test",), pinned=True, seats=5)


class Tree:
    """A parent, a region, and the key that the region has at both."""

    def __init__(self, parent: InProcessHub, region: InProcessHub, line: httpx.AsyncClient) -> None:
        self.parent, self.region, self.line = parent, region, line
        self.key = hub_key(region.directory)

    async def offer(self, offer: RegionOffer = OFFER) -> RegionOrders:
        answer = await self.parent.ask(self.line, self.key, "POST /v1/regions", encode_message(offer))
        assert answer.status_code == 200, answer.text
        return decode_message(RegionOrders, answer.content)

    async def seat(self, member: NodeKey, there: NodeKey) -> SeatGrant:
        message = SeatRequest(region=str(self.key.id), member=str(there.id), name="ann")
        answer = await self.parent.ask(self.line, member, "POST /v1/seats", encode_message(message))
        if answer.status_code != 200:
            problem = decode_message(Problem, answer.content)
            raise HubRefused(answer.status_code, problem.kind, problem.message, hint=problem.hint)
        return decode_message(SeatGrant, answer.content)


async def _open_tree(scene: InProcessHub, region: InProcessHub, line: httpx.AsyncClient) -> Tree:
    tree = Tree(scene, region, line)
    invite = create_invite(scene.directory, ADDRESS, role="region")
    await scene.hub.join(str(tree.key.id), invite.request(tree.key.id, "region"))
    region.hub.seats = SeatsForParent(5)
    return tree


def test_expulsion_at_parent_reaches_region(tmp_path: Path) -> None:
    """The expelled member keeps the proof that its hub gave it, and shows it to the region again."""

    async def story(scene: InProcessHub) -> None:
        directory = tmp_path / "region"
        create_hub(directory, "fireside", hub_key(directory).id, TERMS, parent=scene.hub.id)
        async with opened(directory) as region, scene.line() as line:
            tree = await _open_tree(scene, region, line)
            ann = await scene.member()
            there = NodeKey.generate()
            with pytest.raises(HubRefused, match="no seat left"):
                await tree.seat(scene.keys[ann], there)
            orders = await tree.offer()
            assert orders.ended == ()
            seat = await tree.seat(scene.keys[ann], there)
            with pytest.raises(HubRefused, match="not heard"):
                await region.hub.join(str(there.id), seat.request)
            await region.hub.follow_orders(orders)
            await region.hub.join(str(there.id), seat.request)
            assert region.hub.members[str(there.id)].invite == scene.hub.members[ann].invite, "one group"
            with pytest.raises(HubRefused, match="seat at a region"):
                await scene.lease(ann)

            await scene.hub.expel(ann)
            orders = await tree.offer()
            assert orders.ended == (str(there.id),)
            await region.hub.follow_orders(orders)
            with pytest.raises(HubRefused, match=ENDED_ABOVE):
                await region.hub.lease(str(there.id), LeaseRequest(version=0))
            with pytest.raises(HubRefused, match=ENDED_ABOVE):
                await region.hub.join(str(there.id), seat.request)
            with pytest.raises(HubRefused, match="quarantine"):
                await tree.seat(scene.keys[ann], there)

    play(tmp_path / "parent", story)


def test_parents_offers_and_answers_hold_no_secret(tmp_path: Path) -> None:
    """A proxy in front of the parent reads everything that a region and a new member exchange with it."""

    async def story(scene: InProcessHub) -> None:
        directory = tmp_path / "region"
        create_hub(directory, "fireside", hub_key(directory).id, TERMS, parent=scene.hub.id)
        async with opened(directory) as region, scene.line() as line:
            tree = await _open_tree(scene, region, line)
            ann = await scene.member()
            there, eve = NodeKey.generate(), NodeKey.generate()
            await region.hub.follow_orders(await tree.offer())
            seat = await tree.seat(scene.keys[ann], there)
            with pytest.raises(HubRefused, match="did not sign"):
                await region.hub.join(str(eve.id), seat.request)
            with pytest.raises(HubRefused, match="no invite"):
                await scene.hub.join(str(there.id), replace(seat.request, invite=str(eve.id)))
            with pytest.raises(HubRefused, match="not a member"):
                await tree.seat(eve, there)

    play(tmp_path / "parent", story)


def test_offer_with_address_without_tls_is_refused(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        directory = tmp_path / "region"
        create_hub(directory, "fireside", hub_key(directory).id, TERMS, parent=scene.hub.id)
        async with opened(directory) as region, scene.line() as line:
            tree = await _open_tree(scene, region, line)
            offer = RegionOffer(addresses=("http://192.168.1.5:80",), pinned=True, seats=5)
            answer = await scene.ask(line, tree.key, "POST /v1/regions", encode_message(offer))
            assert (answer.status_code, decode_message(Problem, answer.content).kind) == (422, "message")

    play(tmp_path / "parent", story)
