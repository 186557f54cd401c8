"""Two levels of hubs: leaves of a region and a direct member train one chain."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from backyard.hub.invites import invite_text
from backyard.hub.log import Log
from backyard.hub.messages import Course
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused

COURSE = Course(samples=400, batch=10)


def _train(friend: Friend, folder: Path, until: float) -> None:
    """Until the run is over."""
    while time.monotonic() < until:
        if friend.pull(folder, wait=2.0).finished:
            return
        try:
            friend.push(friend.lease(), torch.randn(LAYOUT.numel) * 0.01)
        except Refused as error:
            time.sleep(min(0.3, error.problem.retry_s + 0.05))


@pytest.mark.slow
def test_a_region_passes_one_update_up(tmp_path: Path) -> None:
    terms = msgspec.structs.replace(TERMS, round_s=1.0, slack_s=5.0)
    parent, region = HubProcess(tmp_path / "parent", terms), HubProcess(tmp_path / "region", None)
    friends: list[Friend] = []
    try:
        parent.start()
        region.start("--parent", invite_text(parent.invite()))
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
        threads = [
            threading.Thread(target=_train, args=(one, tmp_path, until), daemon=True) for one in friends[1:]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(160)
        for friend in friends[1:]:
            friend.pull(tmp_path, wait=0)
        versions = {friend.version for friend in friends[1:]}
        assert len(versions) == 1, (versions, parent.said(), region.said())
        assert torch.equal(direct.state, leaves[0].state)
        assert torch.equal(leaves[1].state, leaves[0].state)
    finally:
        for hub in (parent, region):
            hub.kill()
        for friend in friends:
            friend.close()
    log = Log(parent.directory)
    parts = [part for one in log.read().versions for part in log.contributions(one.number)]
    log.close()
    places = [place for part in parts for span in part.spans for place in range(span.first, span.last)]
    assert sorted(places) == list(range(COURSE.samples)), "each sample once, at whichever level"
    assert len({part.node for part in parts}) == 2, "the parent sees one member for the whole region"


def _wait_for_base(friend: Friend, until: float) -> None:
    while time.monotonic() < until:
        if friend.describe().layout is not None:
            return
        time.sleep(0.1)
    raise AssertionError("the region has no base")
