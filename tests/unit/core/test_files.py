"""Atomic replacement and exclusive creation of files."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from barnraise.core import files
from barnraise.core.files import (
    create_atomically,
    create_file,
    discard,
    remove_tree,
    write_all,
    write_atomically,
)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_write_atomically_replaces_content_and_leaves_no_draft(
    tmp_path: Path, synced: bool, shared: bool
) -> None:
    path = tmp_path / "note"
    write_atomically(path, b"old", synced=synced, shared=shared)
    write_atomically(path, [b"ne", memoryview(b"w")], synced=synced, shared=shared)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["note"]


def test_write_atomically_when_replace_fails_keeps_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(draft: Path, path: Path) -> None:
        raise OSError("no space left")

    path = tmp_path / "note"
    write_atomically(path, b"old")
    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"new", shared=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["note"]


def test_write_atomically_shared_by_threads_leaves_one_whole_content(tmp_path: Path) -> None:
    path = tmp_path / "note"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [
        threading.Thread(target=write_atomically, args=(path, content), kwargs={"shared": True})
        for content in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["note"]


def test_create_atomically_of_existing_file_returns_false(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert create_atomically(path, b"first", 0o600)
    assert not create_atomically(path, b"second", 0o600)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["key"]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_create_file_that_exists_raises(tmp_path: Path) -> None:
    descriptor = create_file(tmp_path / "new", 0o600)
    write_all(descriptor, b"content")
    os.close(descriptor)
    assert (tmp_path / "new").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "new", 0o600)


def test_discard_and_remove_tree_of_read_only_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder" / "inner"
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        (folder / name).write_bytes(b"x")
        (folder / name).chmod(0o400)
    discard(folder / "one")
    discard(folder / "one")
    assert os.listdir(folder) == ["two"]
    folder.chmod(0o500)
    remove_tree(tmp_path / "folder")
    assert os.listdir(tmp_path) == []


def test_replace_waits_until_another_process_has_closed_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows rejects a replacement while another process reads one of the two files."""
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    Path(source).write_text("new")
    rename, rejected = os.replace, []

    def reject_twice(old: str, new: str) -> None:
        if len(rejected) < 2:
            rejected.append(old)
            raise PermissionError(13, "another process uses the file")
        rename(old, new)

    with monkeypatch.context() as windows:
        windows.setattr(os, "replace", reject_twice)
        windows.setattr(os, "name", "nt")
        files.replace(source, target)
    assert Path(target).read_text() == "new"
    assert len(rejected) == 2
