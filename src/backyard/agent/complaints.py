"""Tells of strangers' failures without letting them fill the log: once a source, and never too many sources."""

from __future__ import annotations

import logging

from backyard.transport.addresses import source_of

_MOST_SOURCES = 64


class Complaints:
    """One for each kind of failure."""

    def __init__(self, log: logging.Logger, words: str) -> None:
        self._log = log
        self._words = words
        self._named: set[str] = set()

    def about(self, address: str, why: str) -> None:
        host = address.rpartition(":")[0].strip("[]")
        source = source_of(host)
        if source in self._named or len(self._named) >= _MOST_SOURCES:
            return
        self._named.add(source)
        self._log.warning("%s %s: %s (said once for this source)", self._words, host, why)
