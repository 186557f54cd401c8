"""Artifact store on a real disk: resume, verification, unpacking and garbage collection."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from barnraise.artifacts import (
    PIECE,
    ArtifactStore,
    FileEntry,
    FolderLimits,
    FolderManifest,
    collect,
    find_garbage,
    pack,
    remove_garbage,
    stored_manifests,
)
from barnraise.artifacts.store.clone import Cloner
from barnraise.artifacts.store.linked_files import link_files, unlink_files
from barnraise.artifacts.store.manifest import make_manifest, piece_hash
from barnraise.core.errors import ShippingError

LIMITS = FolderLimits(most_bytes=1 << 30, most_files=1000)
not_root = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() == 0, reason="root may write everything")


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def entry_of(data: bytes, path: str = "f", *, executable: bool = False) -> FileEntry:
    pieces = tuple(piece_hash(data[start : start + PIECE]) for start in range(0, len(data), PIECE))
    return FileEntry(path, len(data), executable, pieces)


def fill(store: ArtifactStore, data: bytes, entry: FileEntry) -> None:
    for number in range(len(entry.pieces)):
        store.write_piece(entry, number, memoryview(data)[number * PIECE : (number + 1) * PIECE])


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_pieces_in_any_order_become_an_object(store: ArtifactStore) -> None:
    data = content(2 * PIECE + 100)
    entry = entry_of(data)
    manifest = FolderManifest((entry,))
    assert store.missing(manifest) == {entry.object: [0, 1, 2]}
    for number in (2, 0, 0, 1):
        assert store.read_piece(entry.object, 1) is None
        store.write_piece(entry, number, data[number * PIECE : (number + 1) * PIECE])
        assert store.read_piece(entry.object, number) == data[number * PIECE : (number + 1) * PIECE]
    assert store.missing(manifest) == {}
    path = store.object_path(entry.object)
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o400 or sys.platform == "win32"
    assert list(store.partial.iterdir()) == []
    assert store.read_piece(entry.object, 3) is None


def test_received_pieces_survive_restart_and_are_hashed_again(store: ArtifactStore) -> None:
    data = content(3 * PIECE)
    entry = entry_of(data)
    for number in (0, 2):
        store.write_piece(entry, number, data[number * PIECE : (number + 1) * PIECE])
    again = ArtifactStore(store.directory)
    assert again.missing(FolderManifest((entry,))) == {entry.object: [1]}
    assert again.read_piece(entry.object, 2) == data[2 * PIECE :]
    # A power cut may leave zeros where a piece was noted.
    with open(store.partial / entry.object.hex(), "r+b") as file:
        file.write(bytes(1000))
    third = ArtifactStore(store.directory)
    assert third.missing(FolderManifest((entry,))) == {entry.object: [0, 1]}
    assert third.read_piece(entry.object, 0) is None
    fill(third, data, entry)
    assert store.object_path(entry.object).read_bytes() == data


def test_killed_process_leaves_no_unverified_piece(tmp_path: Path) -> None:
    script = f"""
import sys, random
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.unit.artifacts.store.test_store import ArtifactStore, content, entry_of, PIECE
data = content(6 * PIECE)
entry = entry_of(data)
store = ArtifactStore(Path({str(tmp_path / "store")!r}))
for number in range(6):
    store.write_piece(entry, number, data[number * PIECE:(number + 1) * PIECE])
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path.cwd()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.kill()
    store = ArtifactStore(tmp_path / "store")
    data = content(6 * PIECE)
    entry = entry_of(data)
    missing = store.missing(FolderManifest((entry,))).get(entry.object, [])
    assert 0 not in missing
    fill(store, data, entry)
    assert store.object_path(entry.object).read_bytes() == data


@pytest.mark.parametrize("size", [100, 2 * PIECE])
def test_piece_with_wrong_bytes_is_rejected(store: ArtifactStore, size: int) -> None:
    data = content(size)
    entry = entry_of(data)
    for number, bad in (
        (0, bytes(min(size, PIECE))),
        (0, b""),
        (0, data + b"x"),
        (9, data[:PIECE]),
        (-1, data[:PIECE]),
    ):
        with pytest.raises(ShippingError):
            store.write_piece(entry, number, bad)
    assert list(store.objects.glob("??/*")) == []
    assert list(store.partial.iterdir()) == []


