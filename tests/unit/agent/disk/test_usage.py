"""Measured disk use on a real file system."""

from __future__ import annotations

import os
from pathlib import Path

from barnraise.agent.disk.usage import used_bytes

MIB = 1 << 20


def test_used_bytes_counts_a_file_with_two_names_once(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x").write_bytes(os.urandom(MIB))
    alone = used_bytes(tmp_path)
    os.link(tmp_path / "deep" / "er" / "x", tmp_path / "y")
    assert MIB <= used_bytes(tmp_path) < alone + MIB // 2


def test_used_bytes_leaves_out_what_was_counted_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "x").write_bytes(os.urandom(MIB))
    os.link(tmp_path / "a" / "x", tmp_path / "b" / "x")
    counted: set[tuple[int, int]] = set()
    assert used_bytes(tmp_path / "a", counted) >= MIB
    assert used_bytes(tmp_path / "b", counted) < MIB // 2


def test_used_bytes_does_not_follow_links_and_accepts_absent_folders(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(MIB))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "big")
    assert used_bytes(tmp_path / "folder") < MIB // 2
    assert used_bytes(tmp_path / "absent") == 0
