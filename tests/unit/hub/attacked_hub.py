"""A hub process with an owner and an honest member, for tests that attack it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from barnraise.hub.protocol.messages import HubDataOrder
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess

COURSE = HubDataOrder(samples=1_000_000, batch=10)


class AttackedHub:
    """Hub process with an owner and an honest member."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        terms = msgspec.structs.replace(TERMS, round_s=0.5, codec="fp32", stale_limit=1, slack_s=0.5)
        self.hub = HubProcess(folder / "hub", terms)
        self.hub.start()
        self.friends: list[Friend] = []
        invite = self.hub.invite()
        self.owner = Friend(self.hub.address, invite.hub_id, self.hub.owner)
        self.friends.append(self.owner)
        torch.manual_seed(0)
        self.owner.push_base(torch.randn(LAYOUT.numel), COURSE)
        self.ann = self.member("ann")

    def member(self, name: str) -> Friend:
        invite = self.hub.invite()
        friend = Friend(self.hub.address, invite.hub_id)
        friend.join(invite, name)
        friend.pull(self.folder)
        self.friends.append(friend)
        return friend

    def round(self) -> None:
        """Run one honest round of the member ann."""
        self.ann.pull(self.folder, wait=0)
        self.ann.push(self.ann.lease(), torch.randn(LAYOUT.numel) * 0.01)
        self.ann.pull(self.folder)
