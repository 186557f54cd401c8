"""Ledger of the leases on one worker's objects. Pure.

The owner of an object counts the references that each rank holds. An object is freed with its last lease.
"""

from __future__ import annotations


class LeaseLedger:
    """Counted leases by object and holder. A rank that is lost holds none, and gets none.

    Objects have serial numbers, which are never used again.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}
        self._lost: set[int] = set()

    def __contains__(self, serial: int) -> bool:
        return serial in self._counts

    def create(self, serial: int, holder: int) -> str | None:
        """Add an object with its first lease. Return the reason if that is refused."""
        if holder in self._lost:
            return f"rank {holder} is lost"
        self._counts[serial] = {holder: 1}
        return None

    def grant(self, serial: int, holder: int) -> str | None:
        """Give a rank one more lease on an object. Return the reason if that is refused."""
        counts = self._counts.get(serial)
        if counts is None:
            return "all references to the object are released"
        if holder in self._lost:
            return f"rank {holder} is lost"
        counts[holder] = counts.get(holder, 0) + 1
        return None

    def release(self, serial: int, holder: int) -> bool:
        """Take one lease of a rank back. Return True if the object has none left.

        A rank without a lease changes nothing.
        """
        counts = self._counts.get(serial)
        if counts is None or holder not in counts:
            return False
        counts[holder] -= 1
        if not counts[holder]:
            del counts[holder]
        return self._free_if_unused(serial)

    def lose(self, holder: int) -> list[int]:
        """Release all leases of a lost rank. Return the objects that have none left."""
        self._lost.add(holder)
        for counts in self._counts.values():
            counts.pop(holder, None)
        return [serial for serial in list(self._counts) if self._free_if_unused(serial)]

    def holds(self, serial: int, holder: int) -> bool:
        """Return True if a rank has a lease on an object."""
        return holder in self._counts.get(serial, {})

    def held_by(self, holder: int) -> int:
        """Return the number of leases of one rank."""
        return sum(counts.get(holder, 0) for counts in self._counts.values())

    @property
    def leases(self) -> int:
        """Return the number of leases of all ranks."""
        return sum(sum(counts.values()) for counts in self._counts.values())

    def _free_if_unused(self, serial: int) -> bool:
        if self._counts[serial]:
            return False
        del self._counts[serial]
        return True
