"""Counter of the micro-batches that a machine got, among those of all. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class ShareCounter:
    """Part of one machine in the micro-batches since the counter was read."""

    def __init__(self) -> None:
        self._own = self._all = 0

    def add(self, machines: Sequence[str], own: str, counts: Sequence[int]) -> None:
        """Add a step: the machine and the micro-batches of each rank. ``own``: this machine."""
        if len(machines) != len(counts):
            return
        pairs = zip(machines, counts, strict=True)
        self._own += sum(count for machine, count in pairs if machine == own)
        self._all += sum(counts)

    def take(self) -> float | None:
        """Return the part, from 0 to 1, and start again; None if nothing was added."""
        own, total = self._own, self._all
        self._own = self._all = 0
        return own / total if total else None
