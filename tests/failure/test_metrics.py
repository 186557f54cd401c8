"""Metrics of a real run on real agents: every series is filled, and Prometheus reads all of them.

The dashboard's expressions are asked of a real Prometheus. A worker dies on the way, and counters go on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from barnraise.core.metrics.catalogue import BY_SAMPLE_NAME, CATALOGUE
from benchmarks.agents.local import LocalAgents
from tests.arch.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import barnraise
run = barnraise.init(checkpoint_s=1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=32)
model, optimizer, batches = run.prepare(model, optimizer, loader)
print(sum(run.map(lambda x: x, range(8))))
for epoch in run.epochs(100_000):
    for batch in batches:
        for (x,) in batch:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.01)
"""
# What this computer cannot show, or what this run does not meet.
NOT_HERE = {
    *(series.name for series in CATALOGUE if series.source in ("hub", "device")),
    "barnraise_torch_memory_bytes",  # of accelerators
    "barnraise_queue_jobs",
    "barnraise_wire_retransmits_total",  # Linux
    "barnraise_disk_used_bytes",  # measured now and then
    "barnraise_activation_sent_bytes_total",  # of split models
    "barnraise_moved_state_bytes_total",
}
DASHBOARD = ROOT / "docs" / "metrics" / "dashboard.json"
_PATIENCE_S = 240.0


class MeteredAgents(LocalAgents):
    """Two agents that serve metrics to Prometheus."""

    def __init__(self) -> None:
        super().__init__(2)
        self.metric_ports = [_free_port(), _free_port()]

    def environment(self, place: int) -> dict[str, str]:
        return {
            **super().environment(place),
            "BARNRAISE_METRICS_PORT": str(self.metric_ports[place]),
        }

    def scrape(self, place: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Return all samples of one machine, as Prometheus reads them."""
        url = f"http://127.0.0.1:{self.metric_ports[place]}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise AssertionError(f"{error}\n{self.logs()}") from error
            return {}  # it is busy
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def health(self, place: int) -> tuple[int, dict[str, Any]]:
        """Return the status code and the content of one machine's health, as a monitor polls it."""
        url = f"http://127.0.0.1:{self.metric_ports[place]}/health"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {}

    def value(self, place: int, name: str) -> float:
        """Return the sum of the samples with this name."""
        return sum(value for (sample_name, _), value in self.scrape(place).items() if sample_name == name)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeteredAgents]:
    with MeteredAgents() as agents:
        agents.form()
        folder = tmp_path_factory.mktemp("project")
        (folder / "train.py").write_text(SCRIPT)
        started = agents.type(0, "run", "--detach", "train.py", folder=folder)
        assert started.returncode == 0, started.stderr
        for place in range(2):
            agents.until(lambda place=place: agents.value(place, "barnraise_steps_total") > 5, "steps")  # type: ignore[misc]
        yield agents


def test_every_series_is_filled_by_a_real_run(training: MeteredAgents) -> None:
    _kill_worker(training, 1)
    wanted = {name for name, series in BY_SAMPLE_NAME.items() if series.name not in NOT_HERE}
    seen: set[str] = set()

    def is_complete() -> bool:
        for place in range(2):
            seen.update(name for (name, _) in training.scrape(place))
        return wanted <= seen

    try:
        training.until(is_complete, "all series have values", _PATIENCE_S)
    except AssertionError:
        assert sorted(wanted - seen) == []
        raise
    assert seen <= set(BY_SAMPLE_NAME)


def test_counters_go_on_when_a_worker_starts_again(training: MeteredAgents) -> None:
    training.until(lambda: training.value(1, "barnraise_steps_total") > 5, "it trains")
    before = training.value(1, "barnraise_steps_total")
    _kill_worker(training, 1)
    newest = before

    def has_more() -> bool:
        nonlocal newest
        steps = [value for (name, _), value in training.scrape(1).items() if name == "barnraise_steps_total"]
        if steps:  # they disappear while no worker runs
            assert steps[0] >= newest
            newest = steps[0]
        return newest > before + 2

    training.until(has_more, "the steps are counted on", _PATIENCE_S)


