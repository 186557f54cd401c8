"""Log throttle for failures of unknown peers, so that they cannot fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from barnraise.transport.addresses import source_of

LOG_PERIOD_S = 3600.0
_MAX_LINES = 64


# Not core.flow.rate_limit: a line appears once per source and reason in each hour.
class ThrottledLog:
    """Log that writes each reason once per source address, and at most 64 lines, in each hour."""

    def __init__(self, log: logging.Logger, words: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._words = words
        self._now = now
        self._since = now()
        self._logged: set[tuple[str, str]] = set()

    def about(self, address: str, why: str) -> None:
        """Log the failure of a peer at this address, unless it was logged in this hour."""
        if self._now() - self._since >= LOG_PERIOD_S:
            self._logged.clear()
            self._since = self._now()
        host = address.rpartition(":")[0].strip("[]")
        reason = why.removeprefix(f"{address}: ")
        line = (source_of(host), reason)
        if line in self._logged or len(self._logged) >= _MAX_LINES:
            return
        self._logged.add(line)
        self._log.warning("%s %s: %s (logged once an hour for this source)", self._words, host, reason)
