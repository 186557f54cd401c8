"""Models as they are typed: folders and ids, packed into a real store, and what a person is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barnraise.artifacts import ArtifactStore
from barnraise.cli.runs.data_sets import read_data_set, read_models
from barnraise.core.config import RunSettings, Settings
from barnraise.core.errors import RunError, ShippingError
from tests.unit.artifacts.models.caches import MODEL, blob, weights, write_cache

WEIGHTS = weights()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(runs=RunSettings(huggingface_cache=str(tmp_path / "cache")))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def paths(store: ArtifactStore, name: bytes) -> list[str]:
    manifest = store.manifest(name)
    assert manifest is not None
    assert store.missing(manifest) == {}
    return [entry.path for entry in manifest.files]


def test_folder_is_packed_and_pickles_are_pointed_out(
    store: ArtifactStore, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(WEIGHTS)
    before = os.stat(folder / "pytorch_model.bin")
    (model,) = read_models([f"base={folder}"], store, settings)
    assert paths(store, model.manifest) == ["config.json", "pytorch_model.bin"]
    assert (model.is_model, model.version, model.files) == (True, None, 2)
    assert model.variable == "BARNRAISE_MODEL_BASE"
    assert "pytorch_model.bin may be pickles" in capsys.readouterr().err
    after = os.stat(folder / "pytorch_model.bin")
    # A folder may change, so it is never linked.
    assert (after.st_mode, after.st_nlink, after.st_mtime_ns) == (
        before.st_mode,
        before.st_nlink,
        before.st_mtime_ns,
    )


def test_id_is_packed_without_pickles_that_safetensors_replace(
    store: ArtifactStore, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"model.safetensors": WEIGHTS, "pytorch_model.bin": b"p", "original/all.pth": b"q"}
    commit = write_cache(tmp_path / "cache", MODEL, files)
    (model,) = read_models([f"base={MODEL}"], store, settings)
    assert paths(store, model.manifest) == ["model.safetensors"]
    assert model.version is not None
    assert (model.version.repository, model.version.revision, model.version.commit) == (MODEL, "main", commit)
    shown = capsys.readouterr().err
    assert "not sent, as there are safetensors: original/all.pth, pytorch_model.bin (2 B)" in shown
    assert "may be pickles" not in shown


def test_id_is_not_hashed_again_although_the_store_shares_its_files(
    store: ArtifactStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.artifacts.packing.hash_cache._SETTLED_NS", -1)  # it is old
    write_cache(tmp_path / "cache", MODEL, {"model.safetensors": WEIGHTS})
    (first,) = read_models([f"base={MODEL}"], store, settings)

    def fail(*_: object) -> None:
        raise AssertionError("it is hashed again")

    monkeypatch.setattr("barnraise.artifacts.packing.pack._hash_and_keep", fail)
    monkeypatch.setattr("barnraise.artifacts.packing.pack.hash_pieces", fail)
    assert read_models([f"base={MODEL}"], store, settings) == [first]


def test_file_that_was_written_through_its_link_is_hashed_again(
    store: ArtifactStore, settings: Settings, tmp_path: Path
) -> None:
    write_cache(tmp_path / "cache", MODEL, {"model.safetensors": WEIGHTS})
    (first,) = read_models([f"base={MODEL}"], store, settings)
    source = blob(tmp_path / "cache", MODEL, WEIGHTS)
    source.chmod(0o600)
    with source.open("r+b") as file:
        file.write(b"changed")
    (second,) = read_models([f"base={MODEL}"], store, settings)
    assert second.manifest != first.manifest
    assert paths(store, second.manifest) == ["model.safetensors"]


def test_folder_of_this_name_wins_over_an_id(
    store: ArtifactStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MODEL).mkdir(parents=True)
    (tmp_path / MODEL / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    (model,) = read_models([f"base={MODEL}"], store, settings)
    assert model.version is None
    assert paths(store, model.manifest) == ["config.json"]


def test_own_copy_of_each_machine_sends_nothing(store: ArtifactStore, settings: Settings) -> None:
    (model,) = read_models(["base=@/srv/llama"], store, settings)
    assert (model.path, model.manifest, model.is_model) == ("/srv/llama", b"", True)
    data = read_data_set("base=@/srv/data", store, settings)
    assert (data.path, data.is_model, data.variable) == ("/srv/data", False, "BARNRAISE_DATA_BASE")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["base"], "is not NAME=PATH|ID"),
        (["b/c=./x"], "is not NAME=PATH|ID"),
        (["base=./absent"], "there is no folder of a model"),
        (["base=a/b/c"], "there is no folder of a model"),
        (["base=@/a", "BASE=@/b"], "two models have the name base"),
    ],
)
def test_wrong_models_are_rejected(
    texts: list[str], message: str, store: ArtifactStore, settings: Settings
) -> None:
    with pytest.raises(RunError) as caught:
        read_models(texts, store, settings)
    assert message in caught.value.message


def test_absent_id_says_how_to_download_it(store: ArtifactStore, settings: Settings) -> None:
    with pytest.raises(ShippingError) as caught:
        read_models([f"base={MODEL}"], store, settings)
    assert f"hf download {MODEL}" in caught.value.hint
