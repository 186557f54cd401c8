"""Models that share their space with the store, on real file systems."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from barnraise.artifacts import ArtifactStore
from barnraise.artifacts.models.huggingface_cache import ModelReference, find_snapshot, snapshot_files
from barnraise.artifacts.models.own_copies import adopt_own_copies
from barnraise.artifacts.packing.ignore_rules import walk
from barnraise.artifacts.packing.pack import pack_files
from barnraise.artifacts.packing.share import Sharing, share
from barnraise.artifacts.store.clone import Cloner
from tests.unit.artifacts.models.caches import LIMITS, MODEL, blob, weights, write_cache
from tests.unit.artifacts.store.test_clone import disk, used

__all__ = ["disk"]
CONTENT = weights(pieces=8)


@pytest.mark.timeout(120)
def test_model_of_a_cache_takes_no_space_in_the_stores_of_its_disk(disk: Path) -> None:
    write_cache(disk / "cache", MODEL, {"model.safetensors": CONTENT})
    starter, other = ArtifactStore(disk / "store"), ArtifactStore(disk / "other")
    before = used(disk)
    _, folder = find_snapshot(disk / "cache", ModelReference(MODEL))
    sharing = Sharing(Cloner(), links=True)
    packed = pack_files(folder, snapshot_files(folder), starter, LIMITS, sharing)
    assert adopt_own_copies(packed.manifest, other, disk / "cache") == len(CONTENT)
    trees = [store.link_data(packed.manifest) for store in (starter, other)]
    assert used(disk) - before < len(CONTENT) // 4
    assert [(tree / "model.safetensors").read_bytes() for tree in trees] == [CONTENT, CONTENT]
    blob(disk / "cache", MODEL, CONTENT).unlink()
    assert starter.missing(packed.manifest) == other.missing(packed.manifest) == {}


@pytest.mark.timeout(120)
def test_folder_of_the_user_stays_as_it_is_and_may_change(disk: Path) -> None:
    folder = disk / "llama"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(CONTENT)
    before = file.stat()
    store = ArtifactStore(disk / "store")
    packed = pack_files(folder, walk(folder, everything=True), store, LIMITS, Sharing(Cloner(), links=False))
    after = file.stat()
    assert (before.st_mode, before.st_mtime_ns, before.st_nlink) == (
        after.st_mode,
        after.st_mtime_ns,
        after.st_nlink,
    )
    file.write_bytes(b"trained further")
    assert (store.link_data(packed.manifest) / "model.safetensors").read_bytes() == CONTENT


@pytest.mark.skipif(sys.platform == "win32", reason="Windows never links")
def test_linked_file_keeps_its_readers_and_file_of_another_user_is_not_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cloner, "clone", lambda *_: False)
    file = tmp_path / "blob"
    file.write_bytes(CONTENT)
    file.chmod(0o664)
    store = ArtifactStore(tmp_path / "store")
    sharing = Sharing(Cloner(), links=True)
    draft = share(str(file), file.stat(), store, sharing)
    assert draft is not None
    draft.adopt(store, bytes(32))
    assert file.stat().st_mode & 0o777 == 0o444
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert share(str(file), file.stat(), store, sharing) is None
    assert list(store.partial.iterdir()) == []
