"""Scheduler of the queue, decided from facts alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent_client.run_options import RunOptions
from barnraise.runs.queue.job import JobAttempt, KnownJob, cancel_job, decode_job, encode_job, pause_job
from barnraise.runs.queue.scheduler import (
    AWAY_S,
    COLLECT_S,
    FreeDevice,
    QueueDecision,
    QueueFacts,
    QueueMachine,
    QueueRun,
    decide,
)
from barnraise.runs.queue.spec import attempt_run
from tests.unit.runs.queue.test_job import job

GIB = 1 << 30
RUN = attempt_run(job(1).spec, 1)
MAC, PC, NAS = (bytes([number]) * 32 for number in (1, 2, 3))
NAMES = {MAC: "mac", PC: "pc", NAS: "nas"}
SLOW = QueueMachine(MAC, (FreeDevice("mps", 16 * GIB, 2.0),))
FAST = QueueMachine(PC, (FreeDevice("cuda:0", 24 * GIB, 30.0), FreeDevice("cuda:1", 8 * GIB, 12.0)))
SMALL = QueueMachine(NAS, (FreeDevice("cpu", 4 * GIB, 0.1),))


def scheduled(
    *jobs: KnownJob,
    machines: Sequence[QueueMachine] = (SLOW, FAST, SMALL),
    runs: dict[str, QueueRun] | None = None,
    away_s: dict[bytes, float] | None = None,
    unsaved: Sequence[int] = (),
    absent_files: dict[int, Sequence[bytes]] | None = None,
) -> QueueDecision:
    known = {item.number: item for item in jobs}
    return decide(
        QueueFacts(
            known,
            machines,
            runs or {},
            away_s or {},
            NAMES.__getitem__,
            unsaved=unsaved,
            at=7.0,
            absent_files=absent_files or {},
        )
    )


def placed(decision: QueueDecision) -> dict[int, tuple[str, str]]:
    """Return machines and device of each job that starts now."""
    attempts = {number: record.attempt for number, record in decision.changed.items()}
    return {
        number: (" ".join(NAMES[node] for node in attempt.nodes), attempt.device)
        for number, attempt in attempts.items()
        if attempt is not None
    }


def running(number: int, node: bytes = PC, device: str = "cuda:0", **options: Any) -> KnownJob:
    attempt = JobAttempt(number=1, nodes=(node,), device=device)
    waiting = job(number, **options)
    return replace(waiting, record=replace(waiting.record, state="running", attempts=(attempt,)))


def ended(code: int, **fields: Any) -> dict[str, QueueRun]:
    return {RUN: QueueRun((PC,), "cuda:0", code, "exited", results_at=PC, **fields)}


def test_jobs_get_the_fastest_free_devices_in_their_order() -> None:
    decision = scheduled(job(1), job(2), job(3, priority=5), job(4), job(5))
    assert placed(decision) == {
        3: ("pc", "cuda:0"),
        1: ("pc", "cuda:1"),
        2: ("mac", "mps"),
        4: ("nas", "cpu"),
    }
    assert decision.waits == {5: "waits for a free machine"}
    assert decision.changed[1].why == "started on pc"


def test_job_waits_for_memory_that_it_needs() -> None:
    decision = scheduled(
        job(1, needs_bytes=12 * GIB), job(2, needs_bytes=12 * GIB), job(3, needs_bytes=64 * GIB)
    )
    assert placed(decision) == {1: ("pc", "cuda:0"), 2: ("mac", "mps")}
    assert decision.waits == {3: "needs 64 GiB on each device; the largest here has 24 GiB"}


def test_device_of_another_run_is_not_free() -> None:
    other = QueueRun((PC, MAC))
    assert placed(scheduled(job(1), job(2), runs={"by-hand": other})) == {1: ("nas", "cpu")}
    assert placed(scheduled(job(1), runs={"by-hand": QueueRun((PC, MAC), code=0)})) == {1: ("pc", "cuda:0")}


def test_job_on_one_machine_waits_for_all_of_its_devices_and_keeps_them() -> None:
    busy = running(1)
    decision = scheduled(
        busy, job(2, each="machine", nodes=(PC,)), job(3), runs={RUN: QueueRun((PC,), "cuda:0")}
    )
    assert decision.waits == {2: "waits until all of pc is free"}
    assert placed(decision) == {3: ("mac", "mps")}, "the other device of pc is kept for job 2"
    free = scheduled(job(2, each="machine"))
    assert placed(free) == {2: ("pc", "")}


def test_job_on_all_machines_waits_for_them_and_is_not_overtaken() -> None:
    decision = scheduled(running(1), job(2, each="all"), job(3), runs={RUN: QueueRun((PC,), "cuda:0")})
    assert placed(decision) == {}
    assert decision.waits == {2: "waits until pc is free", 3: "waits for a free machine"}
    assert placed(scheduled(job(2, each="all"))) == {2: ("mac pc nas", "")}
    few = job(2, each="all", run_options=RunOptions(title="train", min_nodes=4))
    assert scheduled(few).waits == {2: "needs 4 machines; 3 can be used now"}


def test_paused_machine_and_named_machines_are_respected() -> None:
    paused = QueueMachine(PC, FAST.devices, "its user paused it")
    assert placed(scheduled(job(1), machines=(paused, SMALL))) == {1: ("nas", "cpu")}
    decision = scheduled(job(1, nodes=(PC,)), job(2, nodes=(MAC,)), machines=(paused, SMALL))
    assert decision.waits == {
        1: "waits for pc, which is paused: its user paused it",
        2: "waits for mac",
    }


def test_job_waits_for_those_before_it_and_is_cancelled_with_them() -> None:
    first, second = job(1), job(2, after=(1,))
    assert scheduled(running(1), second).waits == {2: "waits for job 1"}
    done = replace(first, record=replace(first.record, state="done"))
    assert placed(scheduled(done, second)) == {2: ("pc", "cuda:0")}
    record = cancel_job(first.record, "mac")
    assert record is not None
    decision = scheduled(replace(first, record=record), second)
    assert (decision.changed[2].state, decision.changed[2].why) == (
        "cancelled",
        "job 1, after which it was to start, is not done",
    )


def test_paused_job_does_not_start() -> None:
    waiting = job(1)
    record = pause_job(waiting.record, is_paused=True)
    assert record is not None
    assert scheduled(replace(waiting, record=record)).waits == {1: "is paused"}


def test_attempt_without_a_run_is_started_once_its_machine_is_present() -> None:
    current = running(1)
    decision = scheduled(current)
    assert [(begun.job.number, begun.attempt.number) for begun in decision.started] == [(1, 1)]
    assert scheduled(current, away_s={PC: 1.0}).started == []
    assert scheduled(current, runs={RUN: QueueRun((PC,), "cuda:0")}).started == []


def test_lost_machine_ends_the_attempt_after_a_while_and_its_run_is_stopped() -> None:
    current = running(1)
    runs = {RUN: QueueRun((PC,), "cuda:0")}
    assert not scheduled(current, runs=runs, away_s={PC: AWAY_S - 1}).changed
    record = scheduled(current, runs=runs, away_s={PC: AWAY_S + 1}).changed[1]
    assert (record.state, record.attempts[-1].end, record.why) == ("waiting", "lost", "pc went away")
    again = scheduled(replace(current, record=record), machines=(SLOW,), runs=runs)
    assert again.stopped == [RUN]
    assert placed(again) == {1: ("mac", "mps")}
    assert again.changed[1].attempts[-1].number == 2


def test_success_counts_when_the_files_are_packed() -> None:
    current = running(1)
    assert not scheduled(current, runs=ended(0, is_collected=False)).changed
    record = scheduled(current, runs=ended(0, results=bytes(32))).changed[1]
    assert (record.state, record.results, record.results_at) == ("done", bytes(32), PC)
    assert (
        scheduled(current, runs=ended(0, is_collected=False, ended_s=COLLECT_S + 1)).changed[1].state
        == "done"
    )
    assert placed(scheduled(current, job(2), runs=ended(0, is_collected=False))) == {2: ("pc", "cuda:0")}


def test_running_job_that_does_not_go_on_says_why() -> None:
    current, active = running(1), {RUN: QueueRun((PC,), "cuda:0")}
    assert scheduled(current, runs=active).waits == {}
    assert scheduled(current, runs=active, away_s={PC: 3.0}).waits == {
        1: "pc is away; after 15 s the job waits for a device again"
    }
    paused = FAST._replace(paused="it runs on battery")
    assert scheduled(current, runs=active, machines=(paused, SLOW)).waits == {
        1: "pc is paused: it runs on battery"
    }


def test_failed_job_without_another_machine_says_that_there_is_none() -> None:
    record = scheduled(running(1), runs=ended(3), machines=(FAST,)).changed[1]
    assert record.why == "exited; no other machine can try it now"
    record = scheduled(running(1, retries=0), runs=ended(3)).changed[1]
    assert record.why == "exited"


def test_job_does_not_start_while_the_one_before_it_is_not_known_here() -> None:
    decision = scheduled(job(2, after=(1,)))
    assert placed(decision) == {}
    assert decision.waits == {2: "waits for job 1, which no connected machine knows"}


def test_files_that_are_packed_after_the_end_are_not_lost() -> None:
    current = running(1)
    late = scheduled(current, runs=ended(0, is_collected=False, ended_s=COLLECT_S + 1)).changed[1]
    assert late.results_note == "its files are not packed yet, and pc must be online for that"
    done = replace(current, record=late)
    assert not scheduled(done, runs=ended(0, is_collected=False)).changed
    assert not scheduled(done).changed, "the machine is away"
    record = scheduled(done, runs=ended(0, results=bytes(32))).changed[1]
    assert (record.state, record.results, record.results_at) == ("done", bytes(32), PC)
    assert (record.is_collected, record.results_note) == (True, "")
    assert not scheduled(replace(done, record=record), runs=ended(0, results=bytes(32))).changed


def test_reason_why_files_were_not_packed_is_kept() -> None:
    record = scheduled(running(1), runs=ended(0, results_note="the results stay in /runs/folder")).changed[1]
    assert (record.results, record.results_note) == (b"", "the results stay in /runs/folder")
    long = scheduled(running(1), runs=ended(0, results_note="x" * 4000)).changed[1]
    assert decode_job(encode_job(long)) == long


def test_failed_job_is_tried_on_another_machine_once() -> None:
    record = scheduled(running(1), runs=ended(3)).changed[1]
    assert (record.state, record.attempts[-1].end) == ("waiting", "failed")
    current = replace(running(1), record=record)
    assert placed(scheduled(current, runs=ended(3))) == {1: ("mac", "mps")}, "not on the same machine"
    assert scheduled(running(1), runs=ended(3), machines=(FAST,)).changed[1].state == "failed"
    assert scheduled(running(1, retries=0), runs=ended(3)).changed[1].state == "failed"


def test_failure_while_its_machine_is_away_is_a_loss() -> None:
    record = scheduled(running(1), runs=ended(137), away_s={PC: 0.5}).changed[1]
    assert (record.state, record.attempts[-1].end) == ("waiting", "lost")


def test_job_that_ran_out_of_memory_gets_a_larger_device() -> None:
    attempt = JobAttempt(number=1, nodes=(MAC,), device="mps")
    current = replace(job(1), record=replace(job(1).record, state="running", attempts=(attempt,)))
    runs = {RUN: QueueRun((MAC,), "mps", 137, "ran out of memory", lacks_memory=True)}
    record = scheduled(current, runs=runs).changed[1]
    assert record.attempts[-1].short_of == 16 * GIB
    decision = scheduled(replace(current, record=record), runs=runs)
    assert placed(decision) == {1: ("pc", "cuda:0")}, "the only device with more than 16 GiB"


def out_of_memory(node: bytes, device: str, **options: Any) -> tuple[KnownJob, dict[str, QueueRun]]:
    """Return a running job, and its run, which ran out of memory."""
    run = QueueRun((node,), device, 137, "ran out of memory", lacks_memory=True)
    return running(1, node, device, **options), {RUN: run}


@pytest.mark.parametrize("retries", [0, 1])
def test_job_that_ran_out_of_memory_waits_for_a_larger_device(retries: int) -> None:
    current, runs = out_of_memory(NAS, "cpu", retries=retries)
    record = scheduled(current, machines=(SMALL,), runs=runs).changed[1]
    assert (record.state, record.attempts[-1].short_of) == ("waiting", 4 * GIB)
    current = replace(current, record=record)
    decision = scheduled(current, machines=(SMALL,), runs=runs)
    assert not decision.changed
    assert decision.waits == {1: "ran out of memory; waits for a device with more than 4 GiB"}
    assert placed(scheduled(current, runs=runs)) == {1: ("pc", "cuda:0")}, "a larger one has come"


def test_job_that_ran_out_of_memory_may_use_a_larger_device_of_the_same_machine() -> None:
    current, runs = out_of_memory(PC, "cuda:1", retries=0)
    record = scheduled(current, machines=(FAST,), runs=runs).changed[1]
    decision = scheduled(replace(current, record=record), machines=(FAST,), runs=runs)
    assert placed(decision) == {1: ("pc", "cuda:0")}


def test_missing_memory_does_not_count_as_a_try() -> None:
    current, runs = out_of_memory(NAS, "cpu", retries=1)
    again = scheduled(current, runs=runs).changed[1]
    second = scheduled(replace(current, record=again), runs=runs).changed[1]
    name = attempt_run(current.spec, 2)
    failed = QueueRun((PC,), "cuda:0", 3, "exited", results_at=PC)
    third = scheduled(replace(current, record=second), runs={**runs, name: failed}).changed[1]
    assert (third.state, third.attempts[-1].end) == ("waiting", "failed"), "one try is left"


def test_job_on_all_machines_that_ran_out_of_memory_has_failed() -> None:
    attempt = JobAttempt(number=1, nodes=(MAC, NAS))
    waiting = job(1, each="all")
    current = replace(waiting, record=replace(waiting.record, state="running", attempts=(attempt,)))
    runs = {RUN: QueueRun((MAC, NAS), "", 137, "ran out of memory", lacks_memory=True)}
    record = scheduled(current, machines=(SLOW, SMALL), runs=runs).changed[1]
    assert (record.state, record.why) == ("failed", "ran out of memory; no other machine can try it now")


def test_run_that_a_person_stopped_cancels_its_job() -> None:
    record = scheduled(running(1), runs=ended(130, is_stopped=True)).changed[1]
    assert (record.state, record.attempts[-1].end) == ("cancelled", "stopped")


def test_script_that_exits_with_the_code_of_a_stop_has_failed() -> None:
    record = scheduled(running(1), runs=ended(130)).changed[1]
    assert (record.state, record.attempts[-1].end) == ("waiting", "failed"), "another machine tries it"


def test_job_whose_files_did_not_come_waits_and_has_not_failed() -> None:
    runs = ended(1, lacks_files=True)
    record = scheduled(running(1, retries=0), runs=runs).changed[1]
    assert (record.state, record.attempts[-1].end) == ("waiting", "lost")
    current = replace(running(1, retries=0), record=record)
    waits = scheduled(current, runs=runs, absent_files={1: (MAC,)})
    assert not waits.changed
    assert waits.waits == {1: "waits for its files, which only mac has"}
    assert placed(scheduled(current, runs=runs)) == {1: ("pc", "cuda:0")}, "also on the same machine"


def test_job_without_its_files_does_not_keep_others_from_devices() -> None:
    first, second = job(1, each="machine"), job(2, each="machine")
    decision = scheduled(first, second, machines=(SLOW,), absent_files={1: (PC, NAS)})
    assert decision.waits == {1: "waits for its files, which only pc and nas have"}
    assert placed(decision) == {2: ("mac", "")}


def test_job_of_a_removed_owner_is_cancelled() -> None:
    current = replace(job(1), is_authorized=False, spec=replace(job(1).spec, by=NAS))
    record = scheduled(current).changed[1]
    assert record.state == "cancelled"
    assert record.why == "nas, where it was added, is no longer an owner of this cluster"


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_ended_job_is_never_changed(state: Any) -> None:
    current = job(1)
    over = replace(current, record=replace(current.record, state=state, is_collected=True))
    decision = scheduled(over, runs=ended(0), away_s={PC: 100.0})
    assert not decision.changed
    assert not decision.started


def test_end_of_a_job_has_the_time_by_which_old_jobs_are_forgotten() -> None:
    assert scheduled(running(1), runs=ended(0)).changed[1].ended_at == 7.0
    assert scheduled(running(1, retries=0), runs=ended(3)).changed[1].ended_at == 7.0
    assert scheduled(running(1), runs=ended(3)).changed[1].ended_at == 0.0, "it is tried again"


# records that only this machine has on disk


def test_job_that_is_not_saved_is_neither_started_nor_changed() -> None:
    decision = scheduled(job(1), unsaved=[1])
    assert decision.changed == {}
    assert decision.waits == {1: "waits until most machines have saved it"}
    begun = running(1)
    assert [start.job for start in scheduled(begun).started] == [begun]
    assert scheduled(begun, unsaved=[1]).started == []
    assert scheduled(begun, runs=ended(0), unsaved=[1]).changed == {}
    cancelled = cancel_job(begun.record, "mac")
    assert cancelled is not None
    active = {RUN: QueueRun((PC,), "cuda:0")}
    stopped = replace(begun, record=cancelled)
    assert scheduled(stopped, runs=active).stopped == [RUN]
    assert scheduled(stopped, runs=active, unsaved=[1]).stopped == []


def test_devices_of_a_job_that_is_not_saved_stay_its_own() -> None:
    decision = scheduled(running(1), job(2), machines=(FAST,), unsaved=[1])
    assert placed(decision) == {2: ("pc", "cuda:1")}


@pytest.mark.parametrize("state", ["done", "failed"])
def test_job_follows_another_only_when_the_end_of_that_one_is_saved(state: str) -> None:
    first, second = job(1), job(2, after=(1,))
    first = replace(first, record=replace(first.record, state=state))
    decision = scheduled(first, second, unsaved=[1])
    assert decision.changed == {}
    assert decision.waits == {2: "waits for job 1"}
    assert list(scheduled(first, second).changed) == [2]


def test_attempt_keeps_its_time_so_that_each_coordinator_starts_the_same_run() -> None:
    attempt = scheduled(job(1)).changed[1].attempt
    assert attempt is not None
    assert attempt.at == 7.0


@pytest.mark.parametrize("each", ["device", "machine", "all"])
def test_thousands_of_equal_jobs_look_at_the_machines_only_a_few_times(each: str) -> None:
    class Counted(list[QueueMachine]):
        looks = 0

        def __iter__(self) -> Iterator[QueueMachine]:
            self.looks += 1
            return super().__iter__()

    machines = Counted([SLOW, FAST, SMALL])
    busy = {f"other-{node[0]}": QueueRun((node,)) for node in (MAC, PC, NAS)}
    jobs = [job(number, each=each) for number in range(1, 101)]
    decision = scheduled(*jobs, machines=machines, runs=busy)
    assert placed(decision) == {}
    assert len(decision.waits) == len(jobs)
    assert machines.looks <= 6
