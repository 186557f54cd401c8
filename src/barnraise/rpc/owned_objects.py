"""Objects of this worker to which references exist, on any worker."""

from __future__ import annotations

import threading
from typing import Any

from barnraise.rpc.lease_ledger import LeaseLedger


class OwnedObjects:
    """Objects by serial number, each kept alive by its leases. Thread-safe.

    Objects are dropped outside of the lock, because a destructor may run any code.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledger = LeaseLedger()
        self._values: dict[int, Any] = {}
        self._next_serial = 0

    def keep(self, value: Any, holder: int) -> int | None:
        """Keep an object for a rank. Return its serial number, or None if the rank is lost."""
        with self._lock:
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            if self._ledger.create(serial, holder) is not None:
                return None
            self._values[serial] = value
            return serial

    def lend(self, serial: int, holder: int) -> str | None:
        """Give a rank one more lease. Return the reason if that is refused."""
        with self._lock:
            return self._ledger.grant(serial, holder)

    def release(self, serial: int, holder: int) -> None:
        """Take one lease of a rank back, and drop the object with its last one."""
        with self._lock:
            value = self._values.pop(serial, None) if self._ledger.release(serial, holder) else None
        del value

    def lose(self, rank: int) -> None:
        """Release all leases of a lost rank."""
        with self._lock:
            values = [self._values.pop(serial, None) for serial in self._ledger.lose(rank)]
        values.clear()

    def holds(self, serial: int, holder: int) -> bool:
        """Return True if a rank has a lease on an object."""
        with self._lock:
            return self._ledger.holds(serial, holder)

    def get(self, serial: int, holder: int) -> Any:
        """Return an object to a holder. Raise LookupError if the rank has no lease on it."""
        with self._lock:
            if not self._ledger.holds(serial, holder):
                raise LookupError(f"rank {holder} holds no reference to this object")
            return self._values[serial]

    def counts(self, own_rank: int) -> tuple[int, int]:
        """Return the number of objects, and of the leases that other ranks have on them."""
        with self._lock:
            return len(self._values), self._ledger.leases - self._ledger.held_by(own_rank)

    def clear(self) -> None:
        """Drop all objects and leases."""
        with self._lock:
            values, self._values, self._ledger = self._values, {}, LeaseLedger()
        values.clear()
