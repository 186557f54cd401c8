"""Parts of a checkpoint: written together, signed at the end, and rejected if anything was changed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.parts import PartFiles, WrittenParts, shared_state
from barnraise.checkpoint.serialization import flatten
from barnraise.core.errors import AgentError, RunError
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import KEPT_IN_PARTS, CheckpointPart, CheckpointSignature, sign

RUN = "train-abcd"
KEY = NodeKey.generate()
SKELETON = flatten({"split": {"schedule": {}}, "done": 7}).skeleton


class Agent:
    """Agent that signs for one run, or is silent."""

    is_silent = False

    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        if self.is_silent:
            raise AgentError("the agent is silent")
        return sign(KEY, RUN, step, fingerprint)

    def signers(self, run: str) -> Collection[bytes]:
        return {KEY.id.raw}


def state(number: int) -> Any:
    memory = {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), float(number)), "plain": 1.5}
    return {f"layer{number}.weight": {"value": torch.full((2, 3), number + 0.5), "memory": memory}}


def files_of(folder: Path, agent: Agent | None = None) -> PartFiles:
    signer: Any = agent or Agent()
    return PartFiles(Checkpoints(folder, RUN, signer), signer)


def info(step: int, generation: int = 1) -> CheckpointInfo:
    return CheckpointInfo(step, generation, False)


def saved(folder: Path, *steps: int) -> PartFiles:
    files = files_of(folder)
    for step in steps:
        parts = [files.write(info(step), number, state(number)) for number in (1, 2)]
        files.seal(info(step), WrittenParts(parts, SKELETON), parts)
    return files


def test_parts_are_read_as_they_were_written(tmp_path: Path) -> None:
    files = saved(tmp_path, 7)
    manifest = files.manifest(7)
    assert [part.number for part in manifest.parts] == [1, 2]
    assert (manifest.file, manifest.step, manifest.copies) == (None, 7, 2)
    assert shared_state(manifest)["done"] == 7
    read = files.read(manifest, 2)["layer2.weight"]
    written = state(2)["layer2.weight"]
    assert torch.equal(read["value"], written["value"])
    assert read["memory"]["plain"] == 1.5
    assert torch.equal(read["memory"]["exp_avg"], written["memory"]["exp_avg"])
    assert Checkpoints(tmp_path, RUN, Agent()).newest() is None  # type: ignore[arg-type]


def test_same_state_gives_the_same_file(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", 7), saved(tmp_path / "b", 7)
    assert first.manifest(7) == second.manifest(7)


def test_draft_without_a_signature_is_no_checkpoint(tmp_path: Path) -> None:
    """As after a death between the parts and the signature: the older one is still there."""
    files = saved(tmp_path, 7)
    files.write(info(8), 1, state(1))
    with pytest.raises(RunError, match="cannot be read"):
        files.manifest(8)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".draft-1-00000008", "step-00000007"]
    files.remove_drafts(info(9))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_silent_agent_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    agent = Agent()
    files = files_of(tmp_path, agent)
    part = files.write(info(8), 1, state(1))
    agent.is_silent = True
    with pytest.raises(AgentError):
        files.seal(info(8), WrittenParts([part], SKELETON), [part])
    files.drop(info(8))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_copy_with_other_bits_is_left_out(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    own = [files.write(info(7), number, state(number)) for number in (1, 2)]
    counted = [own[0], CheckpointPart(2, own[1].size, "f" * 64)]
    files.seal(info(7), WrittenParts(counted, SKELETON), own)
    assert (tmp_path / "step-00000007" / "part-0001.safetensors").exists()
    assert not (tmp_path / "step-00000007" / "part-0002.safetensors").exists()
    with pytest.raises(RunError, match="cannot be read"):
        files.read(files.manifest(7), 2)


@pytest.mark.parametrize("place", [0, 12, 200, -1])
def test_changed_part_is_rejected(tmp_path: Path, place: int) -> None:
    files = saved(tmp_path, 7)
    path = tmp_path / "step-00000007" / "part-0002.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="does not have the hash"):
        files.read(files.manifest(7), 2)
    with pytest.raises(RunError, match="has no part 3"):
        files.read(files.manifest(7), 3)


def test_manifest_that_names_a_part_twice_is_rejected(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    part = files.write(info(7), 1, state(1))
    files.seal(info(7), WrittenParts([part, part], SKELETON), [part])
    with pytest.raises(RunError, match="a part twice"):
        files.manifest(7)


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    files = saved(tmp_path, 5, 6, 7, 8)
    files.remove_outdated(8)
    assert len(list(tmp_path.glob("step-*"))) == KEPT_IN_PARTS
    assert files.manifest(8).step == 8


def test_checkpoint_of_the_same_step_is_replaced_by_one_of_a_later_group(tmp_path: Path) -> None:
    files = saved(tmp_path, 7)
    part = files.write(info(7, 2), 1, state(1))
    files.seal(info(7, 2), WrittenParts([part], SKELETON), [part])
    assert files.manifest(7).generation == 2
