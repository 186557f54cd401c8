"""Memory that a worker may use."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from barnraise.training.pipeline import machine_memory

CPU = torch.device("cpu")


def limit(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "self").write_text(own)
    monkeypatch.setattr(machine_memory, "_ROOT", root)
    monkeypatch.setattr(machine_memory, "_OWN", root / "self")
    return machine_memory.usable_memory(CPU)


def test_limit_of_version_2_is_the_smallest_of_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"a/memory.max": "3000000\n", "a/b/memory.max": "max\n"}
    assert limit(monkeypatch, tmp_path, "0::/a/b\n", files) == 3_000_000


def test_limit_of_version_1_is_that_of_the_memory_controller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"memory/x/memory.limit_in_bytes": "2000000\n", "cpu/x/memory.limit_in_bytes": "1\n"}
    assert limit(monkeypatch, tmp_path, "3:cpu:/x\n9:memory:/x\n", files) == 2_000_000


def test_computer_without_limit_has_all_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert limit(monkeypatch, tmp_path, "0::/\n", {}) == psutil.virtual_memory().total
    assert 0 < machine_memory.used_memory(CPU) < psutil.virtual_memory().total
