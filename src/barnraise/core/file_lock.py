"""File lock between processes, which the system releases when its holder dies."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_POLL_S = 0.02


class FileLock:
    """Exclusive lock on a file. The file stays and means nothing by itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock and return True, or return False if another process holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def acquire(self, timeout_s: float) -> bool:
        """Acquire the lock within ``timeout_s`` and return True, or return False."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        """Release the lock if this object holds it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
