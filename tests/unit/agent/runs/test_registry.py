"""Records and reports that a registry accepts, by the role of their sender and signer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.runs import messages
from barnraise.agent.runs import registry as registry_module
from barnraise.agent.runs.messages import RecordUpdate
from barnraise.agent.runs.registry import RunRegistry
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.core.errors import ProtocolError, RunError, TrustError
from barnraise.identity import NodeId, NodeKey
from barnraise.runs.record import (
    ENDED,
    RunOutcome,
    RunRecord,
    WorkerState,
    attempt_spec,
    sign_attempt,
    sign_spec,
)
from tests.unit.runs.control.test_lifecycle import KEY, NAMES, A, B, C, order, report
from tests.unit.runs.queue.test_job import job


class FakeContext:
    """An agent of a cluster in which all machines but the first have the given role."""

    def __init__(self, role: str) -> None:
        self.me, self.incarnation, self.storage, self.log = KEY.id, bytes(16), self, self
        self.member = self
        self.current = True
        self._role = role

    def is_current(self, now: float) -> bool:
        return self.current

    def role(self, node: NodeId) -> str:
        return "owner" if node.raw == A else self._role

    def name_of(self, node: NodeId) -> str:
        return NAMES[node.raw]

    def keep_run(self, name: str, value: bytes) -> None:
        return

    def linked_nodes(self) -> list[NodeId]:
        return []


@pytest.mark.parametrize("role", ["owner", "guest"])
def test_apply_report_of_guest_is_sanitized(role: str) -> None:
    progress = TrainingProgress(3, 9, "loss\x1b[2J", 0.5)
    sent = WorkerState(
        0,
        "running",
        wait_reason="\x1b[2J",
        pauses=(A,),
        pauses_in=1,
        pauses_why="\x1b[2J",
        progress=progress,
    )

    async def taken() -> WorkerState:
        context: Any = FakeContext(role)
        registry = RunRegistry(context)
        assert registry.apply(sign_spec(order(), KEY))
        registry.apply_report(NodeId(B), report("running", sent))
        return registry.runs["train-abcd"].reports[B].workers[0]

    received = asyncio.run(taken())
    if role == "owner":
        assert received == sent
    else:
        assert (received.pauses, received.pauses_in, received.pauses_why) == ((), 0, "")
        assert "\x1b" not in received.wait_reason
        assert received.progress == TrainingProgress(3, 9, "loss?[2J", 0.5)


def _take(sender: bytes | None, key: NodeKey, role: str) -> tuple[bool, list[str]]:
    """Apply a record signed by ``key``; all machines but the first have that role."""

    async def taken() -> tuple[bool, list[str]]:
        context: Any = FakeContext(role)
        registry = RunRegistry(context)
        record = sign_spec(order(by=key.id.raw), key)
        is_taken = registry.apply(record, None if sender is None else NodeId(sender))
        return is_taken, list(registry.runs)

    return asyncio.run(taken())


@pytest.mark.parametrize("sender", [A, None], ids=["owner", "own machine"])
def test_apply_spec_signed_by_guest_is_rejected(sender: bytes | None) -> None:
    guest = NodeKey.generate()
    with pytest.raises(RunError, match="was started by a guest"):
        _take(sender, guest, "guest")
    assert _take(sender, guest, "owner") == (True, ["train-abcd"]), "the role alone decides"


def test_apply_record_sent_by_guest_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="is a guest and cannot start"):
        _take(B, KEY, "guest")
    assert _take(B, KEY, "owner") == (True, ["train-abcd"])


@pytest.mark.parametrize("named", [(), (A, B)], ids=["all machines", "two machines"])
def test_attempt_runs_only_on_machines_that_its_job_names(named: tuple[bytes, ...]) -> None:
    signed = job(7, nodes=named, each="all").record.signed

    def attempt(*nodes: bytes) -> RunRecord:
        return sign_attempt(attempt_spec(signed, 1, nodes, ""), signed)

    async def taken() -> list[bool]:
        context: Any = FakeContext("owner")
        return [
            RunRegistry(context).apply(attempt(*nodes), NodeId(B)) for nodes in ((B,), (A, B), (C,), (B, C))
        ]

    assert asyncio.run(taken()) == [True, True, not named, not named]

    async def own() -> None:
        context: Any = FakeContext("owner")
        RunRegistry(context).apply(attempt(A, C))

    if named:
        with pytest.raises(TrustError, match="may not use box: the option --on of its job"):
            asyncio.run(own())


def test_attempt_may_use_the_new_key_of_a_machine_that_its_job_names() -> None:
    signed = job(7, nodes=(B,)).record.signed
    record = sign_attempt(attempt_spec(signed, 1, (C,), "cpu"), signed)

    async def taken(*, is_known: bool) -> bool:
        context: Any = FakeContext("owner")
        if is_known:  # the log has the change of the key
            context.role = lambda node: None if node.raw == B else "owner"
            context.current = lambda node: NodeId(C)
            context.member = FakeContext("owner")
        return RunRegistry(context).apply(record, NodeId(A))

    assert asyncio.run(taken(is_known=True))
    assert not asyncio.run(taken(is_known=False)), "it is sent again until this machine knows the key"


def test_apply_new_order_without_confirmed_view_waits() -> None:
    """A removed owner that reaches a machine first after its sleep starts nothing there."""

    async def taken() -> tuple[bool, list[str], list[str]]:
        context: Any = FakeContext("owner")
        registry = RunRegistry(context)
        context.current = False
        is_taken = registry.apply(sign_spec(order(), KEY), NodeId(B))
        registry.apply_held()
        before = list(registry.runs)
        context.current = True
        registry.apply_held()
        return is_taken, before, list(registry.runs)

    assert asyncio.run(taken()) == (False, [], ["train-abcd"])


@pytest.mark.parametrize(("confirmed_s", "shown"), [(0.1, ["train-abcd"]), (5.0, [])])
def test_wait_for_held_ends_with_the_quorum_or_the_time(confirmed_s: float, shown: list[str]) -> None:
    async def known() -> list[str]:
        context: Any = FakeContext("owner")
        registry = RunRegistry(context)
        context.current = False
        registry.apply(sign_spec(order(), KEY), NodeId(B))

        def confirm() -> None:
            context.current = True
            registry.apply_held()

        asyncio.get_running_loop().call_later(confirmed_s, confirm)
        await registry.wait_for_held(1.0)
        return list(registry.runs)

    assert asyncio.run(known()) == shown


def test_apply_held_order_of_machine_removed_meanwhile_is_dropped() -> None:
    async def taken() -> list[str]:
        context: Any = FakeContext("owner")
        registry = RunRegistry(context)
        context.current = False
        registry.apply(sign_spec(order(), KEY), NodeId(B))
        context.current, context._role = True, None
        registry.apply_held()
        return list(registry.runs)

    assert asyncio.run(taken()) == []


def test_apply_own_order_without_confirmed_view_starts() -> None:
    async def taken() -> bool:
        context: Any = FakeContext("owner")
        context.current = False
        return RunRegistry(context).apply(sign_spec(order(), KEY))

    assert asyncio.run(taken())


def test_spec_follows_machines_to_their_new_keys() -> None:
    """Tries a run that names a machine by its old key: the machine stays part of the run."""
    new = NodeKey.generate()

    async def followed() -> None:
        context: Any = FakeContext("owner")
        registry = RunRegistry(context)
        assert registry.apply(sign_spec(order(), KEY))
        entry = registry.runs["train-abcd"]
        before = entry.spec
        assert registry.view_changed() == []
        context.role = lambda node: None if node.raw == B else "owner"
        context.current = lambda node: new.id if node.raw == B else node
        assert registry.view_changed() == [entry]
        assert entry.spec.nodes == tuple(new.id.raw if node == B else node for node in before.nodes)
        assert entry.spec.by == before.by, "the signer of an order stays the same"
        assert registry.view_changed() == []

    asyncio.run(followed())


# runs that have ended


class MachineWithDisk(FakeContext):
    """An owner's machine with a disk."""

    def __init__(self) -> None:
        super().__init__("owner")
        self.disk: dict[str, bytes] = {}
        self.hashes: dict[str, bytes] = {}
        self.sent: list[tuple[NodeId, RunRecord]] = []

    def runs(self) -> list[tuple[str, bytes]]:
        return list(self.disk.items())

    def keep_run(self, name: str, value: bytes) -> None:
        self.disk.pop(name, None)  # the last change is last
        self.disk[name] = value

    def forget_run(self, name: str, digest: bytes) -> None:
        del self.disk[name]
        self.hashes[name] = digest

    def forgotten_runs(self) -> list[tuple[str, bytes]]:
        return list(self.hashes.items())

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        update = messages.decode(memoryview(message)[1:])
        assert isinstance(update, RecordUpdate)
        self.sent.append((node, update.record))


