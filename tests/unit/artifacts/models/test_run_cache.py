"""The Hugging Face cache of a run, read by huggingface_hub itself where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from barnraise.agent_client.run_options import ModelVersion
from barnraise.artifacts import ArtifactStore, FolderManifest, pack
from barnraise.artifacts.models.run_cache import CachedModel, make_run_cache
from barnraise.artifacts.store.manifest import FileEntry
from barnraise.core.errors import ShippingError
from tests.unit.artifacts.models.caches import LIMITS, MODEL

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "copy.json": b"{}", "empty": b"", "sub/model.safetensors": b"w" * 1000}


def model(tmp_path: Path, revision: str = "main", commit: str = COMMIT, **files: bytes) -> CachedModel:
    """Return a model whose files are in a store, as an agent has it."""
    folder = tmp_path / f"folder-{commit[:4]}"
    for name, content in (files or FILES).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    store = ArtifactStore(tmp_path / "store")
    packed = pack(folder, store, LIMITS, everything=True)
    return CachedModel(
        ModelVersion(MODEL, revision, commit), packed.manifest, store.link_data(packed.manifest)
    )


def read(hub: Path) -> dict[str, bytes]:
    top = hub / "models--some-org--Some-Model.1B" / "snapshots" / COMMIT
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def refuse(*_: object, **__: object) -> None:
    raise OSError(1314, "A required privilege is not held by the client")


@pytest.mark.parametrize("refused", [(), ("symlink",), ("symlink", "link")])
def test_files_have_their_names_with_any_kind_of_links(
    refused: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = model(tmp_path)
    for name in refused:
        monkeypatch.setattr(f"barnraise.artifacts.models.run_cache.os.{name}", refuse)
    make_run_cache(tmp_path / "hub", [given])
    assert read(tmp_path / "hub") == FILES
    own = tmp_path / "hub" / "models--some-org--Some-Model.1B"
    weights = own / "snapshots" / COMMIT / "sub" / "model.safetensors"
    source = given.tree / "sub" / "model.safetensors"
    assert weights.is_symlink() == (not refused)
    assert os.path.samefile(weights, source) == (len(refused) < 2)
    assert (own / "refs" / "main").read_text() == COMMIT
    make_run_cache(tmp_path / "hub", [given])  # an agent that starts again
    assert read(tmp_path / "hub") == FILES


def test_huggingface_hub_finds_model_in_it(tmp_path: Path) -> None:
    library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    make_run_cache(tmp_path / "hub", [model(tmp_path, "v2")])
    load: Callable[..., object] = library.try_to_load_from_cache
    for revision in (None, "v2", COMMIT):  # an id alone means the version that was given
        path = load(MODEL, "sub/model.safetensors", cache_dir=tmp_path / "hub", revision=revision)
        assert isinstance(path, str)
        assert Path(path).read_bytes() == FILES["sub/model.safetensors"]
        folder = library.snapshot_download(
            MODEL, cache_dir=tmp_path / "hub", revision=revision, local_files_only=True
        )
        assert sorted(os.listdir(folder)) == ["config.json", "copy.json", "empty", "sub"]
    scanned = library.scan_cache_dir(tmp_path / "hub")
    assert [(repo.repo_id, repo.nb_files) for repo in scanned.repos] == [(MODEL, 4)] or scanned.warnings == []


def test_two_versions_of_a_model_have_their_own_names(tmp_path: Path) -> None:
    other = COMMIT.replace("0", "f")
    new = model(tmp_path, "v2", other, **{"config.json": b"new"})
    make_run_cache(tmp_path / "hub", [model(tmp_path), new, model(tmp_path)])
    own = tmp_path / "hub" / "models--some-org--Some-Model.1B"
    assert [(own / "refs" / name).read_text() for name in ("main", "v2")] == [COMMIT, other]
    assert (own / "snapshots" / other / "config.json").read_bytes() == b"new"
    assert read(tmp_path / "hub") == FILES


@pytest.mark.parametrize("path", ["../../refs/main", "/etc/passwd", "a/../../x", "con.json", "a\nb"])
def test_names_that_leave_the_folder_make_nothing(path: str, tmp_path: Path) -> None:
    manifest = FolderManifest((FileEntry(path, 0, False, ()),))
    with pytest.raises(ShippingError, match="cannot hold these names"):
        make_run_cache(
            tmp_path / "hub", [CachedModel(ModelVersion(MODEL, "main", COMMIT), manifest, tmp_path)]
        )
    assert list(tmp_path.iterdir()) == []


def test_models_whose_names_differ_only_in_case_make_nothing(tmp_path: Path) -> None:
    given = model(tmp_path)
    twin = given._replace(snapshot=ModelVersion(MODEL.lower(), "main", COMMIT))
    with pytest.raises(ShippingError, match="differ only in case"):
        make_run_cache(tmp_path / "hub", [given, twin])
    assert not (tmp_path / "hub").exists()
