"""Reconcile of a run by its controller: spec and reports in, next record out. Pure.

The controller runs on the cluster's coordinator. It sees the newest record, the report of each machine and
which machines are present. Another coordinator decides the same from the same facts, so a change of the
coordinator loses nothing. This module has the phases; ``elastic`` has the membership of sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from barnraise.agent_client.run_requests import MAX_CHANGE_WORDS, STOPPED, RunChange
from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.core.units import counted
from barnraise.environments.compatibility import CompatibilityFinding, compare, select_machines
from barnraise.runs.control.elastic import reconcile_session
from barnraise.runs.control.failures import merge_failures
from barnraise.runs.control.transitions import (
    SETTLED_S,
    ReconcileInput,
    fail,
    machine_names,
    restart_or_fail,
    succeed,
)
from barnraise.runs.control.worker_status import FAILED, failure_outcome, root_cause, worker_statuses
from barnraise.runs.record import (
    MAX_CHANGES,
    MOST_WORKERS,
    LeftOutNode,
    NodeReport,
    RunOutcome,
    RunRecord,
    RunSpec,
    WorkerSlot,
)

_RESTART_BACKOFF = SteppedBackoff((0.0, 1.0, 2.0, 5.0, 10.0))
_MAX_EXIT_S = 20.0  # how long workers of a present machine may take to exit
_MAX_STOPPING_S = 180.0
_UNPAUSE = "On it, `barnraise limit` shows its limits, and `barnraise resume-machine` ends a pause."


def next_record(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """Return the next version of the record, or None if there is nothing to change."""
    match record.phase:
        case "preparing":
            changed = _reconcile_preparing(record, facts)
        case "running":
            changed = (
                reconcile_session(record, facts) if record.elastic else _reconcile_running(record, facts)
            )
        case "restarting":
            changed = _reconcile_restarting(record, facts)
        case "stopping":
            changed = _reconcile_stopping(record, facts)
        case _:
            changed = None
    used = bool(record.restarts or record.restarted_failures)
    if changed is None and record.phase == "running" and used and facts.since_s > SETTLED_S:
        changed = replace(
            record, restarts=0, restarted_failures=()
        )  # written down, because a power cut forgets how long it ran
    if record.phase != "ended":
        merged = merge_failures(changed or record, facts.reports)
        changed = merged if merged is not record else changed
    # A version of its own would begin the waits of the other phases again.
    named = changed or (record if record.phase == "running" else None)
    if named is not None and named.notifier != facts.notifier:
        changed = replace(named, notifier=facts.notifier)
    if changed is None:
        return None
    return replace(note_change(record, number_workers(changed)), version=record.version + 1)


def note_change(record: RunRecord, changed: RunRecord) -> RunRecord:
    """Return the changed record with its reason among the newest changes, if the reason is new."""
    if (changed.phase, changed.why) == (record.phase, record.why):
        return changed
    change = RunChange(record.version + 1, changed.phase, changed.why[:MAX_CHANGE_WORDS])
    return replace(changed, changes=(*changed.changes, change)[-MAX_CHANGES:])


def number_workers(record: RunRecord) -> RunRecord:
    """Return the record with the workers of its slots among all workers of the run."""
    known = {slot.key for slot in record.workers}
    added = [slot for slot in record.slots if slot.key not in known]
    return replace(record, workers=(*record.workers, *added)[:MOST_WORKERS]) if added else record


def request_stop(record: RunRecord, requester: str, *, hard: bool) -> RunRecord | None:
    """Return the record of a run that a person stops; None if the run has ended or stops already."""
    if record.phase == "ended" or (record.phase == "stopping" and record.hard >= hard):
        return None
    outcome = record.outcome or RunOutcome(code=STOPPED, sentence=f"stopped from {requester}")
    return replace(
        record,
        version=record.version + 1,
        phase="stopping",
        hard=hard or record.hard,
        why=f"stopped from {requester}",
        outcome=outcome,
    )


def end_forgotten(record: RunRecord) -> RunRecord:
    """Return the end of a run for a machine that was away while the others forgot the run.

    How it ended is not known any more. The record has no worker, so steps that were trained alone do not
    count and nothing is collected.
    """
    sentence = "it ended while this machine was away"
    return replace(
        record,
        version=record.version + 1,
        phase="ended",
        generation=record.generation + 1,
        slots=(),
        joining=(),
        paused=(),
        provisional=0,
        why=sentence,
        outcome=RunOutcome(code=STOPPED, sentence=sentence),
    )


def reason_to_decide_alone(
    record: RunRecord,
    me: bytes,
    members: Collection[bytes],
    missing: Collection[bytes],
    dead: Collection[bytes],
) -> str | None:
    """Return the reason why this machine may decide for the run without a quorum; None if it may not.

    ``members``: the members of the last view that this machine knows. If it is not among them, the others
    have evicted it and decide.

    Of two machines, the one that is left may continue. Of more, only if all missing machines are judged dead.
    A machine that has lost every link judges so, too. So decisions are provisional: they count only if the
    others decided nothing else in the meantime.
    """
    left = [node for node in record.nodes if node not in missing]
    if me not in members or not left or left[0] != me:
        return None
    if record.phase not in ("running", "restarting", "stopping"):
        return None
    if len(record.nodes) <= 2:
        return "the run is on two machines, and this one is left"
    if all(node in dead for node in missing):
        return "no machine that still answers hears from those that are missing"
    return None


def mark_provisional(record: RunRecord, changed: RunRecord) -> RunRecord:
    """Return the next version, marked with the last version that a quorum agreed on."""
    return replace(changed, provisional=record.provisional or record.version)


# preparing: before the first worker


def _has_begun(report: NodeReport) -> bool:
    """Return True if a machine has prepared something. A paused one does not begin."""
    return report.stage != "fetching" or report.done_bytes > 0


def _reconcile_preparing(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """Wait for the machines, compare their environments, and start the first generation."""
    spec = facts.spec
    candidates = [node for node in spec.nodes if node not in {machine.node for machine in record.left_out}]
    here = [node for node in candidates if node in facts.present]
    paused = {node: facts.reports[node].paused for node in here if _is_paused(facts, node)}
    if paused and (spec.named or len(paused) == len(here)):
        node = next((node for node in paused if not _has_begun(facts.reports[node])), None)
        if node is None:
            return None  # they were paused while they prepared: the run waits for them
        return _end_run(record, FAILED, f"{facts.name(node)}: {paused[node]}. {_UNPAUSE}", node=node)
    here = [node for node in here if node not in paused]
    for node in candidates:
        report = facts.reports.get(node)
        if report is not None and node in here and report.stage in ("failed", "refused"):
            sentence = f"{facts.name(node)}: {report.words}"
            return _end_run(record, FAILED, sentence, node=node, lacks_files=report.lacks_files)
    options = spec.options
    if len(here) + len(paused) < len(candidates) and facts.since_s < options.wait_s:
        return None
    if len(here) < options.min_nodes:
        if facts.since_s < options.wait_s:
            return None
        absent = ", ".join(facts.name(node) for node in candidates if node not in here)
        detail = f": {absent} did not come" if absent else ""
        sentence = (
            f"{len(here)} of at least {options.min_nodes} machines came within {options.wait_s:g} s{detail}"
        )
        return _end_run(record, FAILED, sentence)
    known = {node: facts.reports[node] for node in here if node in facts.reports}
    if len(known) < len(here) or any(report.packages is None for report in known.values()):
        return None
    verdict = select_machines(
        environment_findings(spec, known, facts.name), [facts.name(node) for node in here]
    )
    reasons = {machine.node: machine.why for machine in verdict.left_out}
    lacking = {node: reasons[facts.name(node)] for node in here if facts.name(node) in reasons}
    if verdict.blocking:
        worst = verdict.blocking[0]
        where = f"{worst.node}: " if worst.node else ""
        return _end_run(record, FAILED, f"{where}{worst.sentence} {worst.fix}")
    if lacking and (spec.named or len(here) - len(lacking) < max(1, options.min_nodes)):
        node, why = next(iter(lacking.items()))
        return _end_run(record, FAILED, f"{facts.name(node)}: {why}")
    if any(known[node].stage not in ("ready", "ended") for node in here if node not in lacking):
        return None
    away = [
        LeftOutNode(node, paused.get(node) or "it was not here when the run started")
        for node in candidates
        if node not in here
    ]
    lacks = [LeftOutNode(node, why, may_join=False) for node, why in lacking.items()]
    chosen = [node for node in here if node not in lacking]
    left_out = (*record.left_out, *away, *lacks)
    return _start_generation(replace(record, left_out=left_out), facts, chosen, "")


def _is_paused(facts: ReconcileInput, node: bytes) -> bool:
    """Tell whether the limits of a machine's user keep the run from it now."""
    return node in facts.reports and bool(facts.reports[node].paused)


