"""The controller of runs does not count a removed machine among those that are present."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.runs import registry as registry_module
from barnraise.agent.runs.controller import RunController
from barnraise.agent.runs.registry import RunEntry, RunRegistry
from barnraise.agent_client.kv_messages import LOBBY, CountResult, KvDone, Namespace
from barnraise.core.errors import MembershipError, ProtocolError, RunError
from barnraise.identity import NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.runs.control.lifecycle import next_record
from barnraise.runs.record import RunRecord, RunSpec, encode_record, sign_spec
from tests.unit.agent.runs.test_registry import MachineWithDisk, ended, record_of
from tests.unit.agent.test_record_store import StoreOfCluster
from tests.unit.runs.control.test_lifecycle import KEY, at_work, order, report

NAS, BOX = NodeKey.generate(), NodeKey.generate()
LOG = TrustLog.found(KEY, "mac")
LOG = LOG.extended(LOG.admit(KEY, NAS.id, "owner", "nas"))
LOG = LOG.extended(LOG.admit(KEY, BOX.id, "guest", "box"))
NODES = (KEY.id.raw, NAS.id.raw, BOX.id.raw)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("removed", [NAS, BOX])
def test_run_goes_on_without_a_machine_that_was_removed(removed: NodeKey, elastic: bool) -> None:
    """A machine is removed while its worker is in a running group; the view still has the machine."""
    spec = order(nodes=NODES, by=KEY.id.raw)
    context: Any = SimpleNamespace(
        me=KEY.id,
        log=LOG,
        name_of=lambda node: node.short,
        member=SimpleNamespace(view=SimpleNamespace(nodes=NODES)),
    )

    async def decided() -> tuple[RunRecord | None, RunRecord | None]:
        controller = RunController(context, SimpleNamespace())  # type: ignore[arg-type]
        entry = RunEntry(sign_spec(spec, KEY), spec, asyncio.get_running_loop().time())

        def reconcile() -> RunRecord | None:
            return next_record(entry.record, controller.observe(entry))

        entry.reports = {node: report() for node in NODES}
        for _ in range(2 if elastic else 1):
            changed = reconcile()
            assert changed is not None
            entry.record = changed
            entry.reports = {node: replace(at_work(changed, node), elastic=elastic) for node in NODES}
        before = reconcile()
        context.log = LOG.extended(LOG.revoke(KEY, removed.id))
        return before, reconcile()

    before, after = asyncio.run(decided())
    assert before is None
    assert after is not None
    if elastic:
        assert removed.id.raw not in after.nodes, "its group continues without it"
    else:
        assert after.phase == "restarting"


@pytest.mark.parametrize(
    ("view", "by", "expected"),
    [
        (NODES, KEY, b""),
        ((NAS.id.raw, BOX.id.raw), KEY, NAS.id.raw),
        ((BOX.id.raw,), KEY, b""),  # a guest sends nothing
        ((BOX.id.raw, NAS.id.raw), KEY, NAS.id.raw),
        ((KEY.id.raw, BOX.id.raw), NAS, KEY.id.raw),
    ],
    ids=["adder-here", "owner-here", "guest-here", "guest-first", "added-elsewhere"],  # keys are random
)
def test_attempt_names_an_owner_with_a_target_while_the_machine_that_added_the_job_is_away(
    view: tuple[bytes, ...], by: NodeKey, expected: bytes
) -> None:
    context: Any = SimpleNamespace(
        me=KEY.id,
        log=LOG,
        name_of=lambda node: node.short,
        member=SimpleNamespace(view=SimpleNamespace(nodes=view)),
        sends_notices=lambda node: True,
    )

    async def named(spec: RunSpec) -> bytes:
        controller = RunController(context, SimpleNamespace())  # type: ignore[arg-type]
        entry = RunEntry(sign_spec(order(by=KEY.id.raw), KEY), spec, 0.0)
        return controller.observe(entry).notifier

    assert asyncio.run(named(order(by=by.id.raw, nodes=NODES, job=b"a job"))) == expected
    assert asyncio.run(named(order(by=by.id.raw, nodes=NODES))) == b"", "a run without a job"


class _LyingStore:
    """A key-value store that a removed machine serves: it answers with a record of its own choice."""

    def __init__(self, answer: RunRecord) -> None:
        self._answer = encode_record(answer)

    async def compare_set(self, *_: object) -> bytes:
        return self._answer


@pytest.mark.parametrize("is_current", [True, False])
def test_record_of_the_store_is_applied_only_if_a_quorum_confirms_the_view(is_current: bool) -> None:
    ours, theirs = (sign_spec(order(nodes=NODES, by=key.id.raw), key) for key in (KEY, NAS))
    applied: list[RunRecord] = []

    def apply(record: RunRecord, *_: object, **__: object) -> bool:
        applied.append(record)
        return True

    context: Any = SimpleNamespace(me=KEY.id, member=SimpleNamespace(is_current=lambda now: is_current))
    registry: Any = SimpleNamespace(
        apply=apply, runs={order().run: SimpleNamespace()}, has_forgotten=lambda *_: False
    )

    async def write() -> None:
        controller = RunController(context, registry)
        controller._records = _LyingStore(theirs)  # type: ignore[assignment]
        controller._broadcast = lambda entry: None  # type: ignore[method-assign]
        await controller.write(None, ours)

    with pytest.raises(RunError if is_current else MembershipError):
        asyncio.run(write())
    assert applied == ([theirs] if is_current else [])


def test_record_of_another_run_in_the_store_is_rejected() -> None:
    ours = sign_spec(order(nodes=NODES, by=KEY.id.raw), KEY)
    other = sign_spec(order(run="other-0001", nodes=NODES, by=NAS.id.raw), NAS)
    context: Any = SimpleNamespace(me=KEY.id, member=SimpleNamespace(is_current=lambda now: True))

    async def write() -> None:
        registry: Any = SimpleNamespace(has_forgotten=lambda *_: False)
        controller = RunController(context, registry)
        controller._records = _LyingStore(other)  # type: ignore[assignment]
        await controller.write(None, ours)

    with pytest.raises(ProtocolError, match="another run"):
        asyncio.run(write())


@pytest.mark.parametrize("stored_version", [1, 3])
def test_store_that_lost_its_contents_takes_the_known_version_of_a_run(stored_version: int) -> None:
    """A coordinator that did not know the run of a job wrote its first record into the empty store."""
    first = sign_spec(order(nodes=NODES, by=KEY.id.raw), KEY)
    known, stored = replace(first, version=3), replace(first, version=stored_version, phase="running")
    desired = replace(known, version=4)
    values = [encode_record(stored)]

    class Store:
        async def compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
            if expected == values[0]:
                values[0] = desired
            return values[0]

    context: Any = SimpleNamespace(me=KEY.id, member=SimpleNamespace(is_current=lambda now: True))

    async def write() -> None:
        entry = RunEntry(known, order(nodes=NODES, by=KEY.id.raw), asyncio.get_running_loop().time())
        registry: Any = SimpleNamespace(apply=lambda *_, **__: True, runs={entry.run: entry})
        controller = RunController(context, registry)
        controller._records = Store()  # type: ignore[assignment]
        controller._broadcast = lambda entry: None  # type: ignore[method-assign]
        await controller.write(entry, desired)

    if stored_version == 1:
        asyncio.run(write())
        assert values[0] == encode_record(desired)
    else:
        with pytest.raises(RunError, match="changed at the same time"):
            asyncio.run(write())
        assert values[0] == encode_record(stored), "a quorum has decided meanwhile"


def test_store_does_not_grow_with_the_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 3)

    async def play() -> None:
        context: Any = MachineWithDisk()
        context.kv = store = StoreOfCluster()
        registry = RunRegistry(context)
        controller = RunController(context, registry)
        counts = []
        for number in range(12):
            record = record_of(f"run-{number}")
            entry = await controller.write(None, record)
            await controller.write(entry, ended(record))
            await controller._records.delete_some(registry.runs.__contains__)
            counted = await store.request(CountResult(Namespace("@runs", LOBBY), bytes(16), 1, b""), 1.0)
            assert isinstance(counted, KvDone)
            counts.append(counted.count)
        assert counts == [1, 2, 3, *([3] * 9)]
        with pytest.raises(RunError, match="run-0 has ended, and its record is not kept any more"):
            await controller.write(None, record_of("run-0"))

    asyncio.run(play())