@pytest.mark.parametrize("size", [100, 2 * PIECE])
def test_full_disk_is_named(store: ArtifactStore, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(size)
    entry = entry_of(data)
    real = os.replace

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("barnraise.artifacts.store.disk.os.replace", full)
    with pytest.raises(ShippingError, match="is full") as caught:
        fill(store, data, entry)
    assert str(store.directory) in caught.value.message
    monkeypatch.setattr("barnraise.artifacts.store.disk.os.replace", real)
    fill(store, data, entry)
    again = ArtifactStore(store.directory)
    fill(again, data, entry)
    assert again.missing(FolderManifest((entry,))) == {}
    with pytest.raises(ShippingError, match="are to come"):
        store.check_room(1 << 60)


def test_many_threads_write_the_same_object(store: ArtifactStore) -> None:
    data = content(4 * PIECE)
    entry = entry_of(data)
    threads = [threading.Thread(target=fill, args=(store, data, entry)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.object_path(entry.object).read_bytes() == data
    assert list(store.partial.iterdir()) == []


def test_unpack_copies_files(store: ArtifactStore, tmp_path: Path) -> None:
    data, program = content(PIECE + 7), b"#!/bin/sh\n"
    entries = [entry_of(data, "d/e/big"), entry_of(program, "go.sh", executable=True), entry_of(b"", "empty")]
    for entry, bytes_of in zip(entries, (data, program, b""), strict=True):
        fill(store, bytes_of, entry)
    manifest = make_manifest(entries)
    target = tmp_path / "run"
    store.unpack(manifest, target)
    assert (target / "d/e/big").read_bytes() == data
    assert (target / "empty").read_bytes() == b""
    assert os.access(target / "go.sh", os.X_OK)
    (target / "d/e/big").write_bytes(b"the script writes here")
    assert store.object_path(entries[0].object).read_bytes() == data
    with pytest.raises(ShippingError, match="exists already"):
        store.unpack(manifest, target)
    assert (target / "go.sh").read_bytes() == program


def test_unpack_that_fails_leaves_nothing(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(100)
    good, bad = entry_of(data, "a"), entry_of(content(200, 2), "b")
    fill(store, data, good)
    target = tmp_path / "run"
    with pytest.raises(ShippingError, match="'b' is missing or damaged"):
        store.unpack(FolderManifest((good, bad)), target)
    assert not target.exists()
    # Damage on the disk is detected; the object is removed and counts as missing.
    path = store.object_path(good.object)
    os.chmod(path, 0o600)
    path.write_bytes(bytes(100))
    with pytest.raises(ShippingError, match="'a' is missing or damaged"):
        store.unpack(FolderManifest((good,)), target)
    assert store.missing(FolderManifest((good,))) == {good.object: [0]}
    fill(store, data, good)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("barnraise.artifacts.packing.unpack.write_all", full)
    with pytest.raises(ShippingError, match="is full"):
        store.unpack(FolderManifest((good,)), target)
    assert not target.exists()


@pytest.mark.parametrize("path", ["../out", "/tmp/out", "a/../../out", "con", "a\\b"])
def test_unpack_checks_names_itself(store: ArtifactStore, tmp_path: Path, path: str) -> None:
    data = content(10)
    entry = entry_of(data, path)
    fill(store, data, entry)
    for unpack in (
        lambda: store.unpack(FolderManifest((entry,)), tmp_path / "run"),
        lambda: store.link_data(FolderManifest((entry,))),
    ):
        with pytest.raises(ShippingError):
            unpack()
    assert not (tmp_path / "out").exists()
    assert list(store.data.iterdir()) == []


def test_link_data_links_once_for_all_runs(store: ArtifactStore, tmp_path: Path) -> None:
    big, program = content(PIECE + 1), b"#!/bin/sh\n"
    entries = [entry_of(big, "d/big"), entry_of(program, "go", executable=True), entry_of(b"", "empty")]
    for entry, data in zip(entries, (big, program, b""), strict=True):
        fill(store, data, entry)
    manifest = make_manifest(entries)
    folder = store.link_data(manifest)
    assert store.link_data(manifest) == folder
    assert (folder / "d" / "big").read_bytes() == big
    if sys.platform != "win32":
        if not Cloner().clone(store.object_path(entries[0].object), tmp_path / "clone", 0o600):
            assert os.path.samefile(folder / "d" / "big", store.object_path(entries[0].object))
        for path in (folder, *folder.rglob("*")):
            assert not path.stat().st_mode & 0o222, path
        assert (folder / "go").stat().st_mode & 0o100
    assert list(store.data.iterdir()) == [folder]


def test_link_data_copies_without_hard_links(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(100)
    entry = entry_of(data)
    fill(store, data, entry)

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("barnraise.artifacts.packing.unpack.os.link", no_links)
    assert (store.link_data(FolderManifest((entry,))) / "f").read_bytes() == data


@pytest.mark.parametrize("size", [100, PIECE + 7])
def test_content_changed_through_a_link_is_noticed_and_fetched_again(store: ArtifactStore, size: int) -> None:
    data = content(size)
    entry = entry_of(data)
    manifest = FolderManifest((entry,))
    fill(store, data, entry)
    folder = store.link_data(manifest)
    path = folder / "f"
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.write(b"not the data")
    assert (
        store.missing(manifest) == {entry.object: list(range(len(entry.pieces)))} or path.stat().st_nlink == 1
    )
    fill(store, data, entry)
    assert (store.link_data(manifest) / "f").read_bytes() == data
    assert store.object_path(entry.object).read_bytes() == data


def test_unchanged_content_is_hashed_once_after_its_time_was_changed(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(1000)
    entry = entry_of(data)
    fill(store, data, entry)
    os.utime(store.object_path(entry.object))
    assert store.holds(entry)
    monkeypatch.setattr("barnraise.artifacts.packing.unpack.piece_hash", lambda data: b"hashed")
    assert store.holds(entry)


def test_changed_content_is_packed_again(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    source = tmp_path / "folder" / "x"
    source.write_bytes(content(1000))
    os.utime(source, (1, 1))
    packed = pack(tmp_path / "folder", store, LIMITS)
    time.sleep(0.01)
    (entry,) = packed.manifest.files
    path = store.object_path(entry.object)
    os.chmod(path, 0o600)
    path.write_bytes(content(1000, 2))
    assert pack(tmp_path / "folder", store, LIMITS).id == packed.id
    assert path.read_bytes() == content(1000)


def test_collect_keeps_last_used(store: ArtifactStore, tmp_path: Path) -> None:
    packs = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "x").write_bytes(content(1000, number))
        (folder / "shared").write_bytes(content(50, 99))
        packs.append(pack(folder, store, LIMITS))
        store.link_data(packs[-1].manifest)
    fill(store, content(PIECE, 7), entry_of(content(PIECE, 7)))  # in no manifest
    half = entry_of(content(2 * PIECE, 8))
    store.write_piece(half, 0, content(2 * PIECE, 8)[:PIECE])
    assert collect(store, 0, set()).objects == 0  # all of it is new
    age(store, {packed.id: number for number, packed in enumerate(packs)})
    dropped = collect(store, 1100, {packs[0].id})
    assert dropped.objects == 2 + 1 + 1  # two contents, the unnamed one, and the half one
    assert store.missing(packs[0].manifest) == {}
    for dropped_pack in packs[1:]:
        assert store.manifest(dropped_pack.id) is None
        assert len(store.missing(dropped_pack.manifest)) == 1
    assert [path.name for path in store.data.iterdir()] == [packs[0].id.hex()]
    assert store.missing(FolderManifest((half,))) == {half.object: [0, 1]}


def test_garbage_that_is_used_again_stays(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_bytes(content(1000, 1))
    packed = pack(tmp_path / "folder", store, LIMITS)
    age(store, {packed.id: 1})
    garbage = find_garbage(store, 0, set())
    assert (len(garbage.manifests), garbage.bytes) == (1, 1000)
    assert store.missing(packed.manifest) == {}, "finding removes nothing"
    pack(tmp_path / "folder", store, LIMITS)
    assert remove_garbage(store, garbage).objects == 0
    assert store.missing(packed.manifest) == {}
    assert stored_manifests(store) == {packed.id}


def test_reading_manifest_counts_as_use(store: ArtifactStore, tmp_path: Path) -> None:
    packs = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "x").write_bytes(content(1000, number))
        packs.append(pack(tmp_path / str(number), store, LIMITS))
    age(store, {packs[0].id: 0, packs[1].id: 1})
    assert store.manifest(packs[0].id) == packs[0].manifest
    collect(store, 1000, set())
    assert store.manifest(packs[1].id) is None
    assert store.missing(packs[0].manifest) == {}


def age(store: ArtifactStore, order: dict[bytes, int]) -> None:
    long_ago = time.time() - 100_000
    for path in (*store.objects.glob("??/*"), *store.partial.iterdir(), *store.data.iterdir()):
        os.utime(path, (long_ago, long_ago))
    for name, place in order.items():
        os.utime(store.manifests / name.hex(), (long_ago + place, long_ago + place))


def test_damaged_manifest_counts_as_missing(store: ArtifactStore) -> None:
    name = store.put_manifest(FolderManifest((entry_of(b"x"),)))
    (store.manifests / name.hex()).write_bytes(b"junk")
    assert store.manifest(name) is None
    assert store.manifest(bytes(32)) is None


def test_take_back_keeps_contents_of_other_manifests(tmp_path: Path) -> None:
    """A manifest of another user may name contents that are still needed."""
    store = ArtifactStore(tmp_path / "store")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.py").write_text("print(1)")
    (tmp_path / "lent").mkdir()
    (tmp_path / "lent" / "train.py").write_text("print(1)")
    (tmp_path / "lent" / "other").write_text("a state")
    needed = link_files(tmp_path / "run", ["train.py"], store)
    lent = link_files(tmp_path / "lent", ["train.py", "other"], store)
    unlink_files(store, lent.id)
    assert store.manifest(lent.id) is None
    assert not store.missing(needed.manifest)
    assert store.missing(lent.manifest), "its own content is gone"
