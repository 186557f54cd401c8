"""Clock jumps of a hub and a member: rounds continue, no signature counts twice, and the jump is reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from barnraise.core.errors import HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.upload import push
from barnraise.hub.protocol.clock import ClockJumps, SignatureClock, describe_skew
from barnraise.hub.protocol.messages import HubDataOrder, Lease, LeaseRequest, encode_message
from barnraise.hub.protocol.replay_guard import LatestSigned, NonceCache
from barnraise.hub.protocol.signatures import sign_request, verify_request
from barnraise.hub.storage.log import HubLog
from barnraise.identity import NodeKey
from tests.unit.hub.fake_clock import LIBRARIES, FakeClock
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, declared, encoded, plainly

HOUR = 3600
COURSE = HubDataOrder(samples=1000, batch=10)
needs_library = pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime to move a process's clock")


class Clocks:
    def __init__(self) -> None:
        self.wall, self.now = 1_800_000_000.0, 50.0

    def go(self, seconds: float, jump: float = 0.0) -> None:
        self.wall, self.now = self.wall + seconds + jump, self.now + seconds


@pytest.mark.parametrize("jump", [5.0 * HOUR, -5.0 * HOUR, -400.0])
def test_signed_request_never_counts_twice_after_clock_jumps(jump: float) -> None:
    member, hub, clocks = NodeKey.generate(), NodeKey.generate(), Clocks()
    clock = SignatureClock(lambda: clocks.wall, lambda: clocks.now, 0.0)
    nonces = NonceCache(clock())
    headers = sign_request(member, "POST", "/v1/leave", "", b"", hub.id, clock())
    signed = verify_request("POST", "/v1/leave", "", headers, hub.id)
    nonces.accept(signed, clock(), clocks.now)
    clocks.go(1.0, jump)
    for _ in range(6 * HOUR // 60):  # the clock comes by the same moment again
        with pytest.raises(HubRefused) as caught:
            nonces.accept(signed, clock(), clocks.now)
        assert caught.value.kind in ("replay", "clock")
        fresh = sign_request(member, "POST", "/v1/leave", "", b"", hub.id, clock())
        nonces.accept(verify_request("POST", "/v1/leave", "", fresh, hub.id), clock(), clocks.now)
        clocks.go(60.0)


def test_signature_clock_never_goes_back() -> None:
    clocks = Clocks()
    clock = SignatureClock(lambda: clocks.wall, lambda: clocks.now, 0.0)
    began = clock()
    clocks.go(10.0, -HOUR)
    assert clock() == began + 10
    clocks.go(10.0, 3 * HOUR)
    assert clock() == clocks.wall
    assert SignatureClock(lambda: clocks.wall, lambda: clocks.now, clocks.wall + 50)() > clocks.wall + 50


def test_slowly_adjusted_clock_is_no_jump() -> None:
    clocks = Clocks()
    jumps = ClockJumps(clocks.wall, clocks.now)
    for _ in range(100):
        clocks.go(1.0, 0.5)
        assert jumps.check(clocks.wall, clocks.now) == 0.0
    clocks.go(1.0, -HOUR)
    assert jumps.check(clocks.wall, clocks.now) == pytest.approx(-HOUR)
    assert jumps.check(clocks.wall, clocks.now) == 0.0
    assert "jumped back by 60 min" in describe_skew(-HOUR, -HOUR)
    assert "5 h ahead of the hub's" in describe_skew(5 * HOUR, 0.0)


def test_log_stores_newest_signature_time(tmp_path: Path) -> None:
    latest, log = LatestSigned(), HubLog(tmp_path)
    latest.note(70)
    latest.note(60)
    log.transact(latest.changes())
    assert latest.changes() == [], "nothing new"
    again = LatestSigned()
    again.restore(log.read().facts)
    log.close()
    assert again.time == 70


class Scene:
    """Hub whose clock is moved, with an open round that waits for two members."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, FakeClock(folder / "clock")
        terms = msgspec.structs.replace(TERMS, round_s=30.0)
        self.hub = HubProcess(folder / "hub", terms, environment=self.clock.environment)
        self.hub.start()
        invite = self.hub.invite(uses=3)
        self.hub_id = invite.hub_id
        owner = Friend(self.hub.address, self.hub_id, self.hub.owner)
        owner.push_base(torch.zeros(LAYOUT.numel), COURSE)
        owner.close()
        self.keys = [folder / "ann.key", folder / "bob.key"]
        for key in self.keys:
            friend = Friend(self.hub.address, self.hub_id, NodeKey.load_or_create(key))
            friend.join(invite, key.stem)
            friend.close()
        self.messages: list[str] = []
        self.ann = HubClient(
            [self.hub.address], self.hub_id, NodeKey.load_or_create(self.keys[0]), say=self.messages.append
        )

    def lease(self) -> Lease:
        return self.ann.ask("POST", "/v1/leases", Lease, LeaseRequest(version=0))

    def page(self) -> str:
        return plainly(f"{self.hub.address}/").text

    def sign(self, created: float) -> dict[str, str]:
        key = NodeKey.load_or_create(self.keys[0])
        return sign_request(key, "POST", "/v1/leases", "", _WISH, self.hub_id, created)

    def send(self, headers: dict[str, str]) -> httpx.Response:
        return plainly(f"{self.hub.address}/v1/leases", method="POST", headers=headers, content=_WISH)

    def heard(self) -> dict[str, str]:
        """Return a request of ann's, signed at the hub's own time, that the hub has handled."""
        headers = self.sign(self.send(self.sign(0.0)).json()["time"])
        assert self.send(headers).status_code == 200
        return headers


