"""Memory that is free for a worker."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from barnraise.training.pipeline import machine_memory

CPU = torch.device("cpu")
SECOND = {"memory.current": "900000\n", "memory.stat": "anon 7\nactive_file 100000\ninactive_file 300000\n"}


def free(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "self").write_text(own)
    monkeypatch.setattr(machine_memory, "_ROOT", root)
    monkeypatch.setattr(machine_memory, "_OWN", root / "self")
    return machine_memory.free_memory(CPU)


def test_version_2_counts_the_group_with_the_least_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"a/memory.max": "3000000\n", "a/b/memory.max": "max\n"}
    files |= {f"a/{name}": text for name, text in SECOND.items()}
    assert free(monkeypatch, tmp_path, "0::/a/b\n", files) == 2_500_000


def test_version_1_counts_the_memory_controller_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "memory/x/memory.limit_in_bytes": "2000000\n",
        "memory/x/memory.usage_in_bytes": "700000\n",
        "memory/x/memory.stat": "cache 500000\ntotal_active_file 50000\ntotal_inactive_file 150000\n",
        "cpu/x/memory.limit_in_bytes": "1\n",
    }
    assert free(monkeypatch, tmp_path, "3:cpu:/x\n9:memory:/x\n", files) == 1_500_000


def test_group_that_holds_more_than_its_limit_has_nothing_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"a/memory.max": "400000\n"} | {f"a/{name}": text for name, text in SECOND.items()}
    assert free(monkeypatch, tmp_path, "0::/a\n", files) == 0


def test_computer_without_limit_has_what_programs_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = free(monkeypatch, tmp_path, "0::/\n", {})
    assert left == pytest.approx(psutil.virtual_memory().available, rel=0.1)
