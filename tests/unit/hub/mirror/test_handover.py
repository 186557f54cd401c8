"""Handovers expire, and the hub can withdraw them."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.core.errors import HubError
from barnraise.hub.mirror.handover import sign_handover, take_over, withdraw_handovers
from barnraise.hub.protocol.messages import RoundConfig
from barnraise.hub.storage.create import FOLLOWS, SUCCEEDS, WITHDRAWN, create_hub, hub_key
from barnraise.hub.storage.directory_lock import read_facts
from barnraise.hub.storage.log import HubLog, change
from barnraise.hub.storage.versions import replica_of
from barnraise.identity import NodeKey


class Pair:
    """A hub and its mirror, which copies the hub's facts when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.hub, self.mirror = folder / "hub", folder / "mirror"
        for directory in (self.hub, self.mirror):
            create_hub(directory, "fireside", NodeKey.generate().id, RoundConfig())
        self.follow()

    def follow(self) -> None:
        log = HubLog(self.hub)
        facts = replica_of(log, None).facts
        log.close()
        log = HubLog(self.mirror)
        log.transact([change(HubLog.set_fact, name, value) for name, value in facts.items()])
        log.transact([change(HubLog.set_fact, FOLLOWS, hub_key(self.hub).id.raw)])
        log.close()

    def word(self, time: int, expires: int) -> str:
        key = hub_key(self.hub)
        return sign_handover(key, key.id, hub_key(self.mirror).id, time, expires)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_handover_that_has_expired_is_refused(pair: Pair) -> None:
    with pytest.raises(HubError, match="has expired"):
        take_over(pair.mirror, pair.word(10, 100), 101.0)
    take_over(pair.mirror, pair.word(10, 100), 99.0)
    assert SUCCEEDS in read_facts(pair.mirror)


def test_handover_that_the_hub_withdrew_is_refused(pair: Pair) -> None:
    old, other = pair.word(10, 1000), NodeKey.generate().id
    withdraw_handovers(pair.hub, hub_key(pair.mirror).id, 50)
    withdraw_handovers(pair.hub, other, 60)
    pair.follow()
    assert WITHDRAWN in read_facts(pair.mirror)
    for word in (old, pair.word(50, 1000)):
        with pytest.raises(HubError, match="withdrawn"):
            take_over(pair.mirror, word, 70.0)
    take_over(pair.mirror, pair.word(55, 1000), 70.0)


def test_handover_with_another_expiry_is_refused(pair: Pair) -> None:
    """The expiry is part of what the hub signed."""
    key = hub_key(pair.mirror)
    forged = sign_handover(key, hub_key(pair.hub).id, key.id, 10, 10**9)
    with pytest.raises(HubError, match="neither the owner"):
        take_over(pair.mirror, forged, 99.0)
