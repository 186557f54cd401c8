"""Notices of real agents to a web server and a mail server, while machines die and agents restart."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client.notifications.requests import (
    ListTargetsRequest,
    RemoveTargetRequest,
    TargetRow,
    TargetsResponse,
)
from barnraise.agent_client.queue.requests import ListJobsRequest, QueueResponse
from barnraise.agent_client.run_requests import WatchRequest, WatchResponse
from benchmarks.agents.local import LocalAgents
from tests.notice_servers import HttpTarget, certificate, http_target, mail_target

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

PASSWORD = "S3CRET-of-the-mail"
TOKEN = "S3CRET-of-the-hook"
SESSION = """
import sys, time
from pathlib import Path
marks = Path(sys.argv[1])
import torch, barnraise
from torch.utils.data import DataLoader, TensorDataset
run = barnraise.init(checkpoint_s=5.0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(240, 8), torch.randn(240, 1))
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=12))
for epoch in run.epochs(1000):
    for batch in batches:
        for x, y in batch:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
        time.sleep(0.1)
        while (marks / "hang").exists():
            time.sleep(0.1)
    if (marks / "end").exists():
        raise ValueError("the label is S3CRET")
"""
PLAIN = """
import sys, time
from pathlib import Path
while not (Path(sys.argv[1]) / "go").exists():
    time.sleep(0.1)
