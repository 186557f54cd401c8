"""Logs keep the last bytes within a bound, report lost bytes, and can be read during writes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.agent.supervisor.log_file import LogPart, LogWriter, read_log
from barnraise.agent.supervisor.log_pump import WorkerLog
from barnraise.agent.supervisor.messages import MAX_TAIL_BYTES, SupervisorNote
from tests.repository import ROOT


def _said(count: int, begin: int = 0) -> bytes:
    """Bytes that tell where they belong."""
    return bytes((begin + index) * 7 % 251 for index in range(count))


def _on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}.*"))


@settings(max_examples=80, deadline=None)
@given(
    max_bytes=st.integers(4, 200),
    writes=st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=25),
    offset=st.integers(-5, 3000),
    wanted=st.integers(0, 300),
)
def test_log_keeps_last_bytes_at_their_offsets(
    max_bytes: int, writes: list[tuple[int, bool]], offset: int, wanted: int
) -> None:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "rank-0.log")
        writer = LogWriter(path, max_bytes)
        total = 0
        for count, reopened in writes:
            writer.write(_said(count, total))
            total += count
            assert _on_disk(path) <= max_bytes
            if reopened:
                writer.close()
                writer = LogWriter(path, max_bytes)
                assert writer.end == total
        writer.close()
        kept = read_log(path, 0, 1 << 20)
        assert kept.data == _said(total - kept.start, kept.start)
        assert kept.end == total
        assert total - kept.start >= min(total, max_bytes - max_bytes // 4 - 3)
        part = read_log(path, offset, wanted)
        assert part.end == total
        if wanted == 0:
            assert part.data == b""
        elif offset >= total:
            assert part == LogPart(total, b"", total)
        else:
            assert part.start == max(offset, kept.start)
            assert part.data == _said(min(wanted, total - part.start), part.start)


@settings(max_examples=80, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=30),
    max_bytes=st.integers(8, 200),
)
def test_log_bytes_lost_to_full_disk_are_gap(writes: list[tuple[int, int]], max_bytes: int) -> None:
    """0: the disk is well; 1: it takes half and is full; 2: it takes nothing, or no file can be made."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "rank-0.log")
        now = 0.0
        writer = LogWriter(path, max_bytes, clock=lambda: now)
        written = b""
        for count, trouble in writes:
            now += 2.0
            data = _said(count, len(written))
            written += data
            with mock.patch(
                "os.write", _full_after(count // 2 if trouble == 1 else 0) if trouble else os.write
            ):
                if trouble:
                    with pytest.raises(OSError, match="full"):
                        writer.write(data)
                else:
                    writer.write(data)
            assert writer.end == len(written)
            assert _on_disk(path) <= max_bytes
        writer.close()
        offset = 0
        while True:
            part = read_log(path, offset, 1 << 20)
            assert part.data == written[part.start : part.start + len(part.data)]
            if not part.data:
                break
            offset = part.start + len(part.data)
        if writes and writes[-1][1] == 0:
            assert part.end == len(written)
            assert written.endswith(read_log(path, len(written) - 1, 10).data)


def _full_after(room: int):  # type: ignore[no-untyped-def]
    real, left = os.write, [room]

    def write(descriptor: int, data: memoryview) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "full")
        written = real(descriptor, data[: left[0]])
        left[0] -= written
        return written

    return write


def test_log_full_disk_is_retried_after_pause(tmp_path: Path) -> None:
    now = 0.0
    writer = LogWriter(tmp_path / "log", clock=lambda: now)
    with mock.patch("os.write", _full_after(0)), pytest.raises(OSError, match="full"):
        writer.write(b"lost")
    writer.write(b"also lost")
    assert list(tmp_path.iterdir()) == []
    now = 1.0
    writer.write(b"kept")
    assert read_log(tmp_path / "log", 0, 100) == LogPart(13, b"kept", 17)
    writer.close()


def test_read_log_missing_is_empty(tmp_path: Path) -> None:
    assert read_log(tmp_path / "no" / "log", 5, 10) == LogPart(0, b"", 0)


def test_segments_ignore_similar_file_names(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.log"
    for name in ("rank-1.log.5", f"rank-11.log.{0:020d}", f"rank-1.log.{'x' * 20}", f"rank-1.log.{'٣' * 20}"):
        (tmp_path / name).write_bytes(b"not ours")
    assert read_log(path, 0, 100) == LogPart(0, b"", 0)
    writer = LogWriter(path)
    writer.write(b"ours")
    writer.close()
    assert read_log(path, 0, 100).data == b"ours"
    assert len(list(tmp_path.iterdir())) == 5


def test_read_log_while_other_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    program = """
import sys
from pathlib import Path
from barnraise.agent.supervisor.log_file import LogWriter
writer = LogWriter(Path(sys.argv[1]), 40_000)
total = 0
pattern = bytes(index * 7 % 251 for index in range(251))
for size in [1, 17, 4096, 9999, 251] * 400:
    writer.write((pattern * (size // 251 + 2))[total % 251 :][:size])
    total += size
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", program, str(path)], env=environment) as writer:
        total = (1 + 17 + 4096 + 9999 + 251) * 400
        pattern = _said(251)
        offset = reads = 0
        deadline = time.monotonic() + 90
        while offset < total:
            assert time.monotonic() < deadline
            part = read_log(path, offset, 5000)
            assert part.start >= offset or part.data == b""
            begin = part.start % 251
            assert part.data == (pattern * (len(part.data) // 251 + 2))[begin:][: len(part.data)]
            offset = max(offset, part.start + len(part.data))
            reads += 1
        assert writer.wait(90) == 0
    assert reads > 5


def test_worker_log_failing_is_reported_once_and_keeps_tail(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes: list[SupervisorNote] = []
    log = WorkerLog(2, tmp_path / "file" / "rank-2.log", 1 << 20, notes.append)
    log.write(b"x" * 20_000)
    log.write(b"last")
    log.close()
    assert log.tail == b"x" * (MAX_TAIL_BYTES - 4) + b"last"
    (note,) = notes
    assert "cannot write the log of rank 2" in note.text
