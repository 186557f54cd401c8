"""Results of a run within the limits: checkpoints of a Trainer are left out before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.artifacts import ArtifactStore, FolderLimits, pack_changes
from barnraise.artifacts.store.manifest import FolderManifest
from barnraise.core.errors import ShippingError

NOTHING = FolderManifest(())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    sizes = {
        "adapter/adapter_model.safetensors": 500,
        "out/checkpoint-100/model.safetensors": 3000,
        "out/checkpoint-200/model.safetensors": 2999,
        "out/checkpoint-200/rng/state.pth": 100,
        "out/checkpoint-best/model.safetensors": 200,
        "out/my-checkpoint-7/model.safetensors": 100,
    }
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def packed(folder: Path, store: ArtifactStore, limits: FolderLimits) -> tuple[list[str], str]:
    result = pack_changes(NOTHING, folder, store, limits)
    manifest = store.manifest(result.id)
    assert manifest is not None
    return [entry.path for entry in manifest.files], result.note


def test_results_within_the_limits_are_whole(folder: Path, store: ArtifactStore) -> None:
    names, note = packed(folder, store, FolderLimits(most_bytes=10_000, most_files=10))
    assert (len(names), note) == (6, "")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (
            FolderLimits(most_bytes=1024, most_files=10),
            "they have 6.74 KiB, and `runs.most_bytes` allows 1 KiB",
        ),
        (FolderLimits(most_bytes=10_000, most_files=3), "they are 6 files, and `runs.most_files` allows 3"),
    ],
)
def test_results_beyond_a_limit_come_without_checkpoints_of_a_trainer(
    folder: Path, store: ArtifactStore, limits: FolderLimits, why: str
) -> None:
    names, note = packed(folder, store, limits)
    assert names == [
        "adapter/adapter_model.safetensors",
        "out/checkpoint-best/model.safetensors",
        "out/my-checkpoint-7/model.safetensors",
    ]
    assert note == (
        "the results lack out/checkpoint-100 and 1 more (5.96 KiB), because all files would be too large: "
        f"{why}"
    )


def test_results_that_are_too_large_without_checkpoints_are_refused_with_the_setting(
    folder: Path, store: ArtifactStore
) -> None:
    with pytest.raises(ShippingError) as caught:
        pack_changes(NOTHING, folder, store, FolderLimits(most_bytes=700, most_files=10))
    assert caught.value.message == (
        "they have 6.74 KiB, and `runs.most_bytes` allows 700 B; the largest file is "
        "out/checkpoint-100/model.safetensors with 2.93 KiB"
    )
    assert "Copy them from there" in caught.value.hint


def test_run_that_wrote_nothing_has_no_results(tmp_path: Path, store: ArtifactStore) -> None:
    (tmp_path / "empty").mkdir()
    assert pack_changes(NOTHING, tmp_path / "empty", store, FolderLimits(1, 1)) == (b"", "")