def test_command_prints_words_and_units(training: MeteredAgents, tmp_path: Path) -> None:
    shown = training.type(0, "metrics", "step", folder=tmp_path).stdout
    assert re.search(r"steps +train-\w+, worker 0 +[\d,]+\n", shown), shown
    assert re.search(r"step phase +train-\w+, worker 0, compute +[\d.]+ (ms|s|min)\n", shown), shown
    assert f"http://127.0.0.1:{training.metric_ports[0]}/metrics" in shown
    machine = json.loads(training.type(0, "metrics", "--json", folder=tmp_path).stdout)["metrics"]
    names = {entry["name"] for entry in machine}
    assert {
        "barnraise_machines",
        "barnraise_wire_sent_bytes_total",
        "barnraise_device_memory_used_bytes",
    } <= names
    assert training.type(0, "metrics", "nonsense", folder=tmp_path).returncode == 1


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)")
def test_prometheus_answers_every_expression_of_the_dashboard(
    training: MeteredAgents, tmp_path: Path
) -> None:
    rules = ROOT / "docs" / "metrics" / "alerts.yml"
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True, capture_output=True)
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in training.metric_ports)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules}]\nscrape_configs:\n"
        f"  - job_name: barnraise\n    static_configs: [{{targets: [{targets}]}}]\n"
    )
    port = _free_port()
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    try:
        training.until(lambda: _answers(port, "barnraise_recovery_seconds_count > 0"), "it scrapes")
        _kill_worker(training, 1)  # figures of recoveries need one while Prometheus looks
        waiting = set(_expressions())
        assert len(waiting) > 20
        give_up = time.monotonic() + _PATIENCE_S
        while waiting and time.monotonic() < give_up:
            time.sleep(1.0)
            waiting = {expression for expression in waiting if not _answers(port, expression)}
        assert sorted(waiting) == [], (tmp_path / "log").read_text()[-2000:]
        health = _ask(port, "/api/v1/rules")["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in health} == {"ok"}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def test_monitor_polls_health(training: MeteredAgents) -> None:
    training.until(lambda: training.health(0)[1].get("runs") == 1, "it answers")
    status, health = training.health(0)
    assert status == 200
    assert (health["online"], health["machines"]) == (2, 2)
    program = "import barnraise; health = barnraise.health(); print(health.state, health.machines)"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=training.environment(0),
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    assert printed.split() == [health["state"].encode(), b"2"]


def test_loss_of_an_agent_is_counted(training: MeteredAgents) -> None:
    before = training.value(0, "barnraise_agent_link_losses_total")
    training.kill(1)
    training.until(
        lambda: training.value(0, "barnraise_agent_link_losses_total") > before, "the loss is counted", 60.0
    )
    training.until(lambda: training.health(0)[1].get("online") == 1, "its health tells of it", 60.0)


def _expressions() -> list[str]:
    """Return the expressions of the dashboard, with what Grafana would write for its variables."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    given = {"$run": ".*", "$__rate_interval": "10s", "$__range": "1m"}
    queries = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in given.items():
                expression = expression.replace(variable, value)
            queries.append(expression)
    return queries


def _answers(port: int, expression: str) -> bool:
    try:
        answer = _ask(port, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
    except OSError:
        return False  # it is starting
    values = [float(row["value"][1]) for row in answer["data"]["result"]]
    return any(value == value for value in values)


def _ask(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.loads(answer.read())


def _kill_worker(agents: MeteredAgents, place: int) -> None:
    """Kill the worker of one agent, and not its communication process."""
    agent = agents.agents[place]
    assert agent is not None
    for process in psutil.Process(agent.pid).children(recursive=True):
        if process.name().startswith("python") and "train.py" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError("no worker runs")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
