"""Files that are taken from a Hugging Face cache instead of being fetched, with real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barnraise.artifacts import PIECE, ArtifactStore, PackedFolder
from barnraise.artifacts.models import own_copies
from barnraise.artifacts.models.huggingface_cache import ModelReference, find_snapshot, snapshot_files
from barnraise.artifacts.models.own_copies import adopt_own_copies
from barnraise.artifacts.packing.pack import pack_files
from barnraise.artifacts.store.clone import Cloner
from barnraise.core.errors import RunError
from tests.unit.artifacts.models.caches import LIMITS, MODEL, blob, weights, write_cache

FILES = {"config.json": b"{}", "model.safetensors": weights(), "empty": b""}


@pytest.fixture
def packed(tmp_path: Path) -> PackedFolder:
    """Pack the model on the machine that starts the run."""
    write_cache(tmp_path / "starter", MODEL, FILES)
    _, folder = find_snapshot(tmp_path / "starter", ModelReference(MODEL))
    return pack_files(folder, snapshot_files(folder), ArtifactStore(tmp_path / "starter-store"), LIMITS)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def state(path: Path) -> tuple[int, ...]:
    """Return the facts that a write, a link or a change of mode would change."""
    facts = os.stat(path)
    return facts.st_mode, facts.st_ino, facts.st_nlink, facts.st_size, facts.st_mtime_ns


def test_same_files_under_any_name_are_taken_and_nothing_is_missing(
    packed: PackedFolder, store: ArtifactStore, tmp_path: Path
) -> None:
    write_cache(tmp_path / "own", "a/fork", {"other-name.safetensors": FILES["model.safetensors"]})
    write_cache(tmp_path / "own", "b/other", {"settings": b"{}"})
    adopted: list[bool] = []
    seen: list[tuple[int, int]] = []
    taken = adopt_own_copies(
        packed.manifest,
        store,
        tmp_path / "own",
        MODEL,
        on_compared=lambda done, size: seen.append((done, size)),
        on_adopted=lambda: adopted.append(True),
    )
    assert taken == packed.bytes
    assert store.missing(packed.manifest) == {}
    assert len(adopted) == 2
    assert seen[-1] == (packed.bytes, packed.bytes)
    assert seen == sorted(seen)
    assert list(store.partial.iterdir()) == []
    target = tmp_path / "out"
    store.unpack(packed.manifest, target)
    assert (target / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_own_cache_keeps_its_files_readable_and_unchanged(
    packed: PackedFolder, store: ArtifactStore, tmp_path: Path
) -> None:
    write_cache(tmp_path / "own", MODEL, FILES)
    source = blob(tmp_path / "own", MODEL, FILES["model.safetensors"])
    source.chmod(0o644)
    adopt_own_copies(packed.manifest, store, tmp_path / "own")
    assert source.read_bytes() == FILES["model.safetensors"]
    assert source.stat().st_mode & 0o444 == 0o444
    source.unlink()  # as `hf cache rm`
    assert store.missing(packed.manifest) == {}


@pytest.mark.parametrize("damage", ["first", "last", "size"])
def test_file_with_another_content_is_not_taken(
    damage: str, packed: PackedFolder, store: ArtifactStore, tmp_path: Path
) -> None:
    """The name of a blob proves nothing."""
    write_cache(tmp_path / "own", MODEL, FILES)
    source = blob(tmp_path / "own", MODEL, FILES["model.safetensors"])
    content = bytearray(FILES["model.safetensors"])
    if damage == "size":
        del content[-1]
    else:
        content[0 if damage == "first" else -1] ^= 1
    source.write_bytes(content)
    before = state(source)
    assert adopt_own_copies(packed.manifest, store, tmp_path / "own", MODEL) == len(FILES["config.json"])
    (entry,) = [entry for entry in packed.manifest.files if entry.path == "model.safetensors"]
    assert store.missing(packed.manifest) == {entry.object: [0, 1, 2]}
    assert state(source) == before
    assert list(store.partial.iterdir()) == []


def test_other_file_is_given_up_at_its_first_different_piece(
    packed: PackedFolder, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tmp_path / "own", "a/tune", {"model.safetensors": weights(seed=2)})
    hashed: list[int] = []
    real = own_copies.piece_hash
    monkeypatch.setattr(own_copies, "piece_hash", lambda data: (hashed.append(len(data)), real(data))[1])
    assert adopt_own_copies(packed.manifest, store, tmp_path / "own") == 0
    assert hashed == [PIECE]


@pytest.mark.parametrize("ways", ["copy", "link"])
def test_disk_without_clones_gets_links_or_copies(
    ways: str, packed: PackedFolder, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cloner, "clone", lambda *_: False)
    if ways == "copy":
        monkeypatch.setattr(
            "barnraise.artifacts.packing.share.os.link", lambda *_: (_ for _ in ()).throw(OSError(18, "x"))
        )
    write_cache(tmp_path / "own", MODEL, FILES)
    source = blob(tmp_path / "own", MODEL, FILES["model.safetensors"])
    before = state(source)
    assert adopt_own_copies(packed.manifest, store, tmp_path / "own") == packed.bytes
    (entry,) = [entry for entry in packed.manifest.files if entry.path == "model.safetensors"]
    assert os.path.samefile(source, store.object_path(entry.object)) == (ways == "link")
    if ways == "copy":
        assert state(source) == before


def test_known_hashes_save_reading_again(
    packed: PackedFolder, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "barnraise.artifacts.packing.share.os.link", lambda *_: (_ for _ in ()).throw(OSError(18, "x"))
    )
    monkeypatch.setattr("barnraise.artifacts.packing.hash_cache._SETTLED_NS", -1)
    write_cache(tmp_path / "own", "a/tune", {"model.safetensors": weights(seed=2)})
    write_cache(tmp_path / "own", MODEL, FILES)
    other = blob(tmp_path / "own", "a/tune", weights(seed=2))
    _, folder = find_snapshot(tmp_path / "own", ModelReference("a/tune"))
    pack_files(folder, snapshot_files(folder), store, LIMITS)  # its hashes are known from now on
    opened: list[str] = []
    real = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *a, **k: (opened.append(str(path)), real(path, *a, **k))[1]
    )
    adopt_own_copies(packed.manifest, store, tmp_path / "own", "a/tune")
    assert store.missing(packed.manifest) == {}
    assert str(other) not in opened


def test_cache_without_links_is_searched_too(
    packed: PackedFolder, store: ArtifactStore, tmp_path: Path
) -> None:
    """On Windows huggingface_hub often has no links: the files are in the snapshots."""
    snapshot = tmp_path / "own" / "models--x--y" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "w").write_bytes(FILES["model.safetensors"])
    assert adopt_own_copies(packed.manifest, store, tmp_path / "own") == len(FILES["model.safetensors"])


def test_stopped_search_leaves_no_draft(packed: PackedFolder, store: ArtifactStore, tmp_path: Path) -> None:
    write_cache(tmp_path / "own", MODEL, FILES)

    def stop(_done: int, _all: int) -> None:
        raise RunError("the run has ended")

    with pytest.raises(RunError, match="has ended"):
        adopt_own_copies(packed.manifest, store, tmp_path / "own", on_compared=stop)
    assert list(store.partial.iterdir()) == []
    assert adopt_own_copies(packed.manifest, store, tmp_path / "absent") == 0
