"""SIGKILL at any time: committed versions stay, count once, and the hub resumes."""

from __future__ import annotations

import html
import random
import subprocess
import time
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import hub_blobs
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused, plainly
from tests.unit.hub.training_members import COURSE, Worker, checked, stop


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_hub_resumes_without_loss(tmp_path: Path) -> None:
    terms = msgspec.structs.replace(TERMS, round_s=0.2, slack_s=1.0, base_every=4)
    hub = HubProcess(tmp_path / "hub", terms)
    hub.start()
    invite = hub.invite(uses=9)
    owner = Friend(hub.address, invite.hub_id, hub.owner)
    owner.push_base(torch.zeros(LAYOUT.numel), COURSE)
    friends = [Friend(hub.address, invite.hub_id) for _ in range(3)]
    for friend in friends:
        friend.join(invite)
    folder = tmp_path / "files"
    folder.mkdir()
    workers = [Worker(friend, folder, seed) for seed, friend in enumerate(friends)]
    for worker in workers:
        worker.start()
    draw, known = random.Random(11), dict[int, str]()
    blobs = hub_blobs(hub.directory)
    heads: list[int] = []
    try:
        for number in range(3):
            _wait_for_progress(owner, heads[-1] if heads else 0)
            if number % 2:
                _wait_for_a_new_blob(blobs, time.monotonic() + 5)  # between blob and log
            else:
                time.sleep(draw.uniform(0.0, 0.3))
            hub.kill()
            heads.append(checked(hub, workers, known))
            hub.start()
        _wait_for_progress(owner, heads[-1])
    finally:
        stop(workers, 120.0)
        hub.kill()
    heads.append(checked(hub, workers, known))
    assert heads == sorted(heads)
    refused = {kind for worker in workers for kind in worker.refused}
    assert not refused & {"copy", "digest", "schema", "not-finite", "norm"}, "all members were honest"
    hub.start()
    try:
        last = [Friend(hub.address, invite.hub_id), friends[0]]
        for friend in last:
            friend.pull(tmp_path, wait=0)
        while last[0].version != last[1].version:  # a round that waited when it was killed is over meanwhile
            for friend in last:
                friend.pull(tmp_path, wait=0)
        assert torch.equal(last[0].state, last[1].state), (
            "a member that was there all the time has the same bits"
        )
    finally:
        hub.kill()
        for friend in (owner, *friends, last[0]):
            friend.close()


def _wait_for_progress(friend: Friend, version: int) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        try:
            if (friend.describe().version or 0) > version:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"no version after {version} within 90 s")


def _wait_for_a_new_blob(blobs: BlobStore, until: float) -> None:
    before = set(blobs.names())
    while time.monotonic() < until:
        if set(blobs.names()) - before:
            return
        time.sleep(0.001)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_full_disk_stops_hub_and_loses_nothing(tmp_path: Path) -> None:
    """The hub's directory is on a small tmpfs.

    The hub reports that it is full, and resumes when there is space again.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True)
    hub = None
    friends: list[Friend] = []
    try:
        hub = HubProcess(disk / "hub", msgspec.structs.replace(TERMS, round_s=0.2, slack_s=60.0))
        hub.start()
        invite = hub.invite()
        friends += [Friend(hub.address, invite.hub_id, key) for key in (hub.owner, None)]
        owner, ann = friends
        owner.push_base(torch.zeros(LAYOUT.numel), COURSE)
        ann.join(invite)
        ann.pull(tmp_path)
        lease = ann.lease()
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="space"):
            ballast.write_bytes(bytes(4 << 20))
        update = torch.randn(LAYOUT.numel) * 0.01
        with pytest.raises(Refused, match="503 disk") as caught:
            ann.push(lease, update)
        assert caught.value.problem.message in html.unescape(plainly(hub.address).text), "its page says so"
        ballast.unlink()
        assert ann.push(lease, update).accepted
        assert ann.pull(tmp_path, wait=30).version == 1
    finally:
        for friend in friends:
            friend.close()
        if hub is not None:
            hub.kill()
        subprocess.run(["umount", str(disk)], check=True)
