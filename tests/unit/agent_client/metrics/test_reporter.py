"""Reporter: a worker's values reach the agent, and an agent that is away harms nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.metrics import reporter
from barnraise.agent_client.metrics.reporter import MetricsReporter
from barnraise.agent_client.metrics.requests import MetricsReport
from barnraise.core import metrics
from barnraise.core.errors import AgentError
from barnraise.core.metrics import ProcessValues, Sample, catalogue
from barnraise.core.metrics.sample import value_of


class FakeAgent:
    """Agent that keeps what it is told; ``is_away``: it does not answer."""

    def __init__(self) -> None:
        self.reports: list[MetricsReport] = []
        self.connections = 0
        self.is_away = False

    def connect(self, state: Path) -> FakeAgent:
        self.connections += 1
        return self

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        if self.is_away:
            raise AgentError("it is away")
        self.reports.append(msgspec.msgpack.decode(question, type=MetricsReport))
        return b""

    def close(self) -> None: ...


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    fake = FakeAgent()
    monkeypatch.setattr(ListenerClient, "connect", fake.connect)
    monkeypatch.setattr(reporter, "INTERVAL_S", 600.0)
    return fake


def test_report_has_the_values_of_worker_and_communication_process(agent: FakeAgent, tmp_path: Path) -> None:
    metrics.counter(catalogue.CHECKPOINTS).inc()
    own = MetricsReporter(tmp_path, "spiral", 1)
    wire = ProcessValues("communication", b"c" * 8, (Sample("barnraise_wire_sent_bytes_total", (), 7.0),))
    own.sources += [lambda: None, lambda: wire]
    own.report()
    own.close()
    first, last = agent.reports
    assert (first.run, first.local_rank) == ("spiral", 1)
    worker, communication = first.processes
    assert communication == wire
    assert (value_of(worker.samples, "barnraise_checkpoints_total") or 0) >= 1
    assert (value_of(worker.samples, "barnraise_worker_memory_bytes") or 0) > 1 << 20
    assert last.processes[0].instance == worker.instance
    assert agent.connections == 1


def test_agent_that_was_away_gets_the_next_report(agent: FakeAgent, tmp_path: Path) -> None:
    own = MetricsReporter(tmp_path, "spiral", 0)
    agent.is_away = True
    own.report()
    assert agent.reports == []
    agent.is_away = False
    own.report()
    own.close()
    assert len(agent.reports) == 2
    assert agent.connections == 2


def test_process_that_no_agent_launched_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BARNRAISE_LAUNCHED", raising=False)
    reporter.start_reporter()
    assert reporter._reporter is None