def record_of(run: str, at: float = 0.0) -> RunRecord:
    return sign_spec(order(run=run, at=at), KEY)


def ended(record: RunRecord, **fields: Any) -> RunRecord:
    outcome = RunOutcome(code=0, sentence="finished successfully")
    return replace(record, version=record.version + 1, phase=ENDED, outcome=outcome, **fields)


def with_disk(check: Callable[[RunRegistry, Any], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        context: Any = MachineWithDisk()
        await check(RunRegistry(context), context)

    asyncio.run(play())


def test_run_that_began_first_and_ended_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 3)

    async def check(registry: RunRegistry, context: Any) -> None:
        registry.apply(record_of("long"))
        for number in range(5):
            registry.apply(ended(record_of(f"short-{number}")))
        registry.apply(ended(record_of("long")))
        registry.apply(record_of("next"))
        assert list(registry.runs) == ["long", "short-4", "next"]
        assert sorted(context.disk) == sorted(registry.runs)
        again = RunRegistry(context)  # after a restart of the agent
        again.load()
        monkeypatch.setattr(registry_module, "_MAX_ENDED", 2)
        again.apply(record_of("after"))
        assert sorted(again.runs) == ["after", "long", "next"]

    with_disk(check)


def test_runs_that_are_needed_or_not_agreed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 2)

    async def check(registry: RunRegistry, context: Any) -> None:
        registry.needed_runs = lambda: {"needed"}
        registry.apply(ended(record_of("needed")))
        registry.apply(ended(record_of("alone"), provisional=1))
        for number in range(5):
            registry.apply(ended(record_of(f"short-{number}")))
        assert list(registry.runs) == ["needed", "alone", "short-3", "short-4"]

    with_disk(check)


