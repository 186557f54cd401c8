"""When the latest request was signed that changed anything: whatever the log is told, it is told this, too.

A hub that begins again takes nothing that was signed before, whatever its clock says by then.
"""

from __future__ import annotations

import msgspec

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.signatures import SAME_VERSION_HINT, WINDOW_S, SignedMessage
from barnraise.hub.storage.log import Changes, HubLog, change, read_fact

_FACT = "signed"


class _Mark(msgspec.Struct, frozen=True):
    time: int


class LatestSigned:
    """When the latest request was signed that was heard; a part of whatever the log is told."""

    def __init__(self) -> None:
        self.time = self._written = 0

    def note(self, created: int) -> None:
        self.time = max(self.time, created)

    def recall(self, facts: dict[str, bytes]) -> None:
        """As the log has it, which may be less than what was heard."""
        mark = read_fact(facts, _FACT, _Mark)
        self._written = 0 if mark is None else mark.time
        self.note(self._written)

    def changes(self) -> Changes:
        """Nothing if the log knows it already."""
        if self.time <= self._written:
            return []
        self._written = self.time
        return [change(HubLog.set_fact, _FACT, _Mark(self.time))]


class NonceCache:
    """Those of the window, so that nothing signed counts twice. Holds so many at most; then it refuses.

    What was signed before ``began`` is too old: this process does not know what was heard before it.
    """

    def __init__(self, began: float = 0.0, most: int = 1_000_000) -> None:
        self._seen: dict[tuple[bytes, str], float] = {}  # in the order of their time
        self._began, self._most = int(began), most

    def take(self, signed: SignedMessage, clock: float, now: float) -> None:
        """HubRefused if it is too old or too new by the wall ``clock``, or was here before."""
        if abs(clock - signed.created) > WINDOW_S or signed.created < self._began:
            raise HubRefused(
                401,
                "clock",
                f"the signature's time is {clock - signed.created:+.0f} s from the hub's clock",
                hint="Set this machine's clock, or add the difference to the time of the next signature.",
            )
        while self._seen:
            oldest = next(iter(self._seen))
            if now - self._seen[oldest] <= 2 * WINDOW_S:
                break
            del self._seen[oldest]
        key = (signed.node.raw, signed.nonce)
        if key in self._seen:
            raise HubRefused(401, "replay", "this very request was here before", hint=SAME_VERSION_HINT)
        if len(self._seen) >= self._most:
            raise HubRefused(429, "busy", "the hub has too much to do", hint="Try again in a minute.")
        self._seen[key] = now
