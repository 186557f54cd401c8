"""The notification service with an outbox on the disk: own runs only, retries, and stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.notifications import changes, service
from barnraise.agent.notifications.delivery import DELIVERED, Delivery
from barnraise.agent.notifications.notice import Notice
from barnraise.agent.notifications.service import NotificationService
from barnraise.agent_client.notifications.targets import EVENTS, Target, WebhookTarget
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.core.config import NotificationSettings, Settings
from barnraise.core.errors import AgentError, ConfigError
from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.identity import NodeId
from barnraise.runs.record import NodeReport, RunRecord, WorkerState
from tests.unit.agent.notifications.records import H0, H1, H2, ended, record
from tests.unit.agent.notifications.test_outbox import unwritable

HOOK = WebhookTarget("https://home.org/hook")


class Log:
    """Trust log in which h2 is the key that this machine had before."""

    def current(self, node: NodeId) -> NodeId:
        return NodeId(H0) if node == NodeId(H2) else node


@dataclass
class Context:
    """The part of an agent that the service uses; this machine is h0."""

    directory: Path
    me: NodeId = field(default_factory=lambda: NodeId(H0))
    log: Log = field(default_factory=Log)
    settings: Settings = field(
        default_factory=lambda: Settings(notifications=NotificationSettings(stalled_s=3.0))
    )
    events: list[str] = field(default_factory=list)
    hellos: int = 0
    unreachable: set[bytes] = field(default_factory=set)
    linked: list[bytes] = field(default_factory=lambda: [H1])

    @property
    def member(self) -> Any:
        return SimpleNamespace(
            peers={}, view=SimpleNamespace(nodes=(H0, H1)), unreachable=lambda now: self.unreachable
        )

    def name_of(self, node: NodeId) -> str:
        return f"h{node.raw[0]}"

    def linked_nodes(self) -> list[NodeId]:
        return [NodeId(node) for node in self.linked]

    def report_event(self, text: str) -> None:
        self.events.append(text)

    def machine_changed(self) -> None:
        self.hellos += 1


@dataclass
class Entry:
    """Run as the registry has it."""

    record: RunRecord
    by: bytes = H0
    run: str = "train-k3f9"
    job: bytes = b""
    at: float = field(default_factory=time.time)
    reports: dict[bytes, NodeReport] = field(default_factory=dict)

    @property
    def spec(self) -> Any:
        return SimpleNamespace(by=self.by, nodes=(H0, H1), job=self.job, at=self.at)

    @property
    def has_ended(self) -> bool:
        return self.record.phase == "ended"

    def report_step(self, step: int, node: bytes = H0) -> None:
        state = WorkerState(
            rank=0, state="running", start=1, progress=TrainingProgress(step, 100, "loss", 0.5)
        )
        self.reports[node] = NodeReport(
            run=self.run, incarnation=bytes(16), serial=1, stage="running", workers=(state,)
        )


class Scene:
    """Service of one agent; ``sent`` is what its targets got, ``results`` are their next answers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context = Context(folder)
        self.registry = SimpleNamespace(runs={})
        self.sent: list[Notice] = []
        self.results: list[Delivery] = []
        monkeypatch.setattr(service, "send", self._send)
        monkeypatch.setattr(service, "RETRIES", SteppedBackoff((0.01,)))
        monkeypatch.setattr(service, "_POLL_S", 0.01)
        monkeypatch.setattr(changes, "MOST_FILES_S", 0.0)

    def _send(self, target: Target, notice: Notice) -> Delivery:
        self.sent.append(notice)
        return self.results.pop(0) if self.results else DELIVERED

    @asynccontextmanager
    async def run(self) -> AsyncIterator[NotificationService]:
        """Run a service as the agent does, until the context exits."""
        made = NotificationService(self.context, self.registry)  # type: ignore[arg-type]
        made.load()
        jobs = [asyncio.ensure_future(job()) for job in made.jobs()]
        try:
            yield made
        finally:
            await made.stop()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def add_run(self, entry: Entry) -> Entry:
        self.registry.runs[entry.run] = entry
        return entry


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


async def until(truth: Any) -> None:
    async with asyncio.timeout(20):
        while not truth():
            await asyncio.sleep(0.005)


def end(made: NotificationService, entry: Entry) -> None:
    entry.record = ended(0, "finished successfully")
    made.on_record(entry)  # type: ignore[arg-type]


