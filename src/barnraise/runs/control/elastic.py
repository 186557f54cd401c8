"""Membership of elastic sessions: which workers train, join, are paused or evicted. Pure.

The others keep training while members change; at least one of them must stay. A joining worker first
recovers the state live, in a process group of its own, and then becomes a member with the next generation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from barnraise.core.units import counted
from barnraise.runs.control.eviction import Eviction, choose_evictions, is_waiting_for_group, unreachable_peer
from barnraise.runs.control.failures import refusal
from barnraise.runs.control.pausing import nodes_to_pause, pause_reason
from barnraise.runs.control.restart_policy import apply_restart_policy, failure_kind
from barnraise.runs.control.transitions import ReconcileInput, fail, machine_names, restart_or_fail, succeed
from barnraise.runs.control.worker_status import (
    WorkerStatus,
    failure_outcome,
    reported_states,
    root_cause,
    worker_statuses,
)
from barnraise.runs.record import MOST_WORKERS, LeftOutNode, RunRecord, WorkerSlot

UNRESPONSIVE, UNREACHABLE = "does not respond", "cannot reach each other"  # reasons of an eviction
_STUCK_S = 3.0
_ONE_STUCK_S = 60.0  # the others may wait in a group that this worker cannot reach
_AGAIN_S = 0.5  # between two attempts of a live recovery


def reconcile_session(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """Return the next record of a session, or None if its membership does not change."""
    workers = worker_statuses(record, facts.reports)
    record, unforgiven = apply_restart_policy(record, workers, facts.present)
    cause = root_cause(unforgiven)
    if cause is not None:
        return fail(record, failure_outcome(cause, facts.name))
    record = record_successes(record, workers)
    living = [worker for worker in workers if worker.slot.node in facts.present and not worker.has_exited]
    alive = [worker.slot for worker in living if not worker.leave_reason] or _keep_one_machine(living, facts)
    if not alive:
        if has_results(record):
            ended = with_reachable_results(record, facts.present)
            sentence = "finished successfully"
            if lost := _lost_machines(record, facts):
                sentence += f" without {' and '.join(map(facts.name, lost))}; every sample counts once"
            if ended.results_at != record.results_at:
                sentence += f"; rank 0 is lost, so the results are those of {facts.name(ended.results_at)}"
            return succeed(ended, sentence)
        absent = [node for node in record.nodes if node not in facts.present]
        return restart_or_fail(
            record, facts, absent, root_cause([worker for worker in workers if worker.failed])
        )
    if len(alive) == len(workers):
        states = [worker.state for worker in workers]
        evictions = choose_evictions(
            record.slots, states, record.generation, facts.unreachable_s, facts.stuck_s, facts.controller
        )
        if evictions:
            return _evict(record, facts, evictions)
        if pausing := nodes_to_pause(record, workers[0]):
            return _pause(record, facts, pausing)
    else:
        record = replace(record, paused=())  # the paused machines may be needed now
    admitted, joining = ((), ()) if record.finished else _joining_workers(record, facts, alive)
    slots = (*alive, *admitted)
    if slots == record.slots:
        waiting = [is_waiting_for_group(worker.state, record.generation) for worker in workers]
        if (facts.stuck_s >= _STUCK_S and all(waiting)) or (facts.stuck_s >= _ONE_STUCK_S and any(waiting)):
            return _regroup(record, slots, joining, "the workers lost each other; all machines are present")
        return _recover_joining(record, facts, joining)
    left = [slot for slot in record.slots if slot not in alive]
    if why := _refusals([worker for worker in workers if worker.slot in left]):
        return _regroup(record, slots, joining, why)
    names = ", ".join(dict.fromkeys(facts.name(slot.node) for slot in (left or admitted)))
    finished = all(worker.succeeded for worker in workers if worker.slot in left)
    departure = "has finished" if finished else _loss([each for each in workers if each.slot in left], facts)
    verb = next(
        (_leave_reason(worker, facts) for worker in workers if worker.slot in left and worker.leave_reason),
        departure,
    )
    failed = next(
        (worker.state for worker in workers if worker.failed and worker.state and worker.state.code), None
    )
    if failed is not None:
        verb = f"failed ({failure_kind(failed)}) and is restarted once"
    has_finished = bool(left) and verb == "has finished"
    what = "waiting for" if has_finished else "training continues on"
    return _regroup(record, slots, joining, f"{names} {verb if left else 'joined'}", what)


def _refusals(left: Sequence[WorkerStatus]) -> str:
    """Return why the others refused the workers that are gone; empty if they did not refuse all of them."""
    reasons = [refusal(worker.state.tail) if worker.state is not None else "" for worker in left]
    return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""


def _loss(lost: Sequence[WorkerStatus], facts: ReconcileInput) -> str:
    """Return what happened to the machines of lost workers; one that is here has lost only workers."""
    if not all(worker.slot.node in facts.present for worker in lost):
        return "disappeared"
    signals = {worker.state.signal for worker in lost if worker.state is not None and worker.state.signal}
    cause = f" (signal {signals.pop()})" if len(signals) == 1 else ""
    return f"lost {'a worker' if len(lost) == 1 else 'workers'}{cause}"


def _keep_one_machine(leaving: Sequence[WorkerStatus], facts: ReconcileInput) -> list[WorkerSlot]:
    """Return the workers that stay if all want to leave: those of one paused machine, to stand still there.

    Without a paused machine all stay: they are asleep, or stop.
    """
    paused = [
        worker.slot.node
        for worker in leaving
        if (report := facts.reports.get(worker.slot.node)) is not None and report.paused
    ]
    return [worker.slot for worker in leaving if not paused or worker.slot.node == paused[0]]


def _leave_reason(worker: WorkerStatus, facts: ReconcileInput) -> str:
    """Return why the others continue without a living worker."""
    report = facts.reports.get(worker.slot.node)
    return f"is paused ({report.paused})" if report is not None and report.paused else worker.leave_reason


def _lost_machines(record: RunRecord, facts: ReconcileInput) -> list[bytes]:
    """Return the machines that took part, are offline now, and did not reach the end."""
    states = reported_states(facts.reports)
    finished = {key[0] for key, state in states.items() if state.state == "ended" and not state.failed}
    nodes = dict.fromkeys(slot.node for slot in record.workers)
    return [node for node in nodes if node not in facts.present and node not in finished]


def _regroup(
    record: RunRecord,
    slots: Sequence[WorkerSlot],
    joining: Sequence[WorkerSlot],
    why: str,
    what: str = "training continues on",
) -> RunRecord:
    """Return the record of the next generation with these members.

    ``why``: what has changed. ``what`` happens now with the machines that are left.
    """
    count = len({slot.node for slot in slots})
    machines = counted(count, "machine")
    workers = f" ({counted(len(slots), 'worker')})" if len(slots) > count else ""
    return replace(
        record,
        generation=record.generation + 1,
        slots=tuple(slots),
        joining=tuple(joining),
        recovery_attempt=record.version + 1,
        why=f"{why}; {what} {machines}{workers}",
    )


def _recover_joining(
    record: RunRecord, facts: ReconcileInput, joining: Sequence[WorkerSlot]
) -> RunRecord | None:
    """Let joining workers recover the state while the others train, and retry after a failure."""
    states = reported_states(facts.reports)
    waiting = (states[slot.key] for slot in joining)
    failed = (
        any(is_waiting_for_group(state, record.recovery_attempt) for state in waiting)
        and facts.since_s >= _AGAIN_S
    )
    if tuple(joining) == record.joining and not failed:
        return None
    names = ", ".join(dict.fromkeys(facts.name(slot.node) for slot in joining or record.joining))
    why = (
        f"{names}: receives the state while the others keep training"
        if joining
        else f"{names}: the worker stopped before it could join"
    )
    return replace(record, joining=tuple(joining), recovery_attempt=record.version + 1, why=why)


def _evict(record: RunRecord, facts: ReconcileInput, evictions: Sequence[Eviction]) -> RunRecord:
    """Return the record without the evicted workers; they may join again later."""
    evicted = {eviction.rank for eviction in evictions}
    slots = tuple(slot for rank, slot in enumerate(record.slots) if rank not in evicted)
    name = [facts.name(slot.node) for slot in record.slots]
    states = reported_states(facts.reports)
    keys = {key for key, state in states.items() if state.is_failing}
    failing = {rank for rank, slot in enumerate(record.slots) if slot.key in keys}
    reasons = [
        f"the worker on {name[eviction.rank]} failed"
        if eviction.rank in failing
        else f"the worker on {name[eviction.rank]} {UNRESPONSIVE}"
        if eviction.is_silent
        else f"{name[eviction.rank]} and {name[eviction.blamed_by]} {UNREACHABLE}"
        for eviction in evictions
    ]
    why = "; ".join(dict.fromkeys(reasons))
    record = replace(record, paused=())
    _, joining = _joining_workers(record, facts, slots)
    return _regroup(record, slots, joining, why)


def _pause(record: RunRecord, facts: ReconcileInput, pausing: Sequence[LeftOutNode]) -> RunRecord:
    """Return the record without the paused machines."""
    nodes = {machine.node for machine in pausing}
    slots = tuple(slot for slot in record.slots if slot.node not in nodes)
    record = replace(record, paused=(*record.paused, *pausing))
    _, joining = _joining_workers(record, facts, slots)
    verb = "is paused" if len(pausing) == 1 else "are paused"
    why = f"{machine_names([machine.node for machine in pausing], facts)} {verb}: {pausing[0].why}"
    return _regroup(record, slots, joining, why)


def _joining_workers(
    record: RunRecord, facts: ReconcileInput, members: Sequence[WorkerSlot]
) -> tuple[tuple[WorkerSlot, ...], tuple[WorkerSlot, ...]]:
    """Return the workers that become members now, and those that recover the state first.

    The latter become members together.
    """
    waiting = _waiting_workers(record, facts, members)
    joining = tuple(slot for slot in record.joining if slot in waiting)
    states = reported_states(facts.reports)
    if joining and all(states[slot.key].state == "near" for slot in joining):
        return joining, ()
    return (), joining or waiting


def _waiting_workers(
    record: RunRecord, facts: ReconcileInput, members: Sequence[WorkerSlot]
) -> tuple[WorkerSlot, ...]:
    """Return the workers that wait for a group and may join this one."""
    nodes = list(dict.fromkeys(slot.node for slot in members))
    present = {slot.key for slot in record.slots}
    waiting = []
    for (node, local_rank, start), worker in sorted(reported_states(facts.reports).items()):
        key = (node, local_rank, start)
        is_new = (
            key not in present
            and not unreachable_peer(node, nodes, facts.unreachable_s)
            and not pause_reason(record, node)
        )
        if worker.state in ("waiting", "near") and node in facts.present and is_new:
            devices = facts.reports[node].devices or ("cpu",)
            waiting.append(WorkerSlot(node, local_rank, devices[local_rank % len(devices)], start))
            nodes.append(node)
    return tuple(waiting[: MOST_WORKERS - len(record.slots)])


# results of a session


def record_successes(record: RunRecord, workers: Sequence[WorkerStatus]) -> RunRecord:
    """Note which machines hold results, by the workers that exited successfully.

    `run.save` writes the model on every machine, by its first worker. So the loss of one machine at the end
    costs nothing. The files of rank 0 are preferred: a script may have written more there.
    """
    successes = [worker for worker in workers if worker.succeeded]
    main = [worker.slot.node for worker in successes if worker.rank == 0]
    first = [worker.slot.node for worker in successes if worker.slot.local_rank == 0]
    return replace(
        record,
        finished=record.finished or bool(successes),
        results_at=record.results_at or next(iter(main), b""),
        results_also_at=record.results_also_at or next(iter(first), b""),
    )


def has_results(record: RunRecord) -> bool:
    """Return True if a worker that writes results has succeeded."""
    return bool(record.results_at or record.results_also_at)


def with_reachable_results(record: RunRecord, here: Collection[bytes]) -> RunRecord:
    """Choose the machine from which the results are collected at the end."""
    known = [node for node in (record.results_at, record.results_also_at) if node]
    return replace(record, results_at=next((node for node in known if node in here), known[0]))
