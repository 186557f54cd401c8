"""Tells of strangers' failures without letting them fill the log: once a source and reason, few in all."""

from __future__ import annotations

import logging

from barnraise.transport.addresses import source_of

_MOST = 64


class ThrottledLog:
    """One for each kind of failure."""

    def __init__(self, log: logging.Logger, words: str) -> None:
        self._log = log
        self._words = words
        self._said: set[tuple[str, str]] = set()

    def about(self, address: str, why: str) -> None:
        host = address.rpartition(":")[0].strip("[]")
        reason = why.removeprefix(f"{address}: ")
        said = (source_of(host), reason)
        if said in self._said or len(self._said) >= _MOST:
            return
        self._said.add(said)
        self._log.warning("%s %s: %s (said once for this source)", self._words, host, reason)