async def scenario_of_own_run(scene: Scene, by: bytes, expected: list[str]) -> None:
    async with scene.run() as made:
        made.add(HOOK, EVENTS)
        entry = scene.add_run(Entry(record(H0, H1), by=by))
        made.on_record(entry)  # type: ignore[arg-type]
        end(made, entry)
        made.on_record(entry)  # type: ignore[arg-type]
        await until(lambda: len(scene.sent) >= len(expected))
        await asyncio.sleep(0.05)
    assert [notice.event for notice in scene.sent] == expected


@pytest.mark.parametrize(("by", "expected"), [(H0, ["done"]), (H2, ["done"]), (H1, [])])
def test_only_the_machine_that_started_a_run_sends(scene: Scene, by: bytes, expected: list[str]) -> None:
    asyncio.run(scenario_of_own_run(scene, by, expected))


JOB = b"the spec of the job"
H3 = bytes([3]) * 32


def test_machine_that_is_named_sends_the_end_of_an_attempt_and_the_one_that_added_it_does_not(
    scene: Scene,
) -> None:
    """The record names h0 or h1 for the notices of a job that h1 added."""

    async def scenario() -> None:
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            for run, by, notifier in (("a", H1, H0), ("b", H0, H1), ("c", H1, b""), ("d", H0, b"")):
                entry = scene.add_run(Entry(record(H1), by=by, run=run, job=JOB))
                made.on_record(entry)  # type: ignore[arg-type]
                entry.record = replace(ended(1, "failed"), notifier=notifier)
                made.on_record(entry)  # type: ignore[arg-type]
            await until(lambda: len(scene.sent) == 2)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert [(notice.run, notice.event) for notice in scene.sent] == [("a", "failed"), ("d", "failed")]


@pytest.mark.parametrize("notifier", [b"", H0, H1, H3])
def test_exactly_one_machine_sends_what_a_version_calls_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notifier: bytes
) -> None:
    """All machines have a target and see the same record of a job that h1 added."""
    scenes = []
    for node in (H0, H1, H3):
        (tmp_path / f"h{node[0]}").mkdir()
        scenes.append(Scene(tmp_path / f"h{node[0]}", monkeypatch))
        scenes[-1].context.me = NodeId(node)

    async def scenario(scene: Scene) -> None:
        monkeypatch.setattr(service, "send", scene._send)
        entry = scene.add_run(Entry(record(H1), by=H1, job=JOB))
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
            entry.record = replace(ended(1, "failed"), notifier=notifier)
            made.on_record(entry)  # type: ignore[arg-type]
            await asyncio.sleep(0.1)

    for scene in scenes:
        asyncio.run(scenario(scene))
    assert [scene.context.me.raw for scene in scenes if scene.sent] == [notifier or H1]


def test_machine_tells_only_what_happens_while_it_is_named(scene: Scene) -> None:
    async def scenario() -> None:
        entry = scene.add_run(Entry(record(H0, H1, H2), by=H1, job=JOB))
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
            entry.record = replace(record(H0, H1), version=2, generation=2, why="h2 disappeared; x")
            made.on_record(entry)  # type: ignore[arg-type]
            change = {"version": 3, "generation": 3, "why": "h1 disappeared; x", "notifier": H0}
            entry.record = replace(record(H0), **change)
            made.on_record(entry)  # type: ignore[arg-type]
            entry.record = replace(ended(0, "finished"), notifier=b"")  # h1 is back
            made.on_record(entry)  # type: ignore[arg-type]
            await until(lambda: scene.sent)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert [(notice.event, notice.lost_machine) for notice in scene.sent] == [("machine-gone", "h1")]


@pytest.mark.parametrize(
    ("entry", "count"),
    [
        (Entry(ended(1, "failed"), job=JOB), 1),
        (Entry(ended(1, "failed"), job=JOB, at=1000.0), 0),
        (Entry(ended(1, "failed"), job=JOB, by=H1), 0),
        (Entry(ended(1, "failed")), 0),
    ],
    ids=["missed", "old", "of another", "no job"],
)
def test_attempt_that_began_and_ended_while_the_agent_was_off_is_told_once(
    scene: Scene, entry: Entry, count: int
) -> None:
    async def scenario() -> None:
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            scene.add_run(entry)
            made.on_record(entry)  # type: ignore[arg-type]
            await until(lambda: len(scene.sent) == count)
            scene.registry.runs.clear()  # the registry forgets old runs
            other = scene.add_run(Entry(record(H0), run="other"))
            made.on_record(other)  # type: ignore[arg-type]
            scene.add_run(entry)  # and another machine sends it again
            made.on_record(entry)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert len(scene.sent) == count


