"""Machines that a session goes on without because its first member says so."""

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
def asked() -> RunSpec:
    return order()


def session(asked: RunSpec) -> RunRecord:
    record = replace(running(asked), elastic=True)
    assert record.nodes == (A, B, C)
    return record


def reports_of(
    record: RunRecord, said: dict[bytes, tuple[bytes, ...]], **options: int
) -> dict[bytes, NodeReport]:
    """All are at work; some say who should rest."""
    given = {"rests_in": record.generation, **options}
    found = {}
    for node in (A, B, C):
        workers = [WorkerState(rank, "running") for rank in record.ranks_of(node)]
        told = [replace(one, rests=said.get(node, ()), rests_why=WHY, **given) for one in workers]
        found[node] = at_work(record, node, **{str(one.rank): one for one in told})
    return found


def waiting(record: RunRecord, node: bytes, start: int) -> NodeReport:
    state = WorkerState(0, "waiting", start=start, broke=record.generation - 1)
    return report("running", state, generation=record.generation, elastic=True)


def test_the_first_members_word_counts(asked: RunSpec) -> None:
    record = session(asked)
    rested = next_record(record, facts(asked, reports_of(record, {A: (C,)})))
    assert rested is not None
    assert rested.nodes == (A, B)
    assert rested.generation == record.generation + 1
    assert [(one.node, one.why) for one in rested.resting] == [(C, WHY)]
    assert rested.why == f"generation 2: 2 workers, because box rests: {WHY}"
    assert next_record(record, facts(asked, reports_of(record, {B: (C,)}))) is None, "nobody else's does"
    assert next_record(record, facts(asked, reports_of(record, {A: (C,)}, rests_in=9))) is None, "nor of late"
    finished = replace(record, finished=True)
    assert next_record(finished, facts(asked, reports_of(record, {A: (C,)}))) is None


def test_it_may_be_the_first_itself(asked: RunSpec) -> None:
    record = session(asked)
    rested = next_record(record, facts(asked, reports_of(record, {A: (A,)})))
    assert rested is not None
    assert rested.nodes == (B, C)


def test_two_stay_whatever_is_said(asked: RunSpec) -> None:
    record = session(asked)
    assert next_record(record, facts(asked, reports_of(record, {A: (B, C)}))) is None
    assert next_record(record, facts(asked, reports_of(record, {A: (D,)}))) is None


def test_who_rests_is_not_let_in_until_somebody_is_gone(asked: RunSpec) -> None:
    record = session(asked)
    start = record.slots[2].start
    rested = next_record(record, facts(asked, reports_of(record, {A: (C,)})))
    assert rested is not None
    reports = {**reports_of(rested, {}), C: waiting(rested, C, start)}
    assert next_record(rested, facts(asked, reports)) is None, "though it waits to be let in"
    again = next_record(rested, facts(asked, reports, here=(A, C)))
    assert again is not None
    assert again.nodes == (A,)
    assert not again.resting
    assert [slot.node for slot in again.nursed] == [C]


def test_two_who_miss_each_other_are_short_of_somebody(asked: RunSpec) -> None:
    record = session(asked)
    rested = next_record(record, facts(asked, reports_of(record, {A: (C,)})))
    assert rested is not None
    reports = {**reports_of(rested, {}), C: waiting(rested, C, record.slots[2].start)}
    known = facts(asked, reports)._replace(apart={frozenset((A, B)): 60.0})
    parted = next_record(rested, known)
    assert parted is not None
    assert parted.nodes == (A,)
    assert [slot.node for slot in parted.nursed] == [C]


def test_a_start_from_a_checkpoint_wants_everybody(asked: RunSpec) -> None:
    record = session(asked)
    rested = next_record(record, facts(asked, reports_of(record, {A: (C,)})))
    assert rested is not None
    lost = next_record(rested, facts(asked, {**reports_of(rested, {}), C: report("ended")}, here=(C,)))
    assert lost is not None
    assert lost.phase == "restarting"
    begun = next_record(lost, facts(asked, {C: report("ended")}, here=(C,), since_s=60.0))
    assert begun is not None
    assert begun.nodes == (C,)
    assert not begun.resting


def test_whatever_is_said_and_whoever_goes_nobody_is_lost(asked: RunSpec) -> None:
    """At random: a rest never leaves fewer than two, and whoever rests is in no group."""
    for seed in range(300):
        dice = random.Random(seed)
        record = session(asked)
        for _ in range(12):
            here = [node for node in (A, B, C) if dice.random() < 0.8] or [A]
            said = {record.nodes[0]: tuple(dice.sample((A, B, C, D), dice.randrange(3)))}
            reports = reports_of(record, said)
            for node in (A, B, C):
                if node not in record.nodes:
                    reports[node] = waiting(record, node, start=20)
            after = next_record(record, facts(asked, reports, here=here))
            if after is None:
                continue
            resting = {one.node for one in after.resting}
            assert not resting & set(after.nodes)
            if len(resting) > len(record.resting):
                assert len(after.nodes) >= 2
            if after.phase != "running":
                break
            record = after