def environment_findings(
    spec: RunSpec, reports: Mapping[bytes, NodeReport], name: Callable[[bytes], str]
) -> tuple[CompatibilityFinding, ...]:
    """Return the differences between the machines' environments; the starting machine is the reference."""
    reported = {node: report for node, report in reports.items() if report.packages is not None}
    if not reported:
        return ()
    first = spec.by if spec.by in reported else next(iter(reported))
    packages = {name(node): report.packages for node, report in reported.items() if report.packages}
    devices = {
        name(node): tuple(device.partition(":")[0] for device in report.devices)
        for node, report in reported.items()
    }
    return compare(packages[name(first)], packages, spec.program.needs, devices)


def _start_generation(
    record: RunRecord, facts: ReconcileInput, nodes: Sequence[bytes], why: str
) -> RunRecord:
    """Return the record of a new generation with all workers of these machines."""
    # A joining worker of the last session may have started later than any member.
    starts = [worker.start for report in facts.reports.values() for worker in report.workers]
    generation = max(record.generation, *starts, 0) + 1
    slots = tuple(
        replace(slot, start=generation)
        for node in nodes
        for slot in worker_slots(node, facts.reports[node], facts.spec)
    )
    where = f"{counted(len(slots), 'worker')} on {counted(len(nodes), 'machine')}"
    if devices := _devices_text(slots, facts.name):
        where = f"{where} ({devices})"
    sentence = f"restarted: {where}, because {why}" if record.generation else f"started: {where}"
    return replace(
        record,
        phase="running",
        generation=generation,
        first_generation=generation,
        slots=slots,
        joining=(),
        paused=(),
        elastic=False,
        why=sentence,
    )