_WISH = encode_message(LeaseRequest(version=0))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.hub.kill()
        made.ann.close()


def _wait_until_said(hub: HubProcess, words: str) -> None:
    until = time.monotonic() + 60
    while words not in hub.output():
        assert time.monotonic() < until, hub.output()
        time.sleep(0.1)


@needs_library
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hub_keeps_round_after_clock_jump(scene: Scene) -> None:
    lease = scene.lease()
    scene.clock.set(5 * HOUR)
    _wait_until_said(scene.hub, "clock jumped ahead by 5 h")
    assert "clock jumped ahead by 5 h" in scene.page()
    again = scene.lease()
    assert again.id == lease.id
    assert 0 < again.void_s < lease.void_s, "a lease's time is not the clock's"
    (message,) = scene.messages
    assert message.startswith("this machine's clock is 5 h behind the hub's: ")

    headers = scene.heard()
    scene.clock.set(-5 * HOUR)
    _wait_until_said(scene.hub, "clock jumped back by 10 h")
    assert scene.lease().id == lease.id
    assert len(scene.messages) == 1, "the time of signatures did not go back: there is nothing to adopt"
    assert scene.send(headers).json()["kind"] == "replay"
    assert re.search(r"[0-9-]{10} [0-9:]{8} UTC", scene.page()), "no age of what lies ahead"
    _deliver(scene, lease)
    _check_first_version(scene, lease)


@needs_library
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_restarted_hub_with_earlier_clock_rejects_replay(scene: Scene) -> None:
    lease, headers = scene.lease(), scene.heard()
    for shift in (-30, -5 * HOUR):
        scene.hub.kill()
        scene.clock.set(shift)
        scene.hub.start()
        answer = scene.send(headers)
        assert (answer.status_code, answer.json()["kind"]) == (401, "clock")
        assert scene.lease().id == lease.id, "nothing is lost"
    _deliver(scene, lease)
    _check_first_version(scene, lease)


def _deliver(scene: Scene, lease: Lease) -> None:
    data = encoded(torch.randn(LAYOUT.numel) * 0.01, TERMS.codec, lease.version)
    file = scene.folder / "update"
    file.write_bytes(data)
    assert push(scene.ann, declared(lease, data), file).accepted
    assert scene.ann.head(0, 30.0).version == 1


def _check_first_version(scene: Scene, lease: Lease) -> None:
    log = HubLog(scene.hub.directory)
    try:
        assert [(part.lease, part.spans) for part in log.contributions(1)] == [(lease.id, lease.spans)]
    finally:
        log.close()


@needs_library
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("jump", "words"), [(3 * HOUR, "ahead by 3 h"), (-3 * HOUR, "back by 3 h")])
def test_member_delivers_after_clock_jump_and_reports_it(scene: Scene, jump: int, words: str) -> None:
    clock = FakeClock(scene.folder / "member")
    argv = [scene.hub.address, str(scene.hub_id), str(scene.keys[1]), str(scene.folder)]
    member = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.hub.clock_test_member", *argv],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert member.stdout is not None
        lease = member.stdout.readline().strip()
        clock.set(jump)
        time.sleep(4.0)
        output = json.loads(member.communicate("go on\n", timeout=120)[0])
    finally:
        member.kill()
        member.wait()
    assert output["accepted"]
    (message,) = output["said"]
    assert f"this machine's clock jumped {words}" in message
    assert scene.ann.head(0, 30.0).version == 1
    log = HubLog(scene.hub.directory)
    assert [part.lease for part in log.contributions(1)] == [lease]
    log.close()
    assert "jumped" not in scene.hub.output(), "it is not the hub's clock"
