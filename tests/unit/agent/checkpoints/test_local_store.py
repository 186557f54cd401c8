"""Checkpoints on disk: provisional ones, the latest one, and folders that are removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from barnraise.agent.checkpoints.local_store import LocalCheckpoints
from barnraise.agent.runs.service import _KEPT_FOLDERS, _out_of_date
from barnraise.artifacts import ArtifactStore
from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.serialization import flatten
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import CheckpointSignature, HeldCheckpoint, sign

KEY, WORKER = NodeKey.generate(), NodeKey.generate()
RUN = "train-abcd"
SIGNERS = {KEY.id.raw, WORKER.id.raw}


class Notary:
    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        return sign(WORKER, RUN, step, fingerprint)

    def signers(self, run: str) -> set[bytes]:
        return SIGNERS


def _saved(local: LocalCheckpoints, step: int, *, provisional: bool) -> None:
    checkpoints = Checkpoints(local.folder(RUN), RUN, Notary())  # type: ignore[arg-type]
    checkpoints.save(flatten({"w": torch.full((2,), float(step))}), CheckpointInfo(step, 1, provisional))
    checkpoints.wait()


def _local(folder: Path) -> LocalCheckpoints:
    local = LocalCheckpoints(folder / "runs", ArtifactStore(folder / "store"), KEY)
    for step, provisional in ((50, False), (70, True), (90, True)):
        _saved(local, step, provisional=provisional)
    return local


def test_settle_kept_provisional_checkpoints_become_normal(tmp_path: Path) -> None:
    local = _local(tmp_path)
    local.settle(RUN, SIGNERS, counts=True)
    assert set(local.held(RUN, SIGNERS)) == {HeldCheckpoint(RUN, step, True, 1) for step in (50, 70, 90)}
    assert all(local.is_whole(RUN, step, SIGNERS) for step in (50, 70, 90))
    newest = Checkpoints(local.folder(RUN), RUN, Notary()).newest()  # type: ignore[arg-type]
    assert newest is not None
    assert (newest[0].step, newest[0].provisional) == (90, False)
    assert sorted(os.listdir(local.folder(RUN) / "step-00000090")) == [
        "manifest.json",
        "seal.json",
        "state.safetensors",
    ]


def test_settle_dropped_provisional_checkpoints_are_renamed_away(tmp_path: Path) -> None:
    local = _local(tmp_path)
    local.settle(RUN, SIGNERS, counts=False)
    assert local.held(RUN, SIGNERS) == [HeldCheckpoint(RUN, 50, True, 1)]
    assert local.latest(RUN) == 50
    for step in (60, 70, 80, 85):
        _saved(local, step, provisional=False)
    assert set(local.held(RUN, SIGNERS)) == {HeldCheckpoint(RUN, step, True, 1) for step in (70, 80, 85)}
    _saved(local, 95, provisional=True)
    local.settle(RUN, SIGNERS, counts=False)
    left = {name for name in os.listdir(local.folder(RUN)) if name.startswith("dropped-")}
    assert left == {"dropped-step-00000095"}, "those of the time before are gone"


def test_latest_by_write_time_not_by_step(tmp_path: Path) -> None:
    local = _local(tmp_path)
    _saved(local, 60, provisional=False)
    assert local.latest(RUN) == 60
    assert HeldCheckpoint(RUN, 60, True, 1) in local.held(RUN, SIGNERS), "though three have higher steps"


def test_latest_while_draft_is_renamed_finds_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker saves as it likes: its draft is listed, and gone when it is looked at."""
    local = _local(tmp_path)
    scandir = os.scandir

    @contextlib.contextmanager
    def look(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        draft = folder / ".draft-00000095"
        draft.mkdir()
        with scandir(folder) as listing:
            entries = list(listing)
        draft.rename(folder / "step-00000095")
        yield entries

    monkeypatch.setattr(os, "scandir", look)
    assert local.latest(RUN) == 90


def test_out_of_date_long_run_that_just_failed_is_kept(tmp_path: Path) -> None:
    for number in range(_KEPT_FOLDERS + 3):
        (tmp_path / f"short-{number:02}" / "logs").mkdir(parents=True)
        for place in (tmp_path / f"short-{number:02}" / "logs", tmp_path / f"short-{number:02}"):
            os.utime(place, (1000 + number, 1000 + number))
    (tmp_path / "long" / "checkpoints" / "step-00000007").mkdir(parents=True)
    for place, at in (("long", 10), ("long/checkpoints", 5000)):
        os.utime(tmp_path / place, (at, at))
    assert _out_of_date(tmp_path, {"short-00"}) == ["short-01", "short-02", "short-03"]
    assert _out_of_date(tmp_path / "none", set()) == []


def test_size_is_known_before_and_after_the_signature(tmp_path: Path) -> None:
    local = LocalCheckpoints(tmp_path / "runs", ArtifactStore(tmp_path / "store"), KEY)
    sizes = []

    class Measuring(Notary):
        def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
            sizes.append(local.size(RUN, step))
            return super().sign(step, fingerprint)

    checkpoints = Checkpoints(local.folder(RUN), RUN, Measuring())  # type: ignore[arg-type]
    checkpoints.save(flatten({"w": torch.zeros(1000)}), CheckpointInfo(50, 1, False))
    checkpoints.wait()
    seal = local.folder(RUN) / "step-00000050" / "seal.json"
    assert sizes == [local.size(RUN, 50) - seal.stat().st_size]
    assert 4000 < sizes[0] < 8000
    assert local.size(RUN, 51) == 0
