"""Replay protection: a cache of nonces, and the newest request timestamp in the log.

The timestamp is stored with each log write. After a restart the hub rejects all requests that were signed
before it, even if its clock was set back.
"""

from __future__ import annotations

import msgspec

from barnraise.core.errors import HubRefused
from barnraise.core.flow.replay_cache import KeyCheck, ReplayCache
from barnraise.hub.protocol.signatures import SAME_VERSION_HINT, WINDOW_S, SignedMessage
from barnraise.hub.storage.log import Changes, HubLog, change, read_fact

_FACT = "signed"


class _Mark(msgspec.Struct, frozen=True):
    time: int


class LatestSigned:
    """The newest request timestamp, added to every log write."""

    def __init__(self) -> None:
        self.time = self._written = 0

    def note(self, created: int) -> None:
        """Remember the time of a verified request."""
        self.time = max(self.time, created)

    def restore(self, facts: dict[str, bytes]) -> None:
        """Load the timestamp from the log; it may be older than the newest request."""
        mark = read_fact(facts, _FACT, _Mark)
        self._written = 0 if mark is None else mark.time
        self.note(self._written)

    def changes(self) -> Changes:
        """Return the change to write; none if the log has the timestamp already."""
        if self.time <= self._written:
            return []
        self._written = self.time
        return [change(HubLog.set_fact, _FACT, _Mark(self.time))]


class NonceCache:
    """Nonces of the signature window, so that no signed request counts twice.

    Bounded: a full cache rejects requests. Above half of its capacity, each sender may only hold its share of
    the other half. So some senders at their full rate cannot take the space of the others. All senders that
    are not members share one place.

    Signatures from before ``began`` are rejected, because this process does not know the earlier nonces.
    """

    def __init__(self, began: float = 0.0, capacity: int = 1_000_000) -> None:
        self._began, self._capacity = int(began), capacity
        # A signature is valid for a window before and after its time, so for two windows in all.
        self._seen = ReplayCache[tuple[bytes, str]](capacity, ttl_s=2 * WINDOW_S, evict_when_full=False)

    def accept(
        self,
        signed: SignedMessage,
        clock: float,
        now: float,
        *,
        members: int = 0,
        is_member: bool = False,
    ) -> None:
        """Remember the nonce of a request. ``members``: the number of members that share the capacity.

        Raise HubRefused if the request is too old or too new by the wall ``clock``, or a replay.
        """
        if abs(clock - signed.created) > WINDOW_S or signed.created < self._began:
            raise HubRefused(
                401,
                "clock",
                f"the signature's time is {clock - signed.created:+.0f} s from the hub's clock",
                hint="Set this machine's clock, or add the difference to the time of the next signature.",
            )
        sender = signed.node.raw if is_member else b""
        count = self._seen.count_of(sender, now)
        if len(self._seen) >= self._capacity // 2 and count >= self._capacity // 2 // (members + 1):
            raise _busy()
        check = self._seen.add((signed.node.raw, signed.nonce), now, sender)
        if check is KeyCheck.REPLAY:
            raise HubRefused(401, "replay", "this request was received before", hint=SAME_VERSION_HINT)
        if check is KeyCheck.FULL:
            raise _busy()


def _busy() -> HubRefused:
    return HubRefused(429, "busy", "the hub is busy", hint="Try again in a minute.", retry_s=5.0)
