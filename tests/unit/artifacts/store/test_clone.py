"""Clones on real file systems: loop devices with btrfs and XFS, where root may mount them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.artifacts import ArtifactStore, FolderLimits, pack
from barnraise.artifacts.store.clone import Cloner

LIMITS = FolderLimits(most_bytes=1 << 30, most_files=1000)
SIZE = 32 << 20
MAKERS = {
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-m", "reflink=1"),
    "ext4": ("mkfs.ext4", "-q", "-F"),
}


@pytest.fixture(params=list(MAKERS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a new file system of 512 MiB."""
    maker = MAKERS[request.param]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    program = shutil.which(maker[0], path=path)
    if sys.platform != "linux" or os.geteuid() != 0 or program is None:
        pytest.skip(f"needs Linux, root and {maker[0]}")
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    place.mkdir()
    subprocess.run([program, *maker[1:], str(image)], check=True, timeout=60)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], timeout=60).returncode:
        pytest.skip(f"this system does not mount {request.param}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=60)


def used(place: Path) -> int:
    os.sync()
    facts = os.statvfs(place)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


@pytest.mark.timeout(120)
def test_runs_share_their_folder_with_the_store_where_the_disk_can(disk: Path) -> None:
    project = disk / "project"
    project.mkdir()
    data = random.Random(1).randbytes(SIZE)
    (project / "data.bin").write_bytes(data)
    store = ArtifactStore(disk / "store")
    packed = pack(project, store, LIMITS)
    before = used(disk)
    for name in ("one", "two"):
        store.unpack(packed.manifest, disk / name)
    added = used(disk) - before
    shares = Cloner().clone(project / "data.bin", disk / "clone", 0o600)
    assert added < SIZE // 2 if shares else added > SIZE
    (entry,) = packed.manifest.files
    with open(disk / "one" / "data.bin", "r+b") as file:
        file.write(b"the script writes here")
    assert store.object_path(entry.object).read_bytes() == data
    assert (disk / "two" / "data.bin").read_bytes() == data
    assert os.access(disk / "one" / "data.bin", os.W_OK)


@pytest.mark.timeout(120)
def test_data_sets_never_let_a_change_reach_other_runs(disk: Path) -> None:
    project = disk / "project"
    project.mkdir()
    (project / "data.bin").write_bytes(bytes(SIZE))
    store = ArtifactStore(disk / "store")
    packed = pack(project, store, LIMITS, everything=True)
    before = used(disk)
    folder = store.link_data(packed.manifest)
    assert used(disk) - before < SIZE // 2
    with open(folder / "data.bin", "r+b") as file:  # root may
        file.write(b"not the data")
    if store.missing(packed.manifest):
        pack(project, store, LIMITS, everything=True)
    assert (store.link_data(packed.manifest) / "data.bin").read_bytes() == bytes(SIZE)


def test_cloner_refuses_without_leaving_a_file(tmp_path: Path) -> None:
    cloner = Cloner()
    (tmp_path / "source").write_bytes(b"x" * 5000)
    if cloner.clone(tmp_path / "source", tmp_path / "target", 0o640):
        assert (tmp_path / "target").read_bytes() == b"x" * 5000
    else:
        assert os.listdir(tmp_path) == ["source"]
        assert not cloner.works
    fresh = Cloner()
    if fresh.works:
        with pytest.raises(FileNotFoundError):
            fresh.clone(tmp_path / "absent", tmp_path / "other", 0o640)
