"""File lock between processes."""

from __future__ import annotations

from pathlib import Path

from barnraise.core.file_lock import FileLock


def test_file_lock_has_one_holder(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    assert not second.acquire(0.05)
    first.release()
    assert second.acquire(0.05)
    second.release()
    second.release()
