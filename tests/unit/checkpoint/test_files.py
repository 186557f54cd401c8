"""Checkpoint files: complete, signed and of this run, or rejected with the reason."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from barnraise.agent_client.run_requests import NewestCheckpointResponse
from barnraise.checkpoint import files
from barnraise.checkpoint.files import CheckpointInfo, Checkpoints, write_model
from barnraise.checkpoint.serialization import FlatState, digest, flatten
from barnraise.core.errors import AgentError, RunError
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import FILES, KEPT, CheckpointSignature, sign

RUN = "train-abcd"
KEY = NodeKey.generate()


class Signs:
    """Agent that signs for one run; ``known``: the key whose signature is valid."""

    def __init__(self, key: NodeKey = KEY, run: str = RUN, known: NodeKey = KEY) -> None:
        self.key, self.run, self.known = key, run, known

    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        return sign(self.key, self.run, step, fingerprint)

    def signers(self, run: str) -> Collection[bytes]:
        return {self.known.id.raw}

    def newest(self, passing_over: Collection[tuple[str, int]]) -> NewestCheckpointResponse:
        return NewestCheckpointResponse()

    def fetch(self, run: str, step: int) -> None:
        raise AssertionError("nothing is away")


class IsSilent(Signs):
    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        raise AgentError("the agent is silent")


def parts(step: int) -> FlatState:
    return flatten({"w": torch.full((3, 4), float(step)), "shared": torch.ones(5)[:3], "done": step})


def saved(folder: Path, *steps: int, run: str = RUN, notary: Signs | None = None) -> Checkpoints:
    kept = Checkpoints(folder, run, notary or Signs(run=run))
    for step in steps:
        kept.save(parts(step), CheckpointInfo(step, 1, False))
        kept.wait()
    return kept


def test_newest_checkpoint_is_restored_bitwise(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1, 2, 3, 4, 5)
    newest = kept.newest()
    assert newest is not None
    manifest, state = newest
    assert manifest.step == 5
    assert digest(state) == digest(parts(5))
    assert len(list(tmp_path.glob("step-*"))) == KEPT
    older = kept.read(tmp_path / "step-00000004")[0]
    assert manifest.previous == older.digest, "each names the one before it"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["cut", "edit", "remove"])
def test_incomplete_checkpoint_is_skipped(tmp_path: Path, file: str, how: str) -> None:
    kept = saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / file
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "edit":
        path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    else:
        path.unlink()
    with pytest.raises(RunError) as refused:
        kept.read(path.parent)
    if (file, how) == ("seal.json", "remove"):
        assert refused.value.message == "it is not signed"
    newest = kept.newest()
    assert newest is not None
    assert newest[0].step == 1


def test_checkpoint_of_other_run_is_rejected(tmp_path: Path) -> None:
    saved(tmp_path, 3, run="other-run")
    kept = Checkpoints(tmp_path, RUN, Signs())
    with pytest.raises(RunError, match="belongs to run other-run"):
        kept.read(tmp_path / "step-00000003")
    assert kept.newest() is None


def test_checkpoint_signed_by_stranger_is_rejected(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1)
    saved(tmp_path, 2, notary=Signs(NodeKey.generate()))
    with pytest.raises(RunError, match="it was not signed by a machine of this cluster"):
        kept.read(tmp_path / "step-00000002")
    newest = kept.newest()
    assert newest is not None
    assert newest[0].step == 1


def test_tensors_of_other_checkpoint_are_rejected(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1, 2)
    (tmp_path / "step-00000001" / "state.safetensors").replace(
        tmp_path / "step-00000002" / "state.safetensors"
    )
    with pytest.raises(RunError, match="do not have the hash of its manifest"):
        kept.read(tmp_path / "step-00000002")


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    saved(folder, 7)
    return folder / "step-00000007"


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_checkpoint_with_edited_byte_is_not_loaded(one_saved: Path, data: st.DataObject) -> None:
    path = one_saved / data.draw(st.sampled_from(FILES))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    change = data.draw(st.integers(1, 255))
    path.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
    try:
        loaded = Checkpoints(one_saved.parent, RUN, Signs()).read(one_saved)
    except RunError:
        pass
    else:
        assert path.name == "seal.json", "a signature may be written in two ways, and nothing else"
        assert digest(loaded[1]) == digest(parts(7))
    finally:
        path.write_bytes(content)


def test_draft_is_not_loaded_as_checkpoint(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / ".draft-00000001")
    assert kept.newest() is None


def test_agreed_checkpoint_is_preferred_to_provisional(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1)
    kept.save(parts(2), CheckpointInfo(2, 1, True))
    kept.wait()
    newest = kept.newest()
    assert newest is not None
    assert newest[0].step == 1


@pytest.mark.parametrize(
    ("folder", "notary", "why"),
    [("/dev/null/nowhere", Signs(), "Not a directory"), ("", IsSilent(), "the agent is silent")],
)
def test_failed_write_keeps_older_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str, notary: Signs, why: str
) -> None:
    kept = saved(tmp_path, 1)
    blocked = saved(Path(folder) if folder else tmp_path, 2, 3, notary=notary)
    for step in (2, 3):
        assert f"the checkpoint of step {step} was not written: {why}" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "no draft is left"
    assert kept.newest() is not None
    assert not blocked.is_busy


def test_shared_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(5, 3)
    head = torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    write_model(model.state_dict(), tmp_path / "model.safetensors", {})
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["embedding.weight"], loaded["head.weight"])
    assert torch.equal(loaded["head.weight"], head.weight)


def test_only_tensors_that_share_memory_are_copied_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, int] = {}

    def save(tensors: dict[str, torch.Tensor], *arguments: Any, **options: Any) -> None:
        written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save_file(tensors, *arguments, **options)

    monkeypatch.setattr(files, "save_file", save)
    own, both = torch.arange(6.0).reshape(2, 3), torch.arange(4.0)
    given = {"own": own, "both": both, "tail": both[2:], "turned": own.t()}
    write_model(given, tmp_path / "model.safetensors", {})
    assert (written["own"], written["both"]) == (own.data_ptr(), both.data_ptr())
    assert written["tail"] not in (own.data_ptr(), both[2:].data_ptr())
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], given[name]) for name in given)


def test_drafts_of_killed_writers_only_are_removed(tmp_path: Path) -> None:
    ours = f"model.safetensors.draft-{platform.node()}"
    left, theirs = tmp_path / f"{ours}-4194305", tmp_path / "model.safetensors.draft-elsewhere-4194305"
    for draft in (left, theirs):  # no process has that number
        draft.write_bytes(b"half")
    write_model({"w": torch.ones(2)}, tmp_path / "model.safetensors", {})
    assert sorted(tmp_path.iterdir()) == [tmp_path / "model.safetensors", theirs]