def _devices_text(slots: Sequence[WorkerSlot], name: Callable[[bytes], str]) -> str:
    """Return the devices of each machine; empty if there is no accelerator."""
    if all(slot.device == "cpu" for slot in slots):
        return ""
    nodes = dict.fromkeys(slot.node for slot in slots)
    devices = {node: [slot.device for slot in slots if slot.node == node] for node in nodes}
    return "; ".join(f"{name(node)}: {', '.join(devices[node])}" for node in nodes)


def worker_slots(node: bytes, report: NodeReport, spec: RunSpec) -> list[WorkerSlot]:
    """Return one worker slot for each device of a machine, or as many as the spec says."""
    devices = report.devices or ("cpu",)
    count = spec.options.per_node or len(devices)
    return [WorkerSlot(node, index, devices[index % len(devices)]) for index in range(count)]


# running: a plain group, without a session


def _reconcile_running(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """Decide for a group without a session: one failed worker fails the run or restarts all."""
    reports = [report for node, report in facts.reports.items() if node in record.nodes]
    if any(report.elastic and report.generation == record.generation for report in reports):
        return replace(record, elastic=True)
    lost = [node for node in record.nodes if node not in facts.present]
    for node in record.nodes:
        report = facts.reports.get(node)
        if report is not None and report.generation == record.generation and report.stage == "failed":
            return fail(record, RunOutcome(code=FAILED, sentence=f"{facts.name(node)}: {report.words}"))
    workers = worker_statuses(record, facts.reports)
    failed = root_cause([worker for worker in workers if worker.failed])
    if failed is not None and failed.state is not None and not failed.state.signal:
        return fail(record, failure_outcome(failed, facts.name))
    if failed is None and not lost:
        return (
            succeed(record, "finished successfully") if all(worker.has_exited for worker in workers) else None
        )
    if (
        failed is None
        and workers[0].has_exited
        and all(worker.has_exited or worker.slot.node in lost for worker in workers)
    ):
        # The other workers had done their part, and rank 0 has the result.
        return succeed(record, f"rank 0 has finished; {machine_names(lost, facts)} went away at the end")
    return restart_or_fail(record, facts, lost, failed)


# restarting and stopping


def _reconcile_restarting(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """Start the next generation once the machines are idle and the backoff has passed."""
    if facts.since_s < _RESTART_BACKOFF.wait(record.restarts - 1):
        return None
    out = {machine.node for machine in record.left_out}
    left = [
        node
        for node in facts.spec.nodes
        if node in facts.present and node not in out and not _is_paused(facts, node)
    ]
    if not left:
        return None  # every machine may be asleep: the run continues when one is back
    ready = [node for node in left if node in facts.reports and facts.reports[node].is_idle]
    ready = [node for node in ready if facts.reports[node].stage in ("ready", "ended")]
    if len(ready) < len(left) and facts.since_s < _MAX_EXIT_S:
        return None
    if len(ready) < facts.spec.options.min_nodes:
        if facts.since_s < max(facts.spec.options.wait_s, _MAX_EXIT_S):
            return None
        rest = f"{len(ready)} of at least {facts.spec.options.min_nodes} machines came back"
        return fail(record, RunOutcome(code=FAILED, sentence=f"{record.why}; {rest}"))
    return _start_generation(record, facts, ready, record.why)


def _reconcile_stopping(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """End the run once no worker is left, or after a time limit."""
    for node in record.nodes:
        report = facts.reports.get(node)
        late = facts.since_s > _MAX_STOPPING_S
        if node in facts.present and report is not None and not report.is_idle and not late:
            return None
    outcome = record.outcome or RunOutcome(code=FAILED, sentence=record.why)
    return replace(record, phase="ended", outcome=outcome)


def _end_run(
    record: RunRecord, code: int, sentence: str, node: bytes = b"", *, lacks_files: bool = False
) -> RunRecord:
    outcome = RunOutcome(code=code, sentence=sentence, node=node, lacks_files=lacks_files)
    return replace(record, phase="ended", why=sentence, outcome=outcome)
