"""Two levels of hubs: members of a region and a direct member train one chain of versions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from barnraise.hub.private_options import PrivateOptions
from barnraise.hub.protocol.invites import invite_text
from barnraise.hub.protocol.messages import HubDataOrder, Lease, SampleSpan, UpdateDeclaration, VersionStep
from barnraise.hub.region.region import declare_update
from barnraise.hub.storage.create import create_invite
from barnraise.hub.storage.log import Contribution, HubLog
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused, encoded
from tests.unit.hub.hub_process import declared as sent
from tests.unit.hub.in_process_hub import ADDRESS, InProcessHub, play

COURSE = HubDataOrder(samples=400, batch=10)


def test_region_declares_number_of_merged_updates() -> None:
    parts = [
        Contribution(
            node="ann", lease="", samples=5, spans=(), behind=0, weight=5, scale=1, sha256="", merged=merged
        )
        for merged in (1, 1, 40)
    ]
    lease = Lease(id="0" * 32, version=3, spans=(SampleSpan(0, 0, 15),), steps=1, seconds=1.0, void_s=1.0)
    declaration = declare_update(VersionStep("delta", 3, "a" * 64, 7, "int8"), lease, parts)
    assert (declaration.merged, declaration.samples) == (42, 15)
    plain = msgspec.to_builtins(declaration)
    del plain["merged"]
    assert msgspec.convert(plain, UpdateDeclaration).merged == 1, (
        "a declaration without the field means one update"
    )


def test_direct_member_counts_beside_two_regions(tmp_path: Path) -> None:
    """The member's update is as long as each of those that the regions merged; their mean is shorter."""

    async def story(scene: InProcessHub) -> None:
        invites = [
            create_invite(scene.directory, ADDRESS, role=role) for role in ("region", "region", "friend")
        ]
        nodes = [await scene.join(invite) for invite in invites]
        for _ in range(TERMS.refusals):
            leases = [await scene.lease(node) for node in nodes]
            version = leases[0].version
            for node, lease, merged in zip(nodes, leases, (20, 20, 1), strict=True):
                change = torch.randn(merged, LAYOUT.numel).mean(0) * 0.01 * (lease.samples / merged) ** 0.5
                data = encoded(change, TERMS.codec, version)
                await scene.send(node, sent(lease, data, merged=merged), data)
            await asyncio.wait_for(scene.until(lambda wanted=version + 1: scene.hub.version == wanted), 30)
        assert scene.hub.refusals == []
        log = HubLog(scene.directory)
        parts = log.contributions(scene.hub.versions[-1].number)
        log.close()
        assert sorted((part.merged, part.scale) for part in parts) == [(1, 1.0), (20, 1.0), (20, 1.0)]

    play(tmp_path, story)


def _train(friend: Friend, folder: Path, until: float, leased: threading.Event) -> None:
    """Train until the run is over; report the first samples."""
    while time.monotonic() < until:
        if friend.pull(folder, wait=2.0).finished:
            return
        try:
            lease = friend.lease()
            leased.set()
            friend.push(lease, torch.randn(LAYOUT.numel) * 0.01)
        except Refused as error:
            time.sleep(min(0.3, error.problem.retry_s + 0.05))


