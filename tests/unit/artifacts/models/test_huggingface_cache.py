"""Versions of models in a Hugging Face cache on disk: found by their ids, complete, and inside of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from barnraise.artifacts.models.huggingface_cache import (
    ModelReference,
    cache_directory,
    find_snapshot,
    parse_reference,
    snapshot_files,
)
from barnraise.core.errors import ShippingError
from tests.unit.artifacts.models.caches import MODEL, write_cache

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100, "sub/more.txt": b"more"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", ModelReference("gpt2")),
        ("meta-llama/Llama-3.2-1B", ModelReference("meta-llama/Llama-3.2-1B")),
        ("a/b@v1.0", ModelReference("a/b", "v1.0")),
        ("a/b@refs/pr/3", ModelReference("a/b", "refs/pr/3")),
        *((text, None) for text in ("", "a/b/c", "./a", "../a", "a/..", "a--b/c", "a/b.", "a/b@", "a b/c")),
        *((text, None) for text in ("a/b@../x", "a/b@x/../y", "a/b@/x", "a/b\n", "a\\b", "x" * 97)),
    ],
)
def test_parse_reference_accepts_ids_and_nothing_that_is_a_path(
    text: str, expected: ModelReference | None
) -> None:
    assert parse_reference(text) == expected


def test_hub_directory_follows_the_setting_and_the_variables_of_the_library(tmp_path: Path) -> None:
    steps = [("XDG_CACHE_HOME", "x"), ("HF_HOME", "h"), ("HUGGINGFACE_HUB_CACHE", "o"), ("HF_HUB_CACHE", "c")]
    environ: dict[str, str] = {}
    places = [cache_directory({})]
    for name, place in steps:
        environ[name] = f"/{place}"
        places.append(cache_directory(environ))
    home = Path.home() / ".cache" / "huggingface" / "hub"
    assert places == [home, Path("/x/huggingface/hub"), Path("/h/hub"), Path("/o"), Path("/c")]
    assert cache_directory(environ, "/mine") == Path("/mine")


def test_hub_directory_is_that_of_huggingface_hub() -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    assert str(cache_directory(os.environ)) == constants.HF_HUB_CACHE


def test_find_snapshot_knows_branches_and_commits(tmp_path: Path) -> None:
    first = write_cache(tmp_path, MODEL, FILES)
    second = write_cache(tmp_path, MODEL, {"config.json": b"{2}"}, "refs/pr/1")
    snapshot, folder = find_snapshot(tmp_path, ModelReference(MODEL))
    assert (snapshot.repository, snapshot.revision, snapshot.commit) == (MODEL, "main", first)
    assert [file.path for file in snapshot_files(folder)] == list(FILES)
    assert [Path(file.real).read_bytes() for file in snapshot_files(folder)] == list(FILES.values())
    assert find_snapshot(tmp_path, ModelReference(MODEL, "refs/pr/1"))[0].commit == second
    assert find_snapshot(tmp_path, ModelReference(MODEL, first))[0].revision == first


def test_find_snapshot_of_an_absent_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ShippingError, match=f"{MODEL} is not in the Hugging Face cache") as absent:
        find_snapshot(tmp_path, ModelReference(MODEL))
    assert f"hf download {MODEL}" in absent.value.hint
    commit = write_cache(tmp_path, MODEL, FILES)
    with pytest.raises(ShippingError, match=f"it has: main, {commit}") as other:
        find_snapshot(tmp_path, ModelReference(MODEL, "v2"))
    assert "--revision v2" in other.value.hint
    (tmp_path / "models--some-org--Some-Model.1B" / "refs" / "main").write_text("../../..")
    with pytest.raises(ShippingError, match="revision main"):
        find_snapshot(tmp_path, ModelReference(MODEL))


def test_snapshot_files_of_an_incomplete_download_are_rejected(tmp_path: Path) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files = {"model.safetensors.index.json": index, "model-1.safetensors": b"1"}
    commit = write_cache(tmp_path, MODEL, files)
    folder = tmp_path / "models--some-org--Some-Model.1B" / "snapshots" / commit
    with pytest.raises(ShippingError, match=r"not complete: model-2\.safetensors is not there"):
        snapshot_files(folder)
    (folder / "model-2.safetensors").symlink_to("../../blobs/never-came")
    with pytest.raises(ShippingError, match=r"model-2\.safetensors cannot be read"):
        snapshot_files(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ShippingError, match="it has no files"):
        snapshot_files(folder)


def test_snapshot_files_outside_of_the_cache_are_rejected(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a key")
    commit = write_cache(tmp_path / "hub", MODEL, FILES)
    folder = tmp_path / "hub" / "models--some-org--Some-Model.1B" / "snapshots" / commit
    (folder / "x.json").symlink_to(secret)
    with pytest.raises(ShippingError, match="leads out of the Hugging Face cache"):
        snapshot_files(folder)


def test_snapshot_files_of_a_model_on_another_disk_are_found(tmp_path: Path) -> None:
    commit = write_cache(tmp_path / "other-disk", MODEL, FILES)
    (tmp_path / "hub").mkdir()
    name = "models--some-org--Some-Model.1B"
    (tmp_path / "hub" / name).symlink_to(tmp_path / "other-disk" / name)
    assert len(snapshot_files(tmp_path / "hub" / name / "snapshots" / commit)) == len(FILES)