"""


class NotifyingAgents(LocalAgents):
    """Agents that trust one certificate, and call a run stalled after three seconds."""

    def __init__(self, certificate: Path) -> None:
        super().__init__(3)
        self._certificate = certificate

    def environment(self, place: int) -> dict[str, str]:
        return {
            **super().environment(place),
            "SSL_CERT_FILE": str(self._certificate),
            "BARNRAISE_NOTIFICATIONS_STALLED_S": "3",
        }

    def add_target(self, *words: str, secrets: str = "", place: int = 0) -> str:
        """Add a target on a machine as a person does, and return what the command prints."""
        done = subprocess.run(
            [sys.executable, "-m", "barnraise.cli.main", "notify", "add", *words],
            env=self.environment(place),
            cwd=self.root,
            input=secrets,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout + done.stderr

    def targets(self, place: int = 0) -> tuple[TargetRow, ...]:
        """Return the targets of a machine."""
        return self.ask(place, ListTargetsRequest(), TargetsResponse).targets

    def step(self, run: str) -> int:
        """Return the newest step of a run that h0 knows."""
        row = self.ask(0, WatchRequest(run=run, wait_s=0), WatchResponse).row
        assert row.phase != "ended", row.sentence
        return row.progress.step if row.progress is not None else 0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> object:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def formed(tls: tuple[Path, object]) -> Iterator[NotifyingAgents]:
    with NotifyingAgents(tls[0]) as agents:
        agents.form()
        yield agents


@pytest.fixture
def agents(formed: NotifyingAgents) -> NotifyingAgents:
    formed.restore()
    for place in range(formed.count):
        for row in formed.targets(place):
            formed.ask(place, RemoveTargetRequest(row.name), TargetsResponse)
    return formed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "marks").mkdir()
    (tmp_path / "project" / "train.py").write_text(SESSION)
    (tmp_path / "project" / "wait.py").write_text(PLAIN)
    return tmp_path / "project"


def start(agents: NotifyingAgents, folder: Path, script: str, *words: str) -> str:
    """Start a run from h0 and return its name."""
    marks = str(folder.parent / "marks")
    done = agents.type(0, "run", "--detach", "--env", "agent", *words, script, marks, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def notices(server: HttpTarget) -> list[dict[str, object]]:
    return [json.loads(received.body) for received in server.received]


def events(server: HttpTarget) -> list[str]:
    return [str(notice["event"]) for notice in notices(server)]


def test_lost_machine_stall_and_failure_of_a_run_are_told_once(
    agents: NotifyingAgents, folder: Path, tls: tuple[Path, object]
) -> None:
    marks = folder.parent / "marks"
    with http_target(tls=tls[1]) as hook, mail_target(tls[1], PASSWORD) as mail:  # type: ignore[arg-type]
        printed = agents.add_target(
            "webhook=-", "--token", secrets=f"{hook.url}/S3CRET-of-the-url\n{TOKEN}\n"
        )
        printed += agents.add_target(
            *("email=me@home.org", "--smtp", f"127.0.0.1:{mail.port}", "--user", "me"),
            *("--on", "failed,machine-gone"),
            secrets=f"{PASSWORD}\n",
        )
        run = start(agents, folder, "train.py", "--restarts", "0")
        agents.until(lambda: agents.step(run) >= 5, "steps are committed")
        agents.kill(2)
        agents.until(lambda: events(hook) == ["machine-gone"], "the loss of h2 is told")
        step = agents.step(run)
        assert agents.type(1, "down", folder=folder).returncode == 0
        stopped = agents.agents[1]
        assert stopped is not None
        stopped.wait(60)
        agents.agents[1] = None
        agents.until(lambda: agents.step(run) > step + 5, "h0 trains alone")
        (marks / "hang").touch()
        agents.until(lambda: "stalled" in events(hook), "the stall is told")
        (marks / "end").touch()
        (marks / "hang").unlink()
        agents.until(lambda: "failed" in events(hook), "the failure is told")
        agents.until(lambda: len(mail.messages) == 2, "two mails have come")
        listed = agents.type(0, "notify", "list", folder=folder).stdout
        printed += listed + agents.type(0, "notify", "list", "--json", folder=folder).stdout
        # The clean stop of h1 is no notice.
        assert events(hook) == ["machine-gone", "stalled", "failed"]
    lost, stalled, failed = notices(hook)
    assert (lost["run"], lost["lost_machine"], lost["sender"]) == (run, "h2", "h0")
    assert "a step usually takes" in str(stalled["reason"])
    assert stalled["metric"] == "loss"
    assert isinstance(stalled["step"], int)
    assert failed["state"] == "failed"
    subjects = [message["Subject"] for message in mail.messages]
    assert subjects == [f"Barnraise: h2 is gone from {run}", f"Barnraise: {run} failed"]
    assert {received.headers["Authorization"] for received in hook.received} == {f"Bearer {TOKEN}"}
    assert "S3CRET" not in printed + json.dumps(notices(hook)) + agents.logs()
    assert not any("S3CRET" in message.as_string() for message in mail.messages)


def test_notice_survives_kills_of_the_agent_and_is_delivered_once(
    agents: NotifyingAgents, folder: Path
) -> None:
    with http_target([503, 503]) as hook:
        agents.add_target(f"webhook={hook.url}/hook")
        run = start(agents, folder, "wait.py", "--on", "h1")
        (folder.parent / "marks" / "go").touch()
        agents.until(lambda: len(hook.received) == 1, "the server has refused the notice")
        agents.until(lambda: agents.targets()[0].failure, "the failure is shown")
        (row,) = agents.targets()
        assert (row.waiting, row.failure) == (1, "the server answered 503")
        agents.kill(0)
        agents.start(0)
        agents.until(lambda: len(hook.received) == 3, "the notice is delivered")
        agents.until(lambda: agents.targets()[0].delivered == 1, "the delivery is noted")
        agents.kill(0)
        agents.start(0)
        agents.until(lambda: agents.members(0) == 3, "h0 is back")
        (row,) = agents.targets()
        assert (row.waiting, row.delivered, row.failure) == (0, 1, "")
        sent = notices(hook)
    assert len(sent) == 3
    assert {(notice["event"], notice["run"]) for notice in sent} == {("done", run)}
    assert len({notice["id"] for notice in sent}) == 1


def test_end_that_the_starter_missed_is_told_after_its_return(agents: NotifyingAgents, folder: Path) -> None:
    with http_target() as hook, http_target() as other:
        agents.add_target(f"webhook={hook.url}/hook", "--on", "done")
        agents.add_target(f"ntfy={other.url}/topic", "--on", "failed,stalled")
        run = start(agents, folder, "wait.py", "--on", "h1")
        agents.until(lambda: _phase(agents, 1, run) == "running", "the script runs")
        agents.kill(0)
        (folder.parent / "marks" / "go").touch()
        agents.until(lambda: _phase(agents, 1, run) == "ended", "the run ends without h0")
        assert hook.received == []
        agents.start(0)
        agents.until(lambda: events(hook) == ["done"], "the end is told")
        assert other.received == []
    (notice,) = notices(hook)
    assert notice["run"] == run


def test_notice_is_sent_once_while_the_disk_takes_nothing(agents: NotifyingAgents, folder: Path) -> None:
    """Another program keeps the outbox of h0 locked while the run ends."""
    with http_target() as hook:
        agents.add_target(f"webhook={hook.url}/hook")
        run = start(agents, folder, "wait.py", "--on", "h1")
        agents.until(lambda: _phase(agents, 0, run) == "running", "the script runs")
        with contextlib.closing(sqlite3.connect(agents.state(0) / "notifications.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            (folder.parent / "marks" / "go").touch()
            agents.until(lambda: events(hook) == ["done"], "the end is told")
            agents.until(lambda: "a restart may lose or repeat them" in _note(agents), "the person is told")
            shown = agents.type(0, "doctor", folder=folder).stdout
            assert "notifications.db cannot be written" in " ".join(shown.split())
            other.rollback()
        agents.until(lambda: not _note(agents), "all is saved")
        agents.kill(0)
        agents.start(0)
        agents.until(lambda: agents.members(0) == 3, "h0 is back")
        (row,) = agents.targets()
        assert (row.waiting, row.delivered) == (0, 1)
        assert events(hook) == ["done"]


def test_attempt_that_fails_while_the_adder_is_off_is_told_by_another_machine(
    agents: NotifyingAgents, folder: Path
) -> None:
    """All have a target. h0 adds the job and is off, h2 trains, so h1 or h2 sends."""
    begun = "(Path(sys.argv[1]) / 'begun').touch()"
    (folder / "fail.py").write_text(
        f"import sys\nfrom pathlib import Path\n{begun}\n{PLAIN}raise ValueError\n"
    )
    with http_target() as own, http_target() as other:
        agents.add_target(f"webhook={own.url}/own")
        for place in (1, 2):
            agents.add_target(f"webhook={other.url}/h{place}", place=place)
        words = ("--env", "agent", "--on", "h2", "--retries", "0", "fail.py", str(folder.parent / "marks"))
        added = agents.type(0, "queue", "add", *words, folder=folder)
        assert added.returncode == 0, added.stderr
        agents.until(lambda: (folder.parent / "marks" / "begun").exists(), "the script runs on h2")
        agents.kill(0)
        agents.until(lambda: agents.members(1) == 2, "the others go on")
        (folder.parent / "marks" / "go").touch()
        agents.until(lambda: events(other) == ["failed"], "the failure is told")
        agents.until(lambda: _job_state(agents, 1) == "failed", "the job has failed")
        agents.start(0)
        agents.until(lambda: _job_state(agents, 0) == "failed", "h0 learns of it")
        agents.until(lambda: agents.members(0) == 3, "h0 is back")
        assert events(other) == ["failed"]
        assert own.received == []
    (notice,) = notices(other)
    assert notice["sender"] in ("h1", "h2")


def _note(agents: NotifyingAgents) -> str:
    return agents.ask(0, ListTargetsRequest(), TargetsResponse).note


def _job_state(agents: NotifyingAgents, place: int) -> str:
    """Return the state of the newest job."""
    jobs = agents.ask(place, ListJobsRequest(), QueueResponse).jobs
    return max(jobs, key=lambda row: row.job).state


def _phase(agents: NotifyingAgents, place: int, run: str) -> str:
    return agents.ask(place, WatchRequest(run=run, wait_s=0), WatchResponse).row.phase
