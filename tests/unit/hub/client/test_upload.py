"""Upload on a slow line: pieces shrink until one gets through."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from barnraise.core.errors import HubAway, HubError, HubRefused
from barnraise.core.flow.retry import ReportedBackoff
from barnraise.core.flow.uplink_limiter import UplinkLimiter
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.upload import push
from barnraise.hub.protocol.messages import PIECE_BYTES, HubProgress, UpdateDeclaration
from barnraise.identity.keys import NodeKey

SIZE = 3 * PIECE_BYTES


class SlowLine(HubClient):
    """Transport that drops requests with more than ``max_bytes`` bytes."""

    def __init__(self, max_bytes: int, why: HubError, pace: UplinkLimiter) -> None:
        key = NodeKey.generate()
        super().__init__(["http://hub.test"], key.id, key, pace=pace)
        self.max_bytes, self.why = max_bytes, why
        self.arrived = bytearray()
        self.pieces: list[int] = []
        self.comes_back_after = SIZE

    def waiting(self, peer: str = "") -> ReportedBackoff:
        return ReportedBackoff(peer, lambda _: None, lambda _: None)

    def ask(self, method: str, path: str, kind: object, body: object = b"", **more: object) -> HubProgress:  # type: ignore[override]
        if isinstance(body, bytes):
            self.pieces.append(len(body))
            assert len(self.pieces) < 2000
            if len(self.pieces) > self.comes_back_after:
                self.max_bytes = SIZE
            if len(body) > self.max_bytes:
                raise self.why
            self.arrived += body
        done = len(self.arrived) == SIZE
        return HubProgress(id="ab" * 16, offset=len(self.arrived), size=SIZE, accepted=done)


def _away(why: httpx.TransportError) -> HubAway:
    error = HubAway("the hub does not answer in time")
    error.__cause__ = why
    return error


@pytest.mark.parametrize(
    "why", [HubRefused(408, "slow", "the body took too long"), _away(httpx.WriteTimeout("slow"))]
)
def test_piece_too_large_for_line_is_halved(tmp_path: Path, why: HubError) -> None:
    line = SlowLine(100_000, why, UplinkLimiter(0.0))
    assert _pushed(tmp_path, line).accepted
    assert line.pieces == [1 << 20, 1 << 19, 1 << 18, 1 << 17] + [1 << 16] * (SIZE >> 16)


def test_unreachable_hub_does_not_shrink_pieces(tmp_path: Path) -> None:
    line = SlowLine(0, _away(httpx.ConnectError("refused")), UplinkLimiter(0.0))
    line.comes_back_after = 3
    assert _pushed(tmp_path, line).accepted
    assert set(line.pieces) == {PIECE_BYTES}


def test_capped_line_starts_with_smaller_pieces(tmp_path: Path) -> None:
    line = SlowLine(60_000, HubAway("never"), UplinkLimiter(2000.0))
    assert _pushed(tmp_path, line).accepted
    assert max(line.pieces) == 60_000


def test_upload_checks_policy_again_after_waiting(tmp_path: Path) -> None:
    """Quiet hours may have started by then, or the connection may have changed."""
    line = SlowLine(0, _away(httpx.ConnectError("refused")), UplinkLimiter(0.0))
    line.comes_back_after = 3
    piece_counts: list[int] = []
    line.wait_for_policy = lambda: piece_counts.append(len(line.pieces))
    assert _pushed(tmp_path, line).accepted
    assert piece_counts[:5] == [0, 1, 2, 3, 4]


def _pushed(folder: Path, line: SlowLine) -> HubProgress:
    data = bytes(SIZE)
    path = folder / "update"
    path.write_bytes(data)
    declaration = UpdateDeclaration(sha256=hashlib.sha256(data).hexdigest(), size=SIZE, lease="0" * 32)
    progress = push(line, declaration, path)
    assert line.arrived == data
    return progress
