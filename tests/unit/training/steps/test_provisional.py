"""Provisional steps: noted without a quorum, and reported by the next worker if they were discarded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from barnraise.agent_client.provisional import settle_steps, take_dropped
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.steps.provisional import ProvisionalSteps


@dataclass
class Training:
    done: int
    provisional: bool = False


def train(steps: ProvisionalSteps, first: int, last: int, *, alone: bool) -> None:
    for done in range(first, last + 1):
        steps(Training(done, alone))


def test_next_worker_reports_discarded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(ProvisionalSteps, "_report", lambda self, worker, *words: reported.append(words))
    place = WorkerId("r", 0, 1, tmp_path, "aa")
    first = ProvisionalSteps(place, tmp_path)
    train(first, 1, 106, alone=False)
    train(first, 107, 120, alone=True)
    settle_steps(tmp_path, counts=False)
    second = ProvisionalSteps(place, tmp_path)
    train(second, 151, 160, alone=False)
    assert reported == [(14, 150)]


def test_second_provisional_period_is_counted_separately(tmp_path: Path) -> None:
    steps = ProvisionalSteps(WorkerId("r", 0, 1, tmp_path, "aa"), tmp_path)
    train(steps, 1, 5, alone=True)
    settle_steps(tmp_path, counts=True)
    train(steps, 6, 8, alone=False)
    train(steps, 9, 10, alone=True)
    settle_steps(tmp_path, counts=False)
    assert take_dropped(tmp_path) == 2


def test_only_first_worker_of_machine_notes_steps(tmp_path: Path) -> None:
    train(ProvisionalSteps(WorkerId("r", 1, 1, tmp_path, "aa"), tmp_path), 1, 3, alone=True)
    train(ProvisionalSteps(None, tmp_path), 1, 3, alone=True)
    assert list(tmp_path.iterdir()) == []


def test_training_continues_without_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settled = ProvisionalSteps(WorkerId("r", 0, 1, tmp_path, "aa"), tmp_path)
    train(settled, 1, 3, alone=True)
    settle_steps(tmp_path, counts=False)
    train(ProvisionalSteps(WorkerId("r", 0, 2, tmp_path, "aa"), tmp_path), 9, 9, alone=False)
    assert "3 steps without a majority were discarded" in caplog.text
