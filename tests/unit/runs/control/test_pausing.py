"""Pausing of machines that rank 0 asks for."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from barnraise.runs.control.lifecycle import next_record
from barnraise.runs.record import NodeReport, RunRecord, RunSpec, WorkerState
from tests.unit.runs.control.test_lifecycle import A, B, C, at_work, facts, order, report, running

D = bytes([3]) * 32
WHY = "mac and pc are predicted to be 2.10 times as fast without it"


@pytest.fixture
def spec() -> RunSpec:
    return order()


def session(spec: RunSpec) -> RunRecord:
    record = replace(running(spec), elastic=True)
    assert record.nodes == (A, B, C)
    return record


def reports_of(
    record: RunRecord, requests: dict[bytes, tuple[bytes, ...]], **options: int
) -> dict[bytes, NodeReport]:
    """Return reports of busy machines, some of which ask for a pause."""
    given = {"pauses_in": record.generation, **options}
    reports = {}
    for node in (A, B, C):
        workers = [WorkerState(rank, "running") for rank in record.ranks_of(node)]
        workers_with_request = [
            replace(worker, pauses=requests.get(node, ()), pauses_why=WHY, **given) for worker in workers
        ]
        reports[node] = at_work(record, node, **{str(worker.rank): worker for worker in workers_with_request})
    return reports


def waiting(record: RunRecord, node: bytes, start: int) -> NodeReport:
    state = WorkerState(0, "waiting", start=start, broken_generation=record.generation - 1)
    return report("running", state, generation=record.generation, elastic=True)


def test_request_of_rank_0_pauses_a_machine(spec: RunSpec) -> None:
    record = session(spec)
    paused = next_record(record, facts(spec, reports_of(record, {A: (C,)})))
    assert paused is not None
    assert paused.nodes == (A, B)
    assert paused.generation == record.generation + 1
    assert [(machine.node, machine.why) for machine in paused.paused] == [(C, WHY)]
    assert paused.why == f"box is paused: {WHY}; training continues on 2 machines"
    assert next_record(record, facts(spec, reports_of(record, {B: (C,)}))) is None, (
        "a request of another rank does not"
    )
    assert next_record(record, facts(spec, reports_of(record, {A: (C,)}, pauses_in=9))) is None, (
        "nor does a request for another generation"
    )
    finished = replace(record, finished=True)
    assert next_record(finished, facts(spec, reports_of(record, {A: (C,)}))) is None


def test_machine_of_rank_0_may_be_paused(spec: RunSpec) -> None:
    record = session(spec)
    paused = next_record(record, facts(spec, reports_of(record, {A: (A,)})))
    assert paused is not None
    assert paused.nodes == (B, C)


def test_two_machines_keep_training_at_least(spec: RunSpec) -> None:
    record = session(spec)
    assert next_record(record, facts(spec, reports_of(record, {A: (B, C)}))) is None
    assert next_record(record, facts(spec, reports_of(record, {A: (D,)}))) is None


def test_paused_machine_joins_again_only_after_a_loss(spec: RunSpec) -> None:
    record = session(spec)
    start = record.slots[2].start
    paused = next_record(record, facts(spec, reports_of(record, {A: (C,)})))
    assert paused is not None
    reports = {**reports_of(paused, {}), C: waiting(paused, C, start)}
    assert next_record(paused, facts(spec, reports)) is None, "although it waits to join"
    again = next_record(paused, facts(spec, reports, here=(A, C)))
    assert again is not None
    assert again.nodes == (A,)
    assert not again.paused
    assert [slot.node for slot in again.joining] == [C]


def test_eviction_brings_back_a_paused_machine(spec: RunSpec) -> None:
    record = session(spec)
    paused = next_record(record, facts(spec, reports_of(record, {A: (C,)})))
    assert paused is not None
    reports = {**reports_of(paused, {}), C: waiting(paused, C, record.slots[2].start)}
    known = facts(spec, reports)._replace(unreachable_s={frozenset((A, B)): 60.0})
    parted = next_record(paused, known)
    assert parted is not None
    assert parted.nodes == (A,)
    assert [slot.node for slot in parted.joining] == [C]


def test_restart_from_a_checkpoint_uses_all_machines(spec: RunSpec) -> None:
    record = session(spec)
    paused = next_record(record, facts(spec, reports_of(record, {A: (C,)})))
    assert paused is not None
    lost = next_record(paused, facts(spec, {**reports_of(paused, {}), C: report("ended")}, here=(C,)))
    assert lost is not None
    assert lost.phase == "restarting"
    begun = next_record(lost, facts(spec, {C: report("ended")}, here=(C,), since_s=60.0))
    assert begun is not None
    assert begun.nodes == (C,)
    assert not begun.paused


def test_random_pauses_and_losses_keep_the_invariants(spec: RunSpec) -> None:
    """A pause never leaves fewer than two machines, and a paused machine is in no group."""
    for seed in range(300):
        dice = random.Random(seed)
        record = session(spec)
        for _ in range(12):
            here = [node for node in (A, B, C) if dice.random() < 0.8] or [A]
            requests = {record.nodes[0]: tuple(dice.sample((A, B, C, D), dice.randrange(3)))}
            reports = reports_of(record, requests)
            for node in (A, B, C):
                if node not in record.nodes:
                    reports[node] = waiting(record, node, start=20)
            after = next_record(record, facts(spec, reports, here=here))
            if after is None:
                continue
            resting = {machine.node for machine in after.paused}
            assert not resting & set(after.nodes)
            if len(resting) > len(record.paused):
                assert len(after.nodes) >= 2
            if after.phase != "running":
                break
            record = after
