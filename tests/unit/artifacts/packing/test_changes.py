"""The folder of a run that has ended keeps what the script wrote, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barnraise.artifacts import ArtifactStore, FolderLimits, drop_unchanged, pack

LIMITS = FolderLimits(most_bytes=1 << 30, most_files=1000)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_drop_unchanged_keeps_what_the_script_wrote(store: ArtifactStore, tmp_path: Path) -> None:
    project, folder = tmp_path / "project", tmp_path / "run"
    (project / "deep").mkdir(parents=True)
    for name in ("same", "deep/same", "changed", "removed"):
        (project / name).write_bytes(name.encode() * 100)
    packed = pack(project, store, LIMITS)
    store.unpack(packed.manifest, folder)
    (folder / "changed").write_bytes(b"CHANGED" * 100)
    (folder / "removed").unlink()
    (folder / "new").write_bytes(b"new")
    freed = drop_unchanged(packed.manifest, folder, store.holds)
    assert freed == len(b"same" * 100) + len(b"deep/same" * 100)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["changed", "new"]
    assert store.missing(packed.manifest) == {}


def test_drop_unchanged_removes_nothing_that_the_store_lacks(store: ArtifactStore, tmp_path: Path) -> None:
    project, folder = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    (project / "x").write_bytes(b"x" * 100)
    packed = pack(project, store, LIMITS)
    store.unpack(packed.manifest, folder)
    assert drop_unchanged(packed.manifest, folder, lambda entry: False) == 0
    assert (folder / "x").exists()


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_drop_unchanged_never_removes_through_a_link(store: ArtifactStore, tmp_path: Path) -> None:
    project, folder = tmp_path / "project", tmp_path / "run"
    (project / "deep").mkdir(parents=True)
    (project / "deep" / "x").write_bytes(b"x" * 100)
    packed = pack(project, store, LIMITS)
    store.unpack(packed.manifest, folder)
    (folder / "deep" / "x").unlink()
    (folder / "deep").rmdir()
    (folder / "deep").symlink_to(project / "deep")
    assert drop_unchanged(packed.manifest, folder, store.holds) == 0
    assert (project / "deep" / "x").exists()
