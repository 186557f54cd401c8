"""Maps of real processes, of which one is killed and another one joins; see map_workers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.runs.sharding import micro_batch_seed
from tests.repository import ROOT

ITEMS = 60

pytestmark = pytest.mark.slow


def run(act: str, room: Path) -> dict[str, Any]:
    """Return the results by machine."""
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", ACT=act)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    words = [sys.executable, str(Path(__file__).with_name("map_workers.py")), str(room)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500, check=False)
    results = {path.name[0]: json.loads(path.read_text())[act] for path in room.glob(f"?-{act}.json")}
    assert set(results) == ({"a", "b"} if act == "train" else {"a", "b", "d"}), done.stderr[-6000:]
    return results


def computed(room: Path, act: str) -> Counter[int]:
    """Return how often each item was computed to its end, by processes that lived on or not."""
    return Counter(int(line.split()[1]) for line in (room / f"computed-{act}").read_text().splitlines())


def expected(key: tuple[int, int], item: int) -> torch.Tensor:
    stream = torch.Generator().manual_seed(micro_batch_seed(0, key[0], item, 3 + (key[1] << 8)))
    return torch.rand(1000 + item, dtype=torch.float64, generator=stream)


def test_killed_worker_costs_only_what_it_had_not_sent(tmp_path: Path) -> None:
    by_machine = run("join", tmp_path)
    sums = [float(expected((0, 2), item).sum()) for item in range(ITEMS)]
    for first, results, world in by_machine.values():
        assert first == ["0", "1", "2"]
        assert [value for value, _ in results] == sums
        assert world == 3, "the joining worker is a member"
    counts = computed(tmp_path, "join")
    assert set(counts) == set(range(ITEMS))
    killed = [
        item
        for item, count in counts.items()
        if count > 1 and f"c {item}\n" not in (tmp_path / "computed-join").read_text()
    ]
    assert not killed, "only results of the killed worker may be computed again"
    assert f"d {ITEMS - 1}" in (tmp_path / "computed-join").read_text() or any(
        line.startswith("d") for line in (tmp_path / "computed-join").read_text().splitlines()
    ), "the joining worker takes part"


def test_worker_killed_in_a_map_of_a_training_changes_nothing(tmp_path: Path) -> None:
    results = run("train", tmp_path)
    assert results["a"] == results["b"]
    (first, *_), _, steps = results["a"]
    assert first == [float(expected((3, 1), item).sum()) for item in range(ITEMS)]
    assert steps == 8
    assert set(computed(tmp_path, "train")) == set(range(ITEMS))
    assert (tmp_path / "killed-train").exists()


def test_worker_that_joins_at_the_end_gets_all_results(tmp_path: Path) -> None:
    """And one that comes when the others have ended exits, rather than compute everything again."""
    results = run("late", tmp_path)
    assert results["a"] == results["b"] == results["d"]
    lines = (tmp_path / "computed-late").read_text().splitlines()
    assert len(lines) == 5 + ITEMS
    assert {line[0] for line in lines} <= {"a", "b"}
