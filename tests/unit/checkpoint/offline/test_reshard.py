"""Conversion of sharded checkpoints on the disk: the cut of the rows, what is refused, and the command."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from barnraise.checkpoint.offline.__main__ import reshard
from barnraise.checkpoint.offline.reshard import row_chunks
from barnraise.checkpoint.sharded import load_sharded, save_sharded
from barnraise.cli.runs import resume
from barnraise.core.errors import CheckpointError

STATE = {
    "weight": torch.arange(35.0).reshape(7, 5),
    "half": torch.linspace(-1, 1, 9, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "step": torch.tensor(12),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it is alone
        save_sharded({"model": dict(STATE), "note": ["three", 3]}, tmp_path / "saved", 42)
    return tmp_path / "saved"


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2))
def test_rows_are_cut_as_torch_cuts_them(rows: int, count: int, more: int) -> None:
    size = torch.Size([rows, *[3] * more])
    chunks = row_chunks(size, count)
    assert [chunk.sizes[0] for chunk in chunks] == [len(part) for part in torch.arange(rows).chunk(count)]
    assert [chunk.offsets[0] for chunk in chunks] == [
        int(part[0]) for part in torch.arange(rows).chunk(count)
    ]
    assert all(tuple(chunk.sizes[1:]) == (3,) * more for chunk in chunks)


@pytest.mark.parametrize("count", [1, 3, 11])
def test_other_number_of_shards_has_the_same_state(folder: Path, tmp_path: Path, count: int) -> None:
    facts = reshard(
        [folder], tmp_path / "new", count=count, step=None, is_one_file=False, prefix=""
    )
    assert (facts["step"], facts["tensors"]) == (42, len(STATE))
    names = {path.name for path in (tmp_path / "new" / "step-00000042").glob("*.distcp")}
    assert names == {f"__{rank}_0.distcp" for rank in range(count)}
    loaded = {name: torch.zeros_like(value) for name, value in STATE.items()}
    state = {"model": loaded, "note": ["", 0]}
    assert load_sharded(state, tmp_path / "new") == 42
    assert all(torch.equal(loaded[name], value) for name, value in STATE.items())
    assert state["note"] == ["three", 3]
    assert not list((tmp_path / "new").glob(".draft-*"))


def test_file_of_a_checkpoint_is_never_replaced(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        reshard([folder], folder, count=2, step=None, is_one_file=False, prefix="")
    assert load_sharded({}, folder) == 42


def test_unknown_step_and_prefix_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of step 41"):
        reshard([folder], tmp_path / "new", count=1, step=41, is_one_file=False, prefix="")
    with pytest.raises(CheckpointError, match="starts with 'training'") as error:
        reshard([folder], tmp_path / "new", count=1, step=None, is_one_file=True, prefix="training")
    assert "model" in error.value.hint
    assert not (tmp_path / "new").exists()


def test_command_writes_one_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))
    options = {"into": 1, "step": None, "safetensors": True, "prefix": "model."}
    assert resume.reshard([str(folder)], tmp_path / "out", **options) == 0  # type: ignore[arg-type]
    assert "has 5 tensors of step 42" in capsys.readouterr().err
    path = tmp_path / "out" / "model.safetensors"
    loaded = load_file(path)
    assert set(loaded) == set(STATE)
    assert all(torch.equal(loaded[name], value) for name, value in STATE.items())
    with safe_open(path, "pt") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"steps": "42"}
    with pytest.raises(CheckpointError, match="neither a folder nor a run"):
        resume.reshard(["nothing-here"], tmp_path / "out", **options)  # type: ignore[arg-type]


def test_run_of_this_machine_stands_for_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "state" / "runs" / "train-abcd" / "checkpoints" / "sharded"
    kept.mkdir(parents=True)
    folder.rename(kept / "mine")
    assert resume._shard_folder("train-abcd", tmp_path / "state") == kept / "mine"
    (kept / "best" / "step-00000001").mkdir(parents=True)
    (kept / "best" / "step-00000001" / "manifest.json").touch()
    with pytest.raises(CheckpointError, match="in 2 folders") as error:
        resume._shard_folder("train-abcd", tmp_path / "state")
    assert str(kept / "best") in error.value.hint
