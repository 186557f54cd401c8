"""The audit log on disk."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from barnraise.core.logs.audit_log import AUDIT_LOG, OLDER_FILES, AuditLog, read_audit


def test_entries_survive_restarts_in_a_private_file(tmp_path: Path) -> None:
    """Tries a restart of the agent: what happened before must still be known."""
    for number in range(3):
        AuditLog(tmp_path, now=lambda number=number: float(number)).write("code-opened", detail=str(number))
    assert [entry.detail for entry in read_audit(tmp_path)] == ["0", "1", "2"]
    if sys.platform != "win32":
        assert (tmp_path / AUDIT_LOG).stat().st_mode & 0o777 == 0o600


def test_size_is_bounded_and_the_newest_entries_stay(tmp_path: Path) -> None:
    """Tries a machine that orders runs without end."""
    audit = AuditLog(tmp_path, max_bytes=2000)
    for number in range(500):
        audit.write("run-started", subject=f"run-{number}", digest="ab" * 32)
    sizes = [path.stat().st_size for path in tmp_path.glob(f"{AUDIT_LOG}*")]
    assert sum(sizes) < (OLDER_FILES + 1) * 2000 + 1000
    kept = [entry.subject for entry in read_audit(tmp_path)]
    assert kept == [f"run-{number}" for number in range(500 - len(kept), 500)]
    assert len(kept) > 30


def _write(directory: Path, word: str) -> None:
    audit = AuditLog(directory, max_bytes=20_000)
    for number in range(200):
        audit.write("invite-used", subject=f"{word}{number}")


def test_two_processes_lose_no_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(tmp_path, word)) for word in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    subjects = [entry.subject for entry in read_audit(tmp_path)]
    assert sorted(subjects) == sorted(f"{word}{number}" for word in "ab" for number in range(200))


def test_disk_that_rejects_an_entry_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / AUDIT_LOG).mkdir()
    audit = AuditLog(tmp_path)
    with caplog.at_level(logging.ERROR):
        audit.write("psk-made")
        audit.write("psk-made")
    assert len(caplog.records) == 1
    os.rmdir(tmp_path / AUDIT_LOG)
    audit.write("psk-made")
    assert len(read_audit(tmp_path)) == 1
