"""Bandwidth policy: caps, metered connections, quiet hours."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from barnraise.core.config import ContributorSettings
from barnraise.core.host.daily_hours import DailyHours
from barnraise.hub.client import bandwidth_policy
from barnraise.hub.client.bandwidth_policy import BandwidthPolicy
from barnraise.hub.protocol.invites import HubPlace, make_invite
from barnraise.hub.region.server import parent_client
from barnraise.identity.keys import NodeKey

NIGHT = DailyHours.parse("22:30-07:00", "contributing.quiet_hours")


def test_policy_without_limits_gives_no_reason_to_wait() -> None:
    now = datetime(2026, 1, 1, 3)
    assert BandwidthPolicy().reason_to_wait(now, metered=False) == ("", 0.0)
    assert BandwidthPolicy(metered="allow").reason_to_wait(now, metered=True) == ("", 0.0)
    assert "metered" in BandwidthPolicy().reason_to_wait(now, metered=True)[0]
    why, again_s = BandwidthPolicy(quiet=NIGHT).reason_to_wait(now, metered=False)
    assert "07:00" in why
    assert again_s == 60.0


def test_region_follows_bandwidth_policy_of_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    key = NodeKey.generate()
    place = HubPlace(("http://127.0.0.1:9",), key.id, pinned=True)
    invite, _ = make_invite(place, "fireside", role="region", uses=1, expires=9)
    waited: list[float] = []

    class Waited(Exception):
        pass

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        raise Waited

    monkeypatch.setattr(bandwidth_policy, "is_metered", lambda: True)
    client = parent_client(invite, key, ContributorSettings(uplink_mbps=0.8, metered="allow"))
    client.wait_for_policy()
    assert client.piece_bytes == 3_000_000
    monkeypatch.setattr(bandwidth_policy.PolicyGate.__init__, "__defaults__", (sleep, None))
    client = parent_client(invite, key, ContributorSettings())
    with pytest.raises(Waited):
        client.wait_for_policy()
    with pytest.raises(Waited):
        client.fetch("0" * 64, Path("blob"), size=1)
    assert len(waited) == 2