def test_attempt_that_ended_before_there_was_a_target_is_not_told(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.run() as made:
            entry = scene.add_run(Entry(ended(1, "failed"), job=JOB))
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert scene.sent == []


def test_other_machines_learn_whether_there_is_a_target_for_failures(scene: Scene) -> None:
    states: list[tuple[bool, int]] = []

    async def scenario() -> None:
        async with scene.run() as made:
            states.append((made.takes_failures, scene.context.hellos))
            made.add(WebhookTarget("https://home.org/done"), ("done",))
            states.append((made.takes_failures, scene.context.hellos))
            made.add(HOOK, EVENTS)
            states.append((made.takes_failures, scene.context.hellos))
        async with scene.run() as made:
            states.append((made.takes_failures, scene.context.hellos))
            made.remove("webhook-2")
            states.append((made.takes_failures, scene.context.hellos))

    asyncio.run(scenario())
    assert states == [(False, 0), (False, 1), (True, 2), (True, 3), (False, 4)]


def test_success_is_told_when_its_files_are_collected_also_after_a_restart(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MOST_FILES_S", 60.0)

    async def scenario() -> None:
        entry = scene.add_run(Entry(record(H0, H1)))
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
            end(made, entry)
            await asyncio.sleep(0.05)
            assert scene.sent == []
        async with scene.run() as made:
            made.on_record(entry)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            assert scene.sent == []
            entry.report_step(9)
            entry.reports[H0] = replace(entry.reports[H0], collected=True, words="no space for the results")
            await until(lambda: scene.sent)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert [notice.reason for notice in scene.sent] == ["finished successfully; h0: no space for the results"]


def test_run_that_ended_before_there_was_a_target_is_not_told(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.run() as made:
            old = scene.add_run(Entry(ended(1, "failed")))
            made.add(HOOK, EVENTS)
            made.on_record(old)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert scene.sent == []


def test_run_that_is_active_when_a_target_comes_is_told(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.run() as made:
            entry = scene.add_run(Entry(record(H0, H1)))
            made.on_record(entry)  # type: ignore[arg-type]
            made.add(HOOK, EVENTS)
            end(made, entry)
            await until(lambda: scene.sent)

    asyncio.run(scenario())
    assert [notice.event for notice in scene.sent] == ["done"]


def test_refused_notice_is_tried_again_and_the_end_of_it_is_reported(scene: Scene) -> None:
    async def scenario() -> None:
        scene.results = [Delivery("the server answered 503")] * 2
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            entry = scene.add_run(Entry(record(H0, H1)))
            made.on_record(entry)  # type: ignore[arg-type]
            end(made, entry)
            await until(lambda: made.table()[0].delivered == 1)
            assert len(scene.sent) == 3
            assert scene.context.events == []
            scene.results = [Delivery("the server answered 404", is_final=True)]
            entry = scene.add_run(Entry(record(H0), run="train-2"))
            made.on_record(entry)  # type: ignore[arg-type]
            end(made, entry)
            await until(lambda: made.table()[0].dropped == 1)

    asyncio.run(scenario())
    assert scene.context.events == [
        "the notice 'train-2 is done' is not sent to webhook: the server answered 404"
    ]


def test_notice_that_waits_is_sent_after_the_next_start(scene: Scene) -> None:
    async def scenario() -> None:
        scene.results = [Delivery("the server answered 503")] * 500
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            entry = scene.add_run(Entry(record(H0, H1)))
            made.on_record(entry)  # type: ignore[arg-type]
            end(made, entry)
            await until(lambda: scene.sent)
        scene.results = []
        async with scene.run() as made:
            await until(lambda: made.table()[0].delivered == 1)

    asyncio.run(scenario())
    assert len({notice.id for notice in scene.sent}) == 1


def test_change_while_the_agent_was_off_is_told_after_its_start(scene: Scene) -> None:
    async def scenario() -> None:
        entry = scene.add_run(Entry(record(H0, H1, H2)))
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
        entry.record = replace(record(H0, H1), version=2, generation=2, why="h2 disappeared; x")
        async with scene.run() as made:
            made.on_record(entry)  # type: ignore[arg-type]
            made.on_record(entry)  # type: ignore[arg-type]
            await until(lambda: scene.sent)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert [(notice.event, notice.lost_machine) for notice in scene.sent] == [("machine-gone", "h2")]


def test_stall_is_told_once_for_each_step(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are looked at as if each look came after a second."""
    monkeypatch.setattr(service, "_POLL_S", 1000.0)

    async def scenario() -> None:
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            entry = scene.add_run(Entry(record(H0, H1)))

            def look(step: int, seconds: int) -> None:
                entry.report_step(step)
                for _ in range(seconds):
                    made._look(1.0)

            for step in range(5):
                look(step, 1)
            look(4, 10)
            assert scene.sent == []
            look(4, 60)
            await until(lambda: len(scene.sent) == 1)
            look(5, 60)
            await until(lambda: len(scene.sent) == 2)
            look(100, 60)  # all steps are done: the script only ends
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert [notice.step for notice in scene.sent] == [4, 5]
    assert scene.sent[0].reason == "no step for 11 s, and a step usually takes 1 s"
    assert (scene.sent[0].metric, scene.sent[0].value) == ("loss", 0.5)


@pytest.mark.parametrize("loss", ["link", "heartbeats"])
def test_run_whose_main_machine_is_not_heard_has_no_news_and_is_not_stalled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """The main worker is on h1. h0 started the run, and does not know whether it goes on."""
    monkeypatch.setattr(service, "_POLL_S", 1000.0)

    async def scenario() -> None:
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            entry = scene.add_run(Entry(record(H1, H2)))

            def look(step: int, seconds: int) -> None:
                entry.report_step(step, H1)
                for _ in range(seconds):
                    made._look(1.0)

            for step in range(5):
                look(step, 1)
            if loss == "link":
                scene.context.linked = [H2]
            else:
                scene.context.unreachable = {H1}
            look(4, 60)
            await until(lambda: len(scene.sent) == 1)
            scene.context.linked, scene.context.unreachable = [H1], set()
            look(70, 5)  # it has trained all the time
            await asyncio.sleep(0.05)
            assert len(scene.sent) == 1
            look(70, 60)  # now it is known to make no step
            await until(lambda: len(scene.sent) == 2)

    asyncio.run(scenario())
    first, second = scene.sent
    assert (first.event, first.state, first.title) == ("no-news", "unknown", "no news of train-k3f9")
    assert first.reason == "no news from h1 for 11 s; the run may go on there"
    assert (second.event, second.step) == ("stalled", 70)


def test_run_that_is_heard_again_is_stalled_only_after_it_could_report(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_POLL_S", 1000.0)

    async def scenario() -> None:
        async with scene.run() as made:
            made.add(HOOK, ("stalled",))
            entry = scene.add_run(Entry(record(H1, H2)))
            for step in range(5):
                entry.report_step(step, H1)
                made._look(1.0)
            scene.context.linked = []
            for _ in range(60):
                made._look(1.0)
            scene.context.linked = [H1]
            made._look(1.0)  # its report is on the way
            entry.report_step(64, H1)
            made._look(1.0)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert scene.sent == []


def test_paused_run_is_not_stalled(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_POLL_S", 1000.0)

    async def scenario() -> None:
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            entry = scene.add_run(Entry(record(H0)))
            for step in range(5):
                entry.report_step(step)
                made._look(1.0)
            entry.reports[H0] = replace(entry.reports[H0], paused="its user paused it")
            for _ in range(100):
                made._look(1.0)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert scene.sent == []


def test_target_that_hangs_does_not_keep_the_agent_from_stopping(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> float:
        gate = threading.Event()
        monkeypatch.setattr(service, "send", lambda target, notice: gate.wait(60) and DELIVERED)
        monkeypatch.setattr(service, "_STOP_S", 0.1)
        loop = asyncio.get_running_loop()
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            entry = scene.add_run(Entry(record(H0, H1)))
            made.on_record(entry)  # type: ignore[arg-type]
            end(made, entry)
            await asyncio.sleep(0.05)
            started = loop.time()
        gate.set()
        return loop.time() - started

    assert asyncio.run(scenario()) < 5.0


def test_target_that_takes_too_long_counts_as_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> str:
        gate = threading.Event()
        monkeypatch.setattr(service, "send", lambda target, notice: gate.wait(60) and DELIVERED)
        monkeypatch.setattr(service, "LONGEST_S", 0.05)
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            (row,) = await made.test(None)
        gate.set()
        return row.failure

    assert "longer than" in asyncio.run(scenario())


def test_error_that_quotes_a_url_is_logged_without_its_text(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = WebhookTarget("https://S3CRET.home.org/S3CRET")

    def fail(target: Target, notice: Notice) -> Delivery:
        raise RuntimeError(target.url)  # type: ignore[union-attr]

    async def scenario() -> str:
        async with scene.run() as made:
            made.add(secret, EVENTS)
            (row,) = await made.test(None)
            return f"{row} {made.table()}"

    monkeypatch.setattr(service, "send", fail)
    shown = asyncio.run(scenario())
    assert "an internal error: RuntimeError" in shown
    assert "a notice could not be sent: RuntimeError" in caplog.text
    assert "S3CRET" not in caplog.text + shown


def test_unusable_target_and_unknown_name_are_refused(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.run() as made:
            with pytest.raises(ConfigError):
                made.add(WebhookTarget("file:///etc/passwd"), EVENTS)
            with pytest.raises(AgentError, match="there is no target"):
                await made.test(None)
            with pytest.raises(AgentError, match="no target ntfy"):
                made.remove("ntfy")
        with pytest.raises(AgentError, match="do not work now"):
            made.table()

    asyncio.run(scenario())


def test_notices_are_sent_once_and_saved_later_while_the_disk_takes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SAVE_AGAIN_S", 0.01)
    monkeypatch.setattr(service, "_IDLE_S", 0.01)  # a note that fails must not repeat the notice

    async def scenario() -> None:
        entry = scene.add_run(Entry(record(H0, H1, H2)))
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
            with unwritable(scene.context.directory):
                entry.record = replace(record(H0, H1), version=2, generation=2, why="h2 disappeared; x")
                made.on_record(entry)  # type: ignore[arg-type]
                end(made, entry)
                await until(lambda: made.table()[0].delivered == 2)
                await asyncio.sleep(0.3)
                assert "a restart may lose or repeat them" in made.problem
            await until(lambda: not made.problem)
        async with scene.run() as made:
            made.on_record(entry)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            assert made.table()[0].delivered == 2

    asyncio.run(scenario())
    assert [notice.event for notice in scene.sent] == ["machine-gone", "done"]
    beginnings = [event.partition(":")[0] for event in scene.context.events]
    assert beginnings == [
        "notifications are sent, but a restart may lose or repeat them",
        "notifications are saved again",
    ]


def test_outbox_that_cannot_be_opened_is_opened_later_and_tells_what_it_missed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_OPEN_AGAIN_S", 0.01)
    path = scene.context.directory / "notifications.db"

    async def scenario() -> None:
        entry = scene.add_run(Entry(record(H0, H1)))
        async with scene.run() as made:
            made.add(HOOK, EVENTS)
            made.on_record(entry)  # type: ignore[arg-type]
        path.chmod(0o666)  # others may write to it, so it is not used
        async with scene.run() as made:
            end(made, entry)
            await asyncio.sleep(0.05)
            assert "no notifications are sent" in made.problem
            path.chmod(0o600)
            await until(lambda: scene.sent)
            assert made.problem == ""

    asyncio.run(scenario())
    assert [notice.event for notice in scene.sent] == ["done"]
    assert len(scene.context.events) == 2


def test_damaged_outbox_is_reported_and_runs_go_on(scene: Scene) -> None:
    (scene.context.directory / "notifications.db").write_bytes(b"no database" * 100)
    (scene.context.directory / "notifications.db").chmod(0o600)

    async def scenario() -> None:
        async with scene.run() as made:
            made.on_record(Entry(record(H0)))  # type: ignore[arg-type]
            with pytest.raises(AgentError, match=r"notifications\.db"):
                made.table()

    asyncio.run(scenario())
    assert len(scene.context.events) == 1
    assert "no notifications are sent" in scene.context.events[0]
