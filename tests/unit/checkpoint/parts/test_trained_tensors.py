"""Tensors of a checkpoint in parts that are read and written one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from barnraise.checkpoint.parts import TensorForm, TrainedTensors, write_tensors
from barnraise.core.errors import RunError
from tests.unit.checkpoint.parts.test_part_files import saved

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def test_tensors_are_written_as_safetensors_reads_them(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.arange(15).reshape(3, 5).to(dtype) for number, dtype in enumerate(DTYPES)}
    tensors |= {"turned": torch.arange(6.0).reshape(2, 3).t(), "one": torch.tensor(2.5)}
    tensors["none"] = torch.ones(0, 4)
    forms = {name: TensorForm(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    write_tensors(tmp_path / "model.safetensors", forms, tensors.__getitem__, {"steps": "3"})
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"steps": "3"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_failed_write_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"older")
    form = TensorForm(torch.float32, (2,))
    with pytest.raises(RunError, match="another type or shape"):
        write_tensors(path, {"a": form}, lambda name: torch.ones(3), {})
    with pytest.raises(RunError, match="cannot be written"):
        write_tensors(path, {"a": TensorForm(torch.complex128, (2,))}, lambda name: torch.ones(2), {})
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(path.name, b"older")]


def test_values_of_all_parts_are_found_by_name(tmp_path: Path) -> None:
    manifest = saved(tmp_path, 7).manifest(7)
    model = TrainedTensors(tmp_path / "step-00000007", manifest)
    assert sorted(model) == ["layer1.weight", "layer2.weight"]
    assert len(model) == 2
    assert "layer1.weight" in model
    assert "layer3.weight" not in model
    assert torch.equal(model["layer2.weight"], torch.full((2, 3), 2.5))
    assert model.forms["layer2.weight"] == TensorForm(torch.float32, (2, 3))


@pytest.mark.parametrize("how", ["remove", "edit"])
def test_missing_or_changed_part_is_an_error(tmp_path: Path, how: str) -> None:
    manifest = saved(tmp_path, 7).manifest(7)
    path = tmp_path / "step-00000007" / "part-0001.safetensors"
    content = path.read_bytes()
    path.unlink()
    if how == "edit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=r"part-0001"):
        TrainedTensors(tmp_path / "step-00000007", manifest)


STREAM = """
import resource, sys, torch
from pathlib import Path
from barnraise.checkpoint.parts import TensorForm, write_tensors
form = TensorForm(torch.float32, (1 << 22,))  # 16 MiB
forms = {f"t{number}": form for number in range(int(sys.argv[2]))}
write_tensors(Path(sys.argv[1]), forms, lambda name: torch.full(form.shape, 1.0), {})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.safetensors"
        words = [sys.executable, "-c", STREAM, str(path), str(count)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        path.unlink()
        return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)

    assert peak(24) - peak(2) < 3 * (16 << 20), "of 352 MiB more"
