"""Metrics log: keeps a long history with a limit."""

from __future__ import annotations

import math

import pytest
import torch

import barnraise
from barnraise.training import metrics
from barnraise.training.metrics import MetricsLog


def test_long_history_drops_oldest_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_KEPT", 10)
    log = MetricsLog()
    for step in range(95):
        log.update([{"loss": (2.0 * step, 2.0)}], step + 1)
        assert log.count == step + 1
        assert len(log.history) <= 20
    assert log.history[-1] == {"loss": 94.0}
    assert [entry["loss"] for entry in log.since(92)] == [92.0, 93.0, 94.0]
    assert len(log.since(0)) == len(log.history) >= 10
    assert log.since(96) == []


def test_values_are_averaged_by_the_weights_that_they_were_logged_with() -> None:
    log = MetricsLog()
    log.start_microbatch(0, 4.0)
    log.log({"loss": 1.0}, 3.0)
    log.log({"loss": 5.0}, 1.0)
    log.log({"loss": math.nan}, 0.0)
    log.log_step(0, {"eval_loss": 7.0})
    log.update([log.of_step(0), {"eval_loss": (9.0, 1.0)}], 2)
    assert log.history == [{"loss": 2.0, "eval_loss": 8.0}]


def test_values_after_the_last_step_are_in_the_newest_entry() -> None:
    log = MetricsLog()
    log.amend({"eval_loss": 3.0})
    assert log.history == [{"eval_loss": 3.0}]
    log.update([{"loss": (2.0, 1.0)}], 1)
    log.amend({"eval_loss": 1.0})
    assert log.history == [{"eval_loss": 3.0}, {"loss": 2.0, "eval_loss": 1.0}]


def test_gather_of_scalar_returns_vector() -> None:
    net = torch.nn.Linear(2, 1)
    run = barnraise.init()
    rows = torch.utils.data.TensorDataset(torch.ones(4, 2))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    assert run.gather(torch.tensor(2.5)).tolist() == [2.5]