def test_report_about_a_run_that_is_not_kept_is_logged_and_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(registry: RunRegistry, context: Any) -> None:
        registry.send_report(report("ended", results=bytes(32)))
        assert registry.runs == {}
        assert "a report about run train-abcd is not sent" in caplog.text

    with_disk(check)


def test_forgotten_run_is_not_revived_and_ends_on_a_machine_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 1)

    async def check(registry: RunRegistry, context: Any) -> None:
        forgotten: list[str] = []
        registry.on_forgotten = forgotten.append
        first = record_of("first")
        old = replace(first, version=2, phase="running", provisional=1)
        registry.apply(ended(first))
        registry.apply(record_of("second"))
        assert forgotten == ["first"]
        again = RunRegistry(context)  # after a restart of the agent
        again.load()
        for known in (registry, again):
            assert not known.apply(old, NodeId(B))
            assert not known.apply(ended(first), NodeId(B))
            assert "first" not in known.runs
        assert forgotten == ["first", "first"], "that machine may have written its record again"
        (node, answer), _ = context.sent
        assert node == NodeId(B), "the end of a run needs no answer"
        away: Any = MachineWithDisk()
        other = RunRegistry(away)
        settled: list[bool] = []
        other.on_settled = lambda entry, counts: settled.append(counts)
        away.report_event = lambda text: None
        other.apply(old)
        assert other.apply(answer, NodeId(A))
        entry = other.runs["first"]
        assert entry.has_ended
        assert entry.record.outcome is not None
        assert entry.record.outcome.sentence == "it ended while this machine was away"
        assert (settled, entry.record.nodes) == ([False], ())

    with_disk(check)


def test_later_run_with_the_name_of_a_forgotten_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 1)
    monkeypatch.setattr(registry_module, "MOST_FORGOTTEN", 2)

    async def check(registry: RunRegistry, context: Any) -> None:
        for number in range(4):
            registry.apply(ended(record_of(f"run-{number}")))
        assert registry.has_forgotten("run-2", record_of("run-2"))
        assert registry.apply(record_of("run-2", at=7.0), NodeId(B))
        assert not registry.has_forgotten("run-0", record_of("run-0")), "only the newest are remembered"

    with_disk(check)
