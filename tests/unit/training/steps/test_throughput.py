"""Speed of a worker on a system whose monotonic clock has long steps, as Windows has."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from barnraise.training import session
from barnraise.training.gradients import reducer
from barnraise.training.steps import throughput
from tests.unit.training.gradients.test_reducer import Twice
from tests.unit.training.test_session import model, train


@pytest.fixture(autouse=True)
def _coarse_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the monotonic clock stand still, as it does for 16 ms on Windows."""
    clock = SimpleNamespace(monotonic=lambda: 5.0, perf_counter=time.perf_counter)
    for module in (reducer, session, throughput):
        monkeypatch.setattr(module, "time", clock)


def test_microbatch_within_a_step_of_the_clock_is_measured() -> None:
    pace = throughput.Throughput()
    before = time.perf_counter()
    pace.start_microbatch()
    start = time.perf_counter()
    while time.perf_counter() - start < 0.002:
        pass
    pace.finish_microbatch(8)
    assert 8 / (time.perf_counter() - before) <= pace.speed() <= 8 / 0.002


def test_sending_within_a_step_of_the_clock_is_measured() -> None:
    """Sending is not computation, so that its time is subtracted."""
    net = torch.nn.Linear(3, 1)
    gradients = reducer.GradientReducer(net.parameters(), bucket_bytes=4)
    gradients.start_last_microbatch(Twice(), 1.0)
    net(torch.ones(2, 3)).sum().backward()
    assert gradients.pop_sending_s() > 0.0


def test_wait_within_a_step_of_the_clock_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for other workers is not computation, so that its time is subtracted."""
    # Sending counts as waiting, too.
    monkeypatch.setattr(reducer.GradientReducer, "pop_sending_s", lambda self: 0.0)
    assert train(model(), epochs=1)._throughput.waited_s > 0.0
