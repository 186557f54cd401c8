"""Rotation of log files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from barnraise.core.logs import rotation
from barnraise.core.logs.rotation import open_output, rotate, rotate_output, rotated


def test_full_file_becomes_the_first_of_the_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for number in range(5):
        rotate(path, 4, 2)
        path.write_text(f"{number:04}")
    assert [each.read_text() for each in rotated(path, 2)] == ["0002", "0003", "0004"]
    assert sorted(os.listdir(tmp_path)) == ["a.log", "a.log.1", "a.log.2"]


def test_file_with_room_stays(tmp_path: Path) -> None:
    rotate(tmp_path / "none.log", 4, 2)
    (tmp_path / "a.log").write_text("abc")
    rotate(tmp_path / "a.log", 4, 2)
    assert rotated(tmp_path / "a.log", 2) == [tmp_path / "a.log"]


def test_output_of_an_earlier_process_is_kept(tmp_path: Path) -> None:
    """Tries a second start: the log of the first one must still be there."""
    for text in (b"first\n", b"second\n"):
        with open_output(tmp_path / "agent.log") as log:
            log.write(text)
    assert (tmp_path / "agent.log").read_bytes() == b"first\nsecond\n"
    if sys.platform != "win32":
        assert (tmp_path / "agent.log").stat().st_mode & 0o077 == 0


def test_output_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("")
    try:
        (tmp_path / "agent.log").symlink_to(tmp_path / "target")
    except OSError:
        pytest.skip("no links for this user")
    if not hasattr(os, "O_NOFOLLOW"):
        pytest.skip("the system has no such flag")
    with pytest.raises(OSError, match=r"symbolic|Too many"):
        open_output(tmp_path / "agent.log")


def test_output_of_a_running_process_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_OUTPUT_BYTES", 8)
    path = tmp_path / "agent.log"
    with open_output(path) as log:
        for word in (b"aaaa", b"bbbb", b"cccc", b"dddd", b"eeee", b"ffff", b"gggg"):
            log.write(word)
            log.flush()
            rotate_output(log.fileno(), path)
    assert [each.read_bytes() for each in rotated(path, 2)] == [b"ccccdddd", b"eeeeffff", b"gggg"]


def test_output_that_goes_elsewhere_is_not_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_OUTPUT_BYTES", 1)
    (tmp_path / "agent.log").write_text("of another process")
    with open(tmp_path / "terminal", "wb") as other:
        assert not rotate_output(other.fileno(), tmp_path / "agent.log")
        assert not rotate_output(other.fileno(), tmp_path / "missing")
    assert (tmp_path / "agent.log").read_text() == "of another process"
