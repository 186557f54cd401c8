"""Lifecycle of a run, decided from facts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest
from msgspec.structs import replace

from barnraise.agent_client.run_options import RunOptions, RunProgram, ScriptImports
from barnraise.environments.installed_packages import InstalledPackages, Package
from barnraise.identity import NodeKey
from barnraise.runs.control.lifecycle import (
    mark_provisional,
    next_record,
    note_change,
    reason_to_decide_alone,
    request_stop,
)
from barnraise.runs.control.transitions import ReconcileInput
from barnraise.runs.record import (
    NodeReport,
    RunRecord,
    RunSpec,
    Stage,
    WorkerState,
    read_spec,
    sign_spec,
    supersedes,
)

T = TypeVar("T", RunProgram, RunOptions)

KEY = NodeKey.generate()
A = KEY.id.raw
B, C = bytes([1]) * 32, bytes([2]) * 32
NAMES = {A: "mac", B: "pc", C: "box"}


def order(**options: object) -> RunSpec:
    """Return a spec; fields of its program and its options may be given beside its own."""
    given: dict[str, object] = {
        "run": "train-abcd",
        "by": A,
        "at": 0.0,
        "command": ("train.py",),
        "folder": bytes(32),
        "nodes": (A, B, C),
        **options,
    }

    def take(kind: type[T]) -> T:
        return kind(**{name: given.pop(name) for name in kind.__struct_fields__ if name in given})

    program, chosen = take(RunProgram), take(RunOptions)
    return RunSpec(program=program, options=chosen, **given)  # type: ignore[arg-type]


def packages(*missing: str, torch: str = "2.13.0") -> InstalledPackages:
    have = tuple(Package(name, name, "1.0") for name in ("torch", "numpy") if name not in missing)
    return InstalledPackages(
        python="3.11.7",
        implementation="CPython",
        os="Linux",
        arch="x86_64",
        torch=torch,
        packages=have,
        missing=missing,
    )


def report(
    stage: Stage = "ready", *workers: WorkerState, generation: int = 0, **options: object
) -> NodeReport:
    given: dict[str, object] = {
        "run": "train-abcd",
        "incarnation": bytes(16),
        "serial": 1,
        "stage": stage,
        "generation": generation,
        "devices": ("cpu",),
        "packages": packages(),
        "workers": workers,
    }
    return NodeReport(**{**given, **options})  # type: ignore[arg-type]


def facts(
    spec: RunSpec,
    reports: Mapping[bytes, NodeReport],
    here: Sequence[bytes] = (A, B, C),
    since_s: float = 0.0,
) -> ReconcileInput:
    return ReconcileInput(spec, reports, here, since_s, lambda node: NAMES[node])


def running(spec: RunSpec) -> RunRecord:
    record = next_record(sign_spec(spec, KEY), facts(spec, {node: report() for node in spec.nodes}))
    assert record is not None
    assert record.phase == "running"
    return record


def at_work(record: RunRecord, node: bytes, **ends: WorkerState) -> NodeReport:
    given = {worker.rank: worker for worker in ends.values()}
    ranks = record.ranks_of(node)
    slots = record.slots
    states = [
        replace(
            given.get(rank, WorkerState(rank, "running")),
            local_rank=slots[rank].local_rank,
            start=slots[rank].start,
        )
        for rank in ranks
    ]
    done = all(state.state == "ended" for state in states)
    return report("ended" if done else "running", *states, generation=record.generation)


PAUSED = "its user paused it until 18:00"


def test_paused_machine_is_left_out_at_the_start_and_may_join_later() -> None:
    spec = order()
    record = sign_spec(spec, KEY)
    reports = {A: report(), B: report(), C: report("fetching", paused=PAUSED)}
    begun = next_record(record, facts(spec, reports))
    assert begun is not None
    assert begun.nodes == (A, B)
    assert [(machine.node, machine.why) for machine in begun.left_out] == [(C, PAUSED)]
    assert begun.may_join(C)


@pytest.mark.parametrize("named", [False, True])
def test_run_that_only_paused_machines_could_do_fails_with_their_reason(named: bool) -> None:
    nodes = (A, C) if named else (C,)
    spec = order(nodes=nodes, named=named)
    reports = {node: report() for node in nodes} | {C: report("fetching", paused=PAUSED)}
    ended = next_record(sign_spec(spec, KEY), facts(spec, reports))
    assert ended is not None
    assert ended.outcome is not None
    assert ended.phase == "ended"
    assert f"box: {PAUSED}" in ended.outcome.sentence
    assert "barnraise resume-machine" in ended.outcome.sentence


def test_run_waits_for_a_machine_that_was_paused_while_it_prepared() -> None:
    spec = order(nodes=(A, C), named=True)
    reports = {A: report(), C: report("building", paused=PAUSED)}
    assert next_record(sign_spec(spec, KEY), facts(spec, reports)) is None


def test_restart_leaves_paused_machine_out() -> None:
    spec = order()
    record = replace(running(spec), phase="restarting", restarts=1)
    reports = {A: report("ended"), B: report("ended"), C: report("ended", paused=PAUSED)}
    again = next_record(record, facts(spec, reports, since_s=5.0))
    assert again is not None
    assert again.nodes == (A, B)


def test_session_says_that_a_machine_is_paused() -> None:
    spec = order()
    record = replace(running(spec), elastic=True)
    leaving = at_work(record, C, c=WorkerState(2, "leaving"))
    reports = {A: at_work(record, A), B: at_work(record, B), C: replace(leaving, paused=PAUSED)}
    changed = next_record(record, facts(spec, reports))
    assert changed is not None
    assert changed.nodes == (A, B)
    assert changed.why == f"box is paused ({PAUSED}); training continues on 2 machines"


def test_session_whose_machines_are_all_paused_stays_on_one_of_them() -> None:
    spec = order()
    record = replace(running(spec), elastic=True)
    reports = {
        node: replace(at_work(record, node, own=WorkerState(rank, "leaving")), paused=PAUSED)
        for rank, node in enumerate((A, B, C))
    }
    changed = next_record(record, facts(spec, reports))
    assert changed is not None
    assert changed.nodes == (A,)


def test_spec_with_a_wrong_signature_is_rejected() -> None:
    record = sign_spec(order(), KEY)
    assert read_spec(record) == order()
    forged = replace(record, signature=bytes(64))
    with pytest.raises(Exception, match="is not signed by the machine"):
        read_spec(forged)


def test_run_starts_when_all_machines_are_ready() -> None:
    spec = order(per_node=2)
    record = sign_spec(spec, KEY)
    reports = {A: report(), B: report(), C: report("fetching")}
    assert next_record(record, facts(spec, reports)) is None
    begun = next_record(record, facts(spec, {**reports, C: report()}))
    assert begun is not None
    assert (begun.phase, begun.generation, begun.version) == ("running", 1, 2)
    assert [(slot.node, slot.local_rank) for slot in begun.slots] == [
        (node, place) for node in (A, B, C) for place in (0, 1)
    ]


def test_slots_are_one_per_device() -> None:
    spec = order(nodes=(A, B))
    reports = {A: report(devices=("cuda:0", "cuda:1")), B: report(devices=("mps",))}
    begun = next_record(sign_spec(spec, KEY), facts(spec, reports))
    assert begun is not None
    assert [slot.device for slot in begun.slots] == ["cuda:0", "cuda:1", "mps"]


def test_absent_machines_are_waited_for_then_left_out() -> None:
    spec = order(wait_s=30.0, min_nodes=2)
    record = sign_spec(spec, KEY)
    reports = {A: report(), B: report()}
    assert next_record(record, facts(spec, reports, here=(A, B), since_s=29.0)) is None
    begun = next_record(record, facts(spec, reports, here=(A, B), since_s=31.0))
    assert begun is not None
    assert begun.phase == "running"
    assert [machine.node for machine in begun.left_out] == [C]
    assert begun.may_join(C), "when it comes back"
    few = next_record(record, facts(spec, {A: report()}, here=(A,), since_s=31.0))
    assert few is not None
    assert few.outcome is not None
    assert "1 of at least 2 machines came within 30 s: pc, box did not come" in few.outcome.sentence


@pytest.mark.parametrize("lacks_files", [True, False])
def test_end_of_a_run_says_whether_its_files_did_not_come(lacks_files: bool) -> None:
    spec = order()
    reports = {A: report(), B: report("failed", words="no piece came", lacks_files=lacks_files), C: report()}
    ended = next_record(sign_spec(spec, KEY), facts(spec, reports))
    assert ended is not None
    assert ended.outcome is not None
    assert (ended.outcome.sentence, ended.outcome.lacks_files) == ("pc: no piece came", lacks_files)


def test_machine_without_a_package_is_left_out_unless_it_is_needed() -> None:
    spec = order(needs=ScriptImports(required=("torch", "numpy")))
    reports = {A: report(), B: report(), C: report(packages=packages("numpy"))}
    begun = next_record(sign_spec(spec, KEY), facts(spec, reports))
    assert begun is not None
    assert begun.nodes == (A, B)
    (left_out,) = begun.left_out
    assert left_out.node == C
    assert "pip install" in left_out.why
    assert [begun.may_join(node) for node in (A, B, C)] == [True, True, False], "later it lacks it, too"
    needed = order(needs=spec.program.needs, min_nodes=3)
    ended = next_record(sign_spec(needed, KEY), facts(needed, reports))
    assert ended is not None
    assert ended.phase == "ended"
    assert ended.outcome is not None
    assert "box" in ended.outcome.sentence
    assert "pip install" in ended.outcome.sentence


def test_machine_without_the_device_is_left_out_and_named() -> None:
    spec = order(needs=ScriptImports(required=("torch",), cuda="train.py line 3 asks for cuda"))
    reports = {A: report(devices=("cuda:0",)), B: report(devices=("cuda:0",)), C: report(devices=("mps",))}
    begun = next_record(sign_spec(spec, KEY), facts(spec, reports))
    assert begun is not None
    assert begun.phase == "running"
    assert begun.nodes == (A, B)
    assert [machine.node for machine in begun.left_out] == [C]
    named = order(needs=spec.program.needs, named=True)
    ended = next_record(sign_spec(named, KEY), facts(named, reports))
    assert ended is not None
    assert ended.phase == "ended"


def test_run_succeeds_when_all_workers_have_finished() -> None:
    spec = order()
    record = running(spec)
    done = {
        node: at_work(record, node, end=WorkerState(rank, "ended")) for rank, node in enumerate((A, B, C))
    }
    assert next_record(record, facts(spec, {**done, C: at_work(record, C)})) is None
    ended = next_record(record, facts(spec, done))
    assert ended is not None
    assert ended.outcome is not None
    assert (ended.phase, ended.outcome.code) == ("ended", 0)


def test_worker_exception_fails_the_run_with_its_output() -> None:
    spec = order()
    record = running(spec)
    follower = WorkerState(0, "ended", 1, 0, "PeerLost: rank 1 is lost", 1)
    cause = WorkerState(1, "ended", 1, 0, "ValueError: negative loss", 5)
    reports = {A: at_work(record, A, x=follower), B: at_work(record, B, x=cause), C: at_work(record, C)}
    stopping = next_record(record, facts(spec, reports))
    assert stopping is not None
    assert stopping.phase == "stopping"
    assert stopping.outcome is not None
    assert (stopping.outcome.rank, stopping.outcome.node) == (1, B)
    assert "ValueError" in stopping.outcome.tail
    assert next_record(stopping, facts(spec, reports)) is None, "box still works"
    done = {**reports, C: at_work(record, C, x=WorkerState(2, "ended", 0, 15))}
    ended = next_record(stopping, facts(spec, done))
    assert ended is not None
    assert ended.phase == "ended"
    assert ended.outcome == stopping.outcome


def test_lost_machine_restarts_the_run_on_the_others() -> None:
    spec = order()
    record = running(spec)
    reports = {node: at_work(record, node) for node in (A, B, C)}
    restarting = next_record(record, facts(spec, reports, here=(B, C)))
    assert restarting is not None
    assert (restarting.phase, restarting.why) == ("restarting", "mac went away")
    assert next_record(restarting, facts(spec, reports, here=(B, C), since_s=1.0)) is None
    idle = {B: report("ended"), C: report("ended")}
    again = next_record(restarting, facts(spec, idle, here=(B, C), since_s=0.1))
    assert again is not None
    assert (again.phase, again.generation, again.nodes) == ("running", 2, (B, C))


def test_killed_worker_is_restarted_a_limited_number_of_times() -> None:
    spec = order(restarts=2, nodes=(A,))
    record = running(spec)
    starts = 1
    for _ in range(10):
        reports = {A: at_work(record, A, x=WorkerState(0, "ended", 0, 9, "last words"))}
        after = next_record(record, facts(spec, reports))
        assert after is not None
        if after.phase == "stopping":
            break
        assert after.phase == "restarting"
        next_one = next_record(after, facts(spec, {A: report("ended")}, since_s=60.0))
        assert next_one is not None
        record, starts = next_one, starts + 1
    assert starts == 3
    assert after.outcome is not None
    assert after.outcome.code == 128 + 9
    assert "no restart is left" in after.outcome.sentence


def test_restart_backoff_grows() -> None:
    spec = order(nodes=(A,))
    record = replace(running(spec), phase="restarting", restarts=3, why="rank 0 died")
    assert next_record(record, facts(spec, {A: report("ended")}, since_s=1.9)) is None
    assert next_record(record, facts(spec, {A: report("ended")}, since_s=2.1)) is not None


def test_settled_generation_gets_its_restarts_back() -> None:
    spec = order(restarts=1, nodes=(A,))
    record = replace(running(spec), restarts=1)
    reports = {A: at_work(record, A, x=WorkerState(0, "ended", 0, 9))}
    soon = next_record(record, facts(spec, reports, since_s=5.0))
    late = next_record(record, facts(spec, reports, since_s=700.0))
    assert soon is not None
    assert late is not None
    assert (soon.phase, late.phase) == ("stopping", "restarting")
    # The record stores it, because after a power cut the running time is unknown.
    at_ease = {A: at_work(record, A)}
    assert next_record(record, facts(spec, at_ease, since_s=5.0)) is None
    again = next_record(record, facts(spec, at_ease, since_s=700.0))
    assert again is not None
    assert (again.phase, again.restarts, again.version) == ("running", 0, record.version + 1)
    assert next_record(again, facts(spec, at_ease, since_s=700.0)) is None


def test_run_fails_with_too_few_machines() -> None:
    spec = order(min_nodes=3)
    record = running(spec)
    after = next_record(record, facts(spec, {node: at_work(record, node) for node in (A, B, C)}, here=(A, B)))
    assert after is not None
    assert (after.phase, after.why) == ("restarting", "box went away; at least 3 machines are needed")
    idle = {node: report("ended") for node in (A, B)}
    assert next_record(after, facts(spec, idle, here=(A, B), since_s=25.0)) is None, "it may come back"
    after = next_record(after, facts(spec, idle, here=(A, B), since_s=31.0))
    assert after is not None
    assert after.outcome is not None
    assert after.phase == "stopping"
    assert "2 of at least 3 machines came back" in after.outcome.sentence


def test_run_waits_while_all_machines_are_away() -> None:
    """Two sleeping laptops, and a third machine that coordinates: the run continues when one wakes up."""
    spec = order(nodes=(A, B))
    record = running(spec)
    asleep = next_record(record, facts(spec, {node: at_work(record, node) for node in (A, B)}, here=(C,)))
    assert asleep is not None
    assert (asleep.phase, asleep.why) == ("restarting", "mac, pc went away; at least 1 machine is needed")
    old_reports = {node: at_work(record, node) for node in (A, B)}
    assert next_record(asleep, facts(spec, old_reports, here=(C,), since_s=12 * 3600.0)) is None
    back = next_record(asleep, facts(spec, {B: report("ended")}, here=(C, B), since_s=12 * 3600.0))
    assert back is not None
    assert (back.phase, back.nodes) == ("running", (B,))


def test_stop_is_clean_at_first_and_hard_when_repeated() -> None:
    record = running(order())
    soft = request_stop(record, "mac", hard=False)
    assert soft is not None
    assert (soft.phase, soft.hard, soft.version) == ("stopping", False, record.version + 1)
    assert request_stop(soft, "mac", hard=False) is None
    hard = request_stop(soft, "pc", hard=True)
    assert hard is not None
    assert hard.hard
    assert hard.outcome == soft.outcome


def test_script_that_exits_with_the_code_of_a_stop_was_not_stopped() -> None:
    record = running(order())
    stopped = request_stop(record, "mac", hard=False)
    assert stopped is not None
    assert stopped.outcome is not None
    assert stopped.outcome.is_stop
    reports = {node: at_work(record, node) for node in (A, B, C)}
    reports[B] = at_work(record, B, end=WorkerState(1, "ended", 130))
    failed = next_record(record, facts(order(), reports))
    assert failed is not None
    assert failed.outcome is not None
    assert (failed.outcome.code, failed.outcome.is_stop) == (130, False)


def test_machine_lost_after_the_end_does_not_fail_the_run() -> None:
    spec = order()
    record = running(spec)
    reports = {
        A: at_work(record, A, x=WorkerState(0, "ended")),
        B: at_work(record, B, x=WorkerState(1, "ended")),
        C: at_work(record, C),
    }
    ended = next_record(record, facts(spec, reports, here=(A, B)))
    assert ended is not None
    assert ended.outcome is not None
    assert (ended.phase, ended.outcome.code) == ("ended", 0)
    assert "box went away at the end" in ended.outcome.sentence


def test_last_of_two_machines_continues_provisionally() -> None:
    spec = order(nodes=(A, B))
    record = running(spec)
    assert reason_to_decide_alone(record, B, (A, B), missing=(A,), dead=()) is not None
    assert reason_to_decide_alone(record, A, (A, B), missing=(), dead=()) is not None
    assert reason_to_decide_alone(record, B, (A, B), missing=(), dead=()) is None, "mac comes first"
    assert reason_to_decide_alone(record, B, (A,), missing=(A,), dead=()) is None, (
        "mac has gone on without it"
    )
    changed = next_record(record, facts(spec, {B: at_work(record, B)}, here=(B,)))
    assert changed is not None
    marked = mark_provisional(record, changed)
    assert marked.provisional == record.version
    further = mark_provisional(marked, replace(marked, version=marked.version + 1))
    assert further.provisional == record.version, "always the last that was agreed"


def test_minority_of_more_continues_only_if_the_others_are_down() -> None:
    record = running(order())
    assert reason_to_decide_alone(record, C, (A, B, C), missing=(A, B), dead=(A,)) is None
    assert reason_to_decide_alone(record, C, (A, B, C), missing=(A, B), dead=(A, B)) is not None


def in_session(spec: RunSpec) -> RunRecord:
    record = running(spec)
    reports = {node: replace(at_work(record, node), elastic=True) for node in spec.nodes}
    elastic = next_record(record, facts(spec, reports))
    assert elastic is not None
    assert elastic.elastic
    assert elastic.generation == record.generation
    return elastic


def test_session_continues_with_the_remaining_workers() -> None:
    spec = order()
    record = in_session(spec)
    dead = WorkerState(1, "ended", 0, 9)
    reports = {A: at_work(record, A), B: at_work(record, B, x=dead), C: at_work(record, C)}
    after = next_record(record, facts(spec, reports))
    assert after is not None
    assert (after.phase, after.generation, after.nodes) == ("running", record.generation + 1, (A, C))
    assert after.slots == (record.slots[0], record.slots[2]), "the same workers"
    assert next_record(after, facts(spec, reports)) is None


def with_joining_worker(record: RunRecord, state: WorkerState) -> dict[bytes, NodeReport]:
    """Return reports of both workers and of one more on pc that is not in the record."""
    return {A: at_work(record, A), B: report("running", *at_work(record, B).workers, state)}


def test_joining_worker_recovers_then_becomes_last_rank() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    new = WorkerState(0, "waiting", local_rank=0, start=7)
    reports = with_joining_worker(record, new)
    recovering = next_record(record, facts(spec, reports))
    assert recovering is not None
    assert (recovering.generation, recovering.slots) == (record.generation, record.slots), (
        "the others continue"
    )
    assert [slot.start for slot in recovering.joining] == [7]
    assert recovering.recovery_attempt == recovering.version
    assert recovering.why == "pc: receives the state while the others keep training"
    assert next_record(recovering, facts(spec, reports)) is None
    near = replace(new, state="near")
    reports = with_joining_worker(record, near)
    after = next_record(recovering, facts(spec, reports))
    assert after is not None
    assert [slot.start for slot in after.slots] == [1, 1, 7]
    assert not after.joining
    assert "pc joined" in after.why


def test_changes_that_follow_each_other_are_all_kept() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    stopped = at_work(record, B, x=WorkerState(1, "stopped"))
    removed = next_record(record, facts(spec, {A: at_work(record, A), B: stopped}))
    assert removed is not None
    new = WorkerState(0, "waiting", local_rank=0, start=7)
    reports = {A: at_work(record, A), B: report("running", new, generation=removed.generation)}
    recovering = next_record(removed, facts(spec, reports))
    assert recovering is not None
    assert [(change.version, change.why) for change in recovering.changes[-2:]] == [
        (removed.version, "pc has a stopped worker; training continues on 1 machine"),
        (recovering.version, "pc: receives the state while the others keep training"),
    ]
    for version in range(20):
        recovering = note_change(recovering, replace(recovering, why=f"change {version}"))
    assert [change.why for change in recovering.changes] == [f"change {number}" for number in range(12, 20)]
    assert note_change(recovering, recovering).changes == recovering.changes


def test_failed_live_recovery_is_retried() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    new = WorkerState(0, "waiting", local_rank=0, start=7)
    reports = with_joining_worker(record, new)
    first = next_record(record, facts(spec, reports))
    assert first is not None
    failed = replace(new, broken_generation=first.recovery_attempt)
    reports = with_joining_worker(record, failed)
    assert next_record(first, facts(spec, reports, since_s=0.1)) is None, "not at once"
    second = next_record(first, facts(spec, reports, since_s=1.0))
    assert second is not None
    assert second.joining == first.joining
    assert second.recovery_attempt > first.recovery_attempt
    assert next_record(second, facts(spec, reports, since_s=1.0)) is None
    without_joining = {A: at_work(record, A), B: at_work(record, B)}
    without = next_record(second, facts(spec, without_joining))
    assert without is not None
    assert not without.joining
    died = {A: at_work(record, A, x=WorkerState(0, "ended", 0, 9)), B: reports[B]}
    regrouped = next_record(second, facts(spec, died))
    assert regrouped is not None
    assert regrouped.joining == first.joining, "by the remaining workers"
    assert regrouped.recovery_attempt == regrouped.version


def test_session_succeeds_when_the_last_worker_has_finished() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    reports = {A: at_work(record, A, x=WorkerState(0, "ended")), B: at_work(record, B)}
    alone = next_record(record, facts(spec, reports))
    assert alone is not None
    assert alone.nodes == (B,), "the remaining worker may still need a group"
    done = {**reports, B: at_work(record, B, x=WorkerState(1, "ended"))}
    ended = next_record(alone, facts(spec, done))
    assert ended is not None
    assert ended.outcome is not None
    assert (ended.phase, ended.outcome.code) == ("ended", 0)


def test_killed_worker_of_a_machine_that_is_here_does_not_mean_that_the_machine_disappeared() -> None:
    spec = order()
    record = in_session(spec)
    reports = {node: at_work(record, node) for node in (A, B)}
    killed = {**reports, C: at_work(record, C, x=WorkerState(2, "ended", 0, 9))}
    two = next_record(record, facts(spec, killed))
    assert two is not None
    assert two.why == "box lost a worker (signal 9); training continues on 2 machines"
    both = {A: reports[A], B: at_work(record, B, x=WorkerState(1, "ended", 0, 9)), C: killed[C]}
    alone = next_record(record, facts(spec, both))
    assert alone is not None
    assert alone.why == "pc, box lost workers (signal 9); training continues on 1 machine"


def test_session_that_lost_a_machine_names_it_at_the_end() -> None:
    spec = order()
    record = in_session(spec)
    reports = {node: at_work(record, node) for node in (A, B, C)}
    two = next_record(record, facts(spec, reports, here=(A, B)))
    assert two is not None
    assert two.why == "box disappeared; training continues on 2 machines"
    done = {
        A: at_work(record, A, x=WorkerState(0, "ended")),
        B: at_work(record, B, x=WorkerState(1, "ended")),
        C: reports[C],
    }
    ended = next_record(two, facts(spec, done, here=(A, B)))
    assert ended is not None
    assert ended.outcome is not None
    assert ended.outcome.sentence == "finished successfully without box; every sample counts once"
    finished = {**done, C: at_work(record, C, x=WorkerState(2, "ended"))}
    ended = next_record(two, facts(spec, finished, here=(A, B)))
    assert ended is not None
    assert ended.outcome is not None
    assert ended.outcome.sentence == "finished successfully", "it was switched off after its end"


def test_session_without_survivors_restarts() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    dead = {
        A: at_work(record, A, x=WorkerState(0, "ended", 0, 9)),
        B: at_work(record, B, x=WorkerState(1, "ended", 0, 9)),
    }
    after = next_record(record, facts(spec, dead))
    assert after is not None
    assert after.phase == "restarting"


def test_stopping_has_a_time_limit() -> None:
    spec = order()
    record = replace(running(spec), phase="stopping")
    reports = {node: at_work(record, node) for node in spec.nodes}
    assert next_record(record, facts(spec, reports, since_s=60.0)) is None
    late = next_record(record, facts(spec, reports, since_s=1000.0))
    assert late is not None
    assert late.phase == "ended"


def _waiting(record: RunRecord, rank: int, *blames: int) -> WorkerState:
    return WorkerState(rank, "waiting", broken_generation=record.generation, blames=blames)


def test_group_that_broke_without_a_loss_is_formed_again() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    stuck = {
        A: at_work(record, A, x=_waiting(record, 0)),
        B: at_work(record, B, x=_waiting(record, 1)),
    }
    assert next_record(record, facts(spec, stuck)._replace(stuck_s=1.0)) is None
    again = next_record(record, facts(spec, stuck)._replace(stuck_s=4.0))
    assert again is not None
    assert (again.generation, again.slots) == (record.generation + 1, record.slots)
    reports = {**stuck, B: at_work(record, B)}
    late = facts(spec, reports)._replace(stuck_s=9.0)
    assert next_record(record, late) is None, "pc is in the middle of a step"


def test_silent_worker_is_evicted_once_others_have_lost_it() -> None:
    spec = order()
    record = in_session(spec)
    reports = {
        A: at_work(record, A, x=_waiting(record, 0, 1)),
        B: at_work(record, B),
        C: at_work(record, C, x=_waiting(record, 2, 1)),
    }
    assert next_record(record, facts(spec, reports)._replace(stuck_s=0.5)) is None, "it may just have died"
    changed = next_record(record, facts(spec, reports)._replace(stuck_s=2.0))
    assert changed is not None
    assert changed.nodes == (A, C)
    assert changed.why == "the worker on pc does not respond; training continues on 2 machines"
    failing = reports[B].workers[0]
    reports[B] = replace(reports[B], workers=(replace(failing, is_failing=True),))
    changed = next_record(record, facts(spec, reports)._replace(stuck_s=2.0))
    assert changed is not None
    assert changed.why == "the worker on pc failed; training continues on 2 machines"


def test_junior_of_two_unreachable_machines_is_evicted_until_they_reach_each_other() -> None:
    spec = order()
    record = in_session(spec)
    reports = {node: at_work(record, node) for node in (A, B, C)}
    apart = {frozenset((B, C)): 1.0}
    assert next_record(record, facts(spec, reports)._replace(unreachable_s=apart)) is None, "it may pass"
    apart = {frozenset((B, C)): 2.0}
    parted = next_record(record, facts(spec, reports)._replace(unreachable_s=apart))
    assert parted is not None
    assert parted.nodes == (A, B)
    assert parted.why.startswith("box and pc cannot reach each other; ")
    joining = WorkerState(0, "waiting", start=9)
    waits = {**reports, C: report("running", joining, generation=parted.generation)}
    assert next_record(parted, facts(spec, waits)._replace(unreachable_s=apart)) is None, "they still do not"
    recovering = next_record(parted, facts(spec, waits))
    assert recovering is not None
    assert [slot.node for slot in recovering.joining] == [C]


def test_machine_that_most_cannot_reach_is_evicted() -> None:
    spec = order()
    record = in_session(spec)
    reports = {node: at_work(record, node) for node in (A, B, C)}
    apart = {frozenset((A, B)): 2.0, frozenset((A, C)): 2.0}
    parted = next_record(record, facts(spec, reports)._replace(unreachable_s=apart))
    assert parted is not None
    assert parted.nodes == (B, C)


def test_complaints_about_an_older_group_are_ignored() -> None:
    spec = order()
    record = in_session(spec)
    old = WorkerState(0, "waiting", broken_generation=record.generation - 1, blames=(1,))
    reports = {A: at_work(record, A, x=old), B: at_work(record, B), C: at_work(record, C)}
    assert next_record(record, facts(spec, reports)._replace(stuck_s=9.0)) is None


def test_stopped_worker_is_removed_unless_it_is_the_last() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    reports = {A: at_work(record, A), B: at_work(record, B, x=WorkerState(1, "stopped"))}
    changed = next_record(record, facts(spec, reports))
    assert changed is not None
    assert changed.nodes == (A,)
    assert changed.why == "pc has a stopped worker; training continues on 1 machine"
    both = {A: at_work(record, A, x=WorkerState(0, "stopped")), B: reports[B]}
    assert next_record(record, facts(spec, both)) is None


def test_results_are_taken_from_rank_0() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    reports = {A: at_work(record, A, x=WorkerState(0, "ended")), B: at_work(record, B)}
    alone = next_record(record, facts(spec, reports))
    assert alone is not None
    assert (alone.nodes, alone.results_at, alone.finished) == ((B,), A, True)
    done = {**reports, B: at_work(record, B, x=WorkerState(1, "ended"))}
    ended = next_record(alone, facts(spec, done))
    assert ended is not None
    assert (ended.phase, ended.results_at) == ("ended", A)


@pytest.mark.parametrize("at_once", [True, False])
def test_results_are_taken_from_another_machine_if_rank_0_dies(at_once: bool) -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    reports = {A: at_work(record, A), B: at_work(record, B, x=WorkerState(1, "ended"))}
    both = {**reports, A: at_work(record, A, x=WorkerState(0, "ended", 0, 9))}
    if not at_once:
        alone = next_record(record, facts(spec, reports))
        assert alone is not None
        assert (alone.nodes, alone.finished) == ((A,), True)
        record = alone
    ended = next_record(record, facts(spec, both))
    assert ended is not None
    assert ended.outcome is not None
    assert (ended.phase, ended.outcome.code, ended.results_at) == ("ended", 0, B)
    assert "the results are those of pc" in ended.outcome.sentence


def test_results_are_missing_if_no_writing_worker_succeeded() -> None:
    """One machine with two workers: the first is killed in run.save, the second writes nothing."""
    spec = order(nodes=(A,), per_node=2)
    record = in_session(spec)
    second = {A: at_work(record, A, x=WorkerState(1, "ended"))}
    alone = next_record(record, facts(spec, second))
    assert alone is not None
    assert alone.finished
    killed = {A: at_work(record, A, x=WorkerState(1, "ended"), y=WorkerState(0, "ended", 0, 9))}
    again = next_record(alone, facts(spec, killed))
    assert again is not None
    assert (again.phase, again.finished, again.restarts) == ("restarting", False, 1)


def test_results_are_taken_from_a_present_machine() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    done = {
        A: at_work(record, A, x=WorkerState(0, "ended")),
        B: at_work(record, B, x=WorkerState(1, "ended")),
    }
    first = next_record(record, facts(spec, {**done, A: at_work(record, A)}))
    assert first is not None
    both = next_record(first, facts(spec, done))
    assert both is not None
    assert (both.phase, both.results_at) == ("ended", A)
    alone = next_record(replace(first, results_at=A), facts(spec, done, here=(B,)))
    assert alone is not None
    assert (alone.phase, alone.results_at) == ("ended", B)


def test_single_stuck_worker_causes_a_new_group_after_a_minute() -> None:
    spec = order(nodes=(A, B))
    record = in_session(spec)
    assert record.first_generation == record.generation
    stuck = {A: at_work(record, A, x=_waiting(record, 0)), B: at_work(record, B)}
    assert next_record(record, facts(spec, stuck)._replace(stuck_s=30.0)) is None
    again = next_record(record, facts(spec, stuck)._replace(stuck_s=61.0))
    assert again is not None
    assert (again.generation, again.slots, again.first_generation) == (2, record.slots, 1)


def test_machine_that_cannot_reach_the_controller_is_evicted_first() -> None:
    spec = order()
    record = in_session(spec)
    reports = {node: at_work(record, node) for node in (A, B, C)}
    apart = {frozenset((B, C)): 2.0}
    parted = next_record(record, facts(spec, reports)._replace(unreachable_s=apart, controller=C))
    assert parted is not None
    assert parted.nodes == (A, C)


def test_agreed_record_supersedes_a_provisional_one() -> None:
    decided = replace(running(order()), version=5)
    alone = replace(decided, version=9, provisional=5)  # goes on from it
    other = replace(decided, version=6)  # was decided meanwhile
    assert supersedes(alone, decided)
    assert not supersedes(decided, alone)
    assert supersedes(other, alone), "however many versions went on there"
    assert not supersedes(alone, other)
    assert supersedes(replace(alone, version=10), alone)
    assert supersedes(replace(alone, version=10, provisional=0), alone), "it becomes history"
