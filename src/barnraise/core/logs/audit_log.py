"""Audit log of a machine: ``audit.log`` in the state directory, appended, rotated and never rewritten.

The agent, a hub and commands write to it. It is a record for the machine's user, not a proof: programs of
that user can change it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from barnraise.core.file_lock import FileLock
from barnraise.core.logs.audit_entry import AuditEntry, AuditEvent, decode_lines, encode_line, make_entry
from barnraise.core.logs.rotation import open_private, rotate, rotated

AUDIT_LOG = "audit.log"
OLDER_FILES = 3
MAX_BYTES = 4 * 1024 * 1024  # of each file
_BINARY: int = getattr(os, "O_BINARY", 0)

_log = logging.getLogger(__name__)


class AuditLog:
    """Writer of the audit log. Several processes may write at once."""

    def __init__(
        self, directory: Path, *, now: Callable[[], float] = time.time, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path = directory / AUDIT_LOG
        self._lock = FileLock(directory / f"{AUDIT_LOG}.lock")
        self._now = now
        self._max_bytes = max_bytes
        self._is_broken = False

    def write(
        self, event: AuditEvent, *, subject: str = "", by: str = "", detail: str = "", digest: str = ""
    ) -> None:
        """Append an entry to the log. A disk that rejects it stops nothing else; that is logged once."""
        entry = make_entry(self._now(), event, subject=subject, by=by, detail=detail, digest=digest)
        try:
            self._rotate()
            descriptor = open_private(str(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY)
            try:
                # One call: lines of two processes do not mix.
                os.write(descriptor, encode_line(entry))
            finally:
                os.close(descriptor)
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                _log.error("cannot write to %s: %s", self._path, error)
            self._is_broken = True

    def _rotate(self) -> None:
        """Rotate a full file, unless another process does so now."""
        if not self._path.exists() or self._path.stat().st_size < self._max_bytes:
            return
        if self._lock.try_acquire():
            try:
                rotate(self._path, self._max_bytes, OLDER_FILES)
            finally:
                self._lock.release()


def read_audit(directory: Path) -> list[AuditEntry]:
    """Return all entries of a machine that are kept, the oldest first."""
    entries: list[AuditEntry] = []
    for path in rotated(directory / AUDIT_LOG, OLDER_FILES):
        try:
            entries += decode_lines(path.read_bytes())
        except FileNotFoundError:  # rotated meanwhile
            continue
    return entries