@pytest.mark.slow
def test_region_pushes_one_update_to_parent(tmp_path: Path) -> None:
    terms = msgspec.structs.replace(TERMS, round_s=1.0, slack_s=60.0)
    parent, region = HubProcess(tmp_path / "parent", terms), HubProcess(tmp_path / "region", None)
    friends: list[Friend] = []
    try:
        parent.start()
        region.start(private=PrivateOptions(parent=invite_text(parent.invite())))
        invite, regional = parent.invite(), region.invite(uses=2)
        friends += [Friend(parent.address, invite.hub_id, key) for key in (parent.owner, None)]
        friends += [Friend(region.address, regional.hub_id) for _ in range(2)]
        owner, direct, *leaves = friends
        owner.push_base(torch.randn(LAYOUT.numel), COURSE)
        direct.join(invite)
        for leaf in leaves:
            leaf.join(regional)
        until = time.monotonic() + 150
        _wait_for_base(leaves[0], until)
        direct.pull(tmp_path)
        first = direct.lease()  # or the region may do all the work alone
        leased = threading.Event()
        threads = [
            threading.Thread(target=_train, args=(friend, tmp_path, until, leased), daemon=True)
            for friend in (*leaves, direct)
        ]
        for thread in threads[:-1]:
            thread.start()
        assert leased.wait(90), "or the direct member may do all the work alone"
        direct.push(first, torch.randn(LAYOUT.numel) * 0.01)
        threads[-1].start()
        for thread in threads:
            thread.join(160)
        for friend in friends[1:]:
            friend.pull(tmp_path, wait=0)
        versions = {friend.version for friend in friends[1:]}
        assert len(versions) == 1, (versions, parent.output(), region.output())
        assert torch.equal(direct.state, leaves[0].state)
        assert torch.equal(leaves[1].state, leaves[0].state)
    finally:
        for hub in (parent, region):
            hub.kill()
        for friend in friends:
            friend.close()
    log = HubLog(parent.directory)
    parts = [part for version in log.read().versions for part in log.contributions(version.number)]
    log.close()
    places = [place for part in parts for span in part.spans for place in range(span.first, span.last)]
    assert sorted(places) == list(range(COURSE.samples)), "each sample once, at either level"
    assert len({part.node for part in parts}) == 2, "the parent sees one member for the whole region"


@pytest.mark.slow
def test_all_members_of_region_get_samples(tmp_path: Path) -> None:
    """The first member does not get all samples of the parent's lease.

    A region without requests leases nothing.
    """
    terms = msgspec.structs.replace(TERMS, round_s=20.0, slack_s=300.0, first_batches=8)
    parent = HubProcess(tmp_path / "parent", terms)
    region, idle = (HubProcess(tmp_path / name, None) for name in ("region", "idle"))
    leaves: list[Friend] = []
    owner = Friend(parent.address, parent.invite().hub_id, parent.owner)
    try:
        parent.start()
        owner.push_base(torch.randn(LAYOUT.numel), COURSE)
        direct = owner.lease()
        for hub in (region, idle):
            hub.start(private=PrivateOptions(parent=invite_text(parent.invite())))
        invite = region.invite(uses=4)
        leaves += [Friend(region.address, invite.hub_id) for _ in range(4)]
        until = time.monotonic() + 150
        for leaf in leaves:
            leaf.join(invite)
        _wait_for_base(leaves[0], until)
        for leaf in leaves:
            leaf.pull(tmp_path)
        leases = _leases(leaves, until)
        assert [lease.samples for lease in leases] == [20] * 4
        for leaf, lease in zip(leaves, leases, strict=True):
            leaf.push(lease, torch.randn(LAYOUT.numel) * 0.01)
        owner.push(direct, torch.randn(LAYOUT.numel) * 0.01)
        for leaf in leaves:
            leaf.pull(tmp_path)
        assert [leaf.version for leaf in leaves] == [1] * 4, (parent.output(), region.output())
        covered = {lease.covered for lease in _leases(leaves, until)}
        assert covered == {80 + direct.samples}, "schedules follow all samples of the chain"
    finally:
        for hub in (parent, region, idle):
            hub.kill()
        for friend in (owner, *leaves):
            friend.close()
    log = HubLog(parent.directory)
    assert [(version.members, version.samples) for version in log.read().versions] == [(0, 0), (2, 160)]
    log.close()


def _leases(leaves: list[Friend], until: float) -> list[Lease]:
    """Take the leases of all members at once, before any of them has pushed."""
    leases: dict[int, Lease] = {}
    while len(leases) < len(leaves):
        assert time.monotonic() < until, f"{len(leases)} of {len(leaves)} have a lease"
        for number, leaf in enumerate(leaves):
            if number not in leases:
                with contextlib.suppress(Refused):
                    leases[number] = leaf.lease()
        time.sleep(0.2)
    return [leases[number] for number in range(len(leaves))]


def _wait_for_base(friend: Friend, until: float) -> None:
    while time.monotonic() < until:
        if friend.describe().layout is not None:
            return
        time.sleep(0.1)
    raise AssertionError("the region has no base")
