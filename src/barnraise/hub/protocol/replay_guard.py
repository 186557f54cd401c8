"""When the latest request was signed that changed anything: whatever the log is told, it is told this, too.

A hub that begins again takes nothing that was signed before, whatever its clock says by then.
"""

from __future__ import annotations

import msgspec

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
