"""What becomes of a run next: the decisions of whoever keeps it. Pure.

The keeper is the cluster's coordinator. It sees the newest record, each machine's report and who is here,
and says what the next version of the record is and why; None while there is nothing to change. Any agent
that becomes coordinator decides the same from the same facts, so nothing is lost with the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.core.units import counted
from barnraise.environments.compatibility import CompatibilityFinding, compare, usable
from barnraise.runs.control.eviction import Eviction, Pair, is_apart, is_waiting, leaving
from barnraise.runs.control.pausing import going_to_rest, rests
from barnraise.runs.control.restart_policy import forgive, kind_of
from barnraise.runs.control.results import has_results, with_ends, with_results_in_reach
from barnraise.runs.control.worker_status import (
    FAILED,
    WorkerStatus,
    first_cause,
    outcome_of,
    seen_of,
    states_of,
)
from barnraise.runs.record import (
    MOST_WORKERS,
    LeftOutNode,
    NodeReport,
    RunOutcome,
    RunRecord,
    RunSpec,
    WorkerSlot,
)

STOPPED = 130
_RESTART_BACKOFF = SteppedBackoff((0.0, 1.0, 2.0, 5.0, 10.0))
_SETTLED_S = 600.0  # a generation that ran so long has earned all its restarts again
_MOST_CARES_S = 20.0  # how long workers of a machine that is here may take to end
_MOST_STOPPING_S = 180.0
_STUCK_S = 3.0
_ONE_STUCK_S = 60.0  # the others may wait in a group that this one cannot reach
_AGAIN_S = 0.5  # between two attempts to heal a newcomer


class ReconcileInput(NamedTuple):
    """All that a decision depends on. ``since_s``: how long the keeper has seen this version."""

    order: RunSpec
    reports: Mapping[bytes, NodeReport]
    here: Sequence[bytes]
    since_s: float
    name: Callable[[bytes], str]
    stuck_s: float = 0.0  # for how long a member has waited for another group than this version's
    apart: Mapping[Pair, float] = {}  # for how long two machines have missed each other
    keeper: bytes = b""  # the machine that decides


def next_record(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """The next version, or None."""
    match record.phase:
        case "preparing":
            changed = _prepare(record, facts)
        case "running":
            changed = lead_session(record, facts) if record.elastic else _run(record, facts)
        case "restarting":
            changed = _restart(record, facts)
        case "stopping":
            changed = _stop(record, facts)
        case _:
            changed = None
    used = bool(record.restarts or record.forgiven)
    if changed is None and record.phase == "running" and used and facts.since_s > _SETTLED_S:
        changed = replace(
            record, restarts=0, forgiven=()
        )  # written down: a power cut forgets how long it ran
    return None if changed is None else replace(changed, version=record.version + 1)


def stopped_by(record: RunRecord, who: str, *, hard: bool) -> RunRecord | None:
    """A person wants it to end; None if it has ended, or ends so already."""
    if record.phase == "ended" or (record.phase == "stopping" and record.hard >= hard):
        return None
    outcome = record.outcome or RunOutcome(code=STOPPED, sentence=f"stopped from {who}")
    return replace(
        record,
        version=record.version + 1,
        phase="stopping",
        hard=hard or record.hard,
        why=f"stopped from {who}",
        outcome=outcome,
    )


def leads_alone(
    record: RunRecord,
    me: bytes,
    members: Collection[bytes],
    missing: Collection[bytes],
    dead: Collection[bytes],
) -> str | None:
    """Why this machine may lead the run although its side cannot decide; None if it may not.

    ``members``: of the last view that it knows. If it is none of them, the others have gone on without it,
    and decide what there is to decide until they let it in again.

    With two machines, whichever is left goes on; with more, only if all that are missing are known to be
    down. What it decides is provisional: it counts only if the others, once back, decided nothing else.
    """
    left = [node for node in record.nodes if node not in missing]
    if me not in members or not left or left[0] != me:
        return None
    if record.phase not in ("running", "restarting", "stopping"):
        return None
    if len(record.nodes) <= 2:
        return "the run is on two machines, and this one is left"
    if all(node in dead for node in missing):
        return "every machine that is missing is known to be down"
    return None


def provisional(record: RunRecord, changed: RunRecord) -> RunRecord:
    """The next version, marked with the last one that was agreed on."""
    return replace(changed, provisional=record.provisional or record.version)


# before the first worker


def _prepare(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    order = facts.order
    candidates = [node for node in order.nodes if node not in {one.node for one in record.left_out}]
    here = [node for node in candidates if node in facts.here]
    for node in candidates:
        report = facts.reports.get(node)
        if report is not None and node in here and report.stage in ("failed", "refused"):
            return _end(record, FAILED, f"{facts.name(node)}: {report.words}", node=node)
    if len(here) < len(candidates) and facts.since_s < order.wait_s:
        return None
    if len(here) < order.min_nodes:
        if facts.since_s < order.wait_s:
            return None
        absent = ", ".join(facts.name(node) for node in candidates if node not in here)
        gone = f": {absent} did not come" if absent else ""
        sentence = f"{len(here)} of at least {order.min_nodes} machines came within {order.wait_s:g} s{gone}"
        return _end(record, FAILED, sentence)
    known = {node: facts.reports[node] for node in here if node in facts.reports}
    if len(known) < len(here) or any(report.packages is None for report in known.values()):
        return None
    verdict = usable(environment_findings(order, known, facts.name), [facts.name(node) for node in here])
    reasons = {one.node: one.why for one in verdict.left_out}
    lacking = {node: reasons[facts.name(node)] for node in here if facts.name(node) in reasons}
    if verdict.blocking:
        worst = verdict.blocking[0]
        where = f"{worst.node}: " if worst.node else ""
        return _end(record, FAILED, f"{where}{worst.sentence} {worst.mend}")
    if lacking and (order.named or len(lacking) == len(here)):
        node, why = next(iter(lacking.items()))
        return _end(record, FAILED, f"{facts.name(node)}: {why}")
    if any(known[node].stage not in ("ready", "ended") for node in here if node not in lacking):
        return None
    away = [
        LeftOutNode(node, "it was not here when the run began") for node in candidates if node not in here
    ]
    lacks = [LeftOutNode(node, why) for node, why in lacking.items()]
    chosen = [node for node in here if node not in lacking]
    left_out = (*record.left_out, *away, *lacks)
    return _begin(replace(record, left_out=left_out), facts, chosen, "all machines are ready")


def environment_findings(
    order: RunSpec, reports: Mapping[bytes, NodeReport], name: Callable[[bytes], str]
) -> tuple[CompatibilityFinding, ...]:
    """What differs between the machines, compared with the one where the run was started."""
    reported = {node: report for node, report in reports.items() if report.packages is not None}
    if not reported:
        return ()
    first = order.by if order.by in reported else next(iter(reported))
    packages = {name(node): report.packages for node, report in reported.items() if report.packages}
    devices = {
        name(node): tuple(device.partition(":")[0] for device in report.devices)
        for node, report in reported.items()
    }
    return compare(packages[name(first)], packages, order.needs, devices)


def _begin(record: RunRecord, facts: ReconcileInput, nodes: Sequence[bytes], why: str) -> RunRecord:
    # A newcomer of the session before may have had a later start than any member.
    starts = [worker.start for report in facts.reports.values() for worker in report.workers]
    generation = max(record.generation, *starts, 0) + 1
    slots = tuple(
        replace(slot, start=generation)
        for node in nodes
        for slot in slots_of(node, facts.reports[node], facts.order)
    )
    where = f"{counted(len(slots), 'worker')} on {counted(len(nodes), 'machine')}"
    sentence = f"generation {generation}: {where}, because {why}"
    return replace(
        record,
        phase="running",
        generation=generation,
        began=generation,
        slots=slots,
        nursed=(),
        resting=(),
        elastic=False,
        why=sentence,
    )


def slots_of(node: bytes, report: NodeReport, order: RunSpec) -> list[WorkerSlot]:
    """One worker for each device of a machine, unless the user gave a number."""
    devices = report.devices or ("cpu",)
    count = order.per_node or len(devices)
    return [WorkerSlot(node, place, devices[place % len(devices)]) for place in range(count)]


# while workers are at work


def lead_session(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    """Members come and go; those who stay go on. At least one of them must stay."""
    seen = seen_of(record, facts.reports)
    record, raised = forgive(record, seen, facts.here)
    cause = first_cause(raised)
    if cause is not None:
        return _fail(record, outcome_of(cause, facts.name))
    record = with_ends(record, seen)
    living = [one for one in seen if one.slot.node in facts.here and not one.has_ended]
    alive = [one.slot for one in living if not one.is_going] or [one.slot for one in living]
    if not alive:
        if has_results(record):
            ended = with_results_in_reach(record, facts.here)
            sentence = "every worker that was left has ended well"
            if ended.results_at != record.results_at:
                sentence += f"; rank 0 is gone, the results are those of {facts.name(ended.results_at)}"
            return _well(ended, sentence)
        gone = [node for node in record.nodes if node not in facts.here]
        return _lost(record, facts, gone, first_cause([one for one in seen if one.failed]))
    if len(alive) == len(seen):
        states = [one.state for one in seen]
        found = leaving(record.slots, states, record.generation, facts.apart, facts.stuck_s, facts.keeper)
        if found:
            return _part(record, facts, found)
        if rest := going_to_rest(record, seen[0]):
            return _rest(record, facts, rest)
    else:
        record = replace(record, resting=())  # they may be needed now
    joining, nursed = ((), ()) if record.finished else _newcomers(record, facts, alive)
    slots = (*alive, *joining)
    if slots == record.slots:
        waiting = [is_waiting(one.state, record.generation) for one in seen]
        if (facts.stuck_s >= _STUCK_S and all(waiting)) or (facts.stuck_s >= _ONE_STUCK_S and any(waiting)):
            return _regroup(record, slots, nursed, "the last group broke although nobody is gone")
        return _nurse(record, facts, nursed)
    left = [slot for slot in record.slots if slot not in alive]
    names = ", ".join(dict.fromkeys(facts.name(slot.node) for slot in (left or joining)))
    going = next((one.is_going for one in seen if one.slot in left and one.is_going), "is gone")
    failed = next((one.state for one in seen if one.failed and one.state and one.state.code), None)
    if failed is not None:
        going = f"failed ({kind_of(failed)}) and is started again, for once"
    verb = going if left else "joined"
    why = f"{counted(len(slots), 'worker')}, because {names} {verb}"
    return _regroup(record, slots, nursed, why)


def _regroup(
    record: RunRecord, slots: Sequence[WorkerSlot], nursed: Sequence[WorkerSlot], why: str
) -> RunRecord:
    return replace(
        record,
        generation=record.generation + 1,
        slots=tuple(slots),
        nursed=tuple(nursed),
        nursery=record.version + 1,
        why=f"generation {record.generation + 1}: {why}",
    )


def _nurse(record: RunRecord, facts: ReconcileInput, nursed: Sequence[WorkerSlot]) -> RunRecord | None:
    """Newcomers get the state while the others go on; an attempt that failed is repeated."""
    states = states_of(facts.reports)
    waiting = (states[slot.key] for slot in nursed)
    failed = any(is_waiting(one, record.nursery) for one in waiting) and facts.since_s >= _AGAIN_S
    if tuple(nursed) == record.nursed and not failed:
        return None
    names = ", ".join(dict.fromkeys(facts.name(slot.node) for slot in nursed))
    why = f"{names}: gets the state while the others go on" if nursed else "the newcomers are gone"
    return replace(record, nursed=tuple(nursed), nursery=record.version + 1, why=why)


def _part(record: RunRecord, facts: ReconcileInput, found: Sequence[Eviction]) -> RunRecord:
    """Without those whom others cannot work with; they are let in again as newcomers when that is over."""
    out = {one.rank for one in found}
    slots = tuple(slot for rank, slot in enumerate(record.slots) if rank not in out)
    name = [facts.name(slot.node) for slot in record.slots]
    reasons = [
        f"the worker on {name[one.rank]} does nothing"
        if one.is_silent
        else f"{name[one.rank]} and {name[one.blamed_by]} do not reach each other"
        for one in found
    ]
    why = f"{counted(len(slots), 'worker')}, because {'; '.join(dict.fromkeys(reasons))}"
    record = replace(record, resting=())
    _, nursed = _newcomers(record, facts, slots)
    return _regroup(record, slots, nursed, why)


def _rest(record: RunRecord, facts: ReconcileInput, going: Sequence[LeftOutNode]) -> RunRecord:
    nodes = {one.node for one in going}
    slots = tuple(slot for slot in record.slots if slot.node not in nodes)
    record = replace(record, resting=(*record.resting, *going))
    _, nursed = _newcomers(record, facts, slots)
    verb = "rests" if len(going) == 1 else "rest"
    why = f"{_names([one.node for one in going], facts)} {verb}: {going[0].why}"
    return _regroup(record, slots, nursed, f"{counted(len(slots), 'worker')}, because {why}")


def _newcomers(
    record: RunRecord, facts: ReconcileInput, members: Sequence[WorkerSlot]
) -> tuple[tuple[WorkerSlot, ...], tuple[WorkerSlot, ...]]:
    """Who is let in now, and who gets the state before that. The latter are let in together."""
    found = _waiting(record, facts, members)
    nursed = tuple(slot for slot in record.nursed if slot in found)
    states = states_of(facts.reports)
    if nursed and all(states[slot.key].state == "near" for slot in nursed):
        return nursed, ()
    return (), nursed or found


def _waiting(
    record: RunRecord, facts: ReconcileInput, members: Sequence[WorkerSlot]
) -> tuple[WorkerSlot, ...]:
    nodes = list(dict.fromkeys(slot.node for slot in members))
    present = {slot.key for slot in record.slots}
    found = []
    for (node, local_rank, start), worker in sorted(states_of(facts.reports).items()):
        key = (node, local_rank, start)
        is_new = key not in present and not is_apart(node, nodes, facts.apart) and not rests(record, node)
        if worker.state in ("waiting", "near") and node in facts.here and is_new:
            devices = facts.reports[node].devices or ("cpu",)
            found.append(WorkerSlot(node, local_rank, devices[local_rank % len(devices)], start))
            nodes.append(node)
    return tuple(found[: MOST_WORKERS - len(record.slots)])


def _run(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    mine = [report for node, report in facts.reports.items() if node in record.nodes]
    if any(report.elastic and report.generation == record.generation for report in mine):
        return replace(record, elastic=True)
    gone = [node for node in record.nodes if node not in facts.here]
    for node in record.nodes:
        report = facts.reports.get(node)
        if report is not None and report.generation == record.generation and report.stage == "failed":
            return _fail(record, RunOutcome(code=FAILED, sentence=f"{facts.name(node)}: {report.words}"))
    seen = seen_of(record, facts.reports)
    failed = first_cause([one for one in seen if one.failed])
    if failed is not None and failed.state is not None and not failed.state.signal:
        return _fail(record, outcome_of(failed, facts.name))
    if failed is None and not gone:
        return _well(record, "every worker has ended well") if all(one.has_ended for one in seen) else None
    if failed is None and seen[0].has_ended and all(one.has_ended or one.slot.node in gone for one in seen):
        # The others had done their part; rank 0 has the result.
        return _well(record, f"rank 0 has ended well; {_names(gone, facts)} went away at the end")
    return _lost(record, facts, gone, failed)


def _well(record: RunRecord, sentence: str) -> RunRecord:
    return replace(record, phase="ended", why=sentence, outcome=RunOutcome(code=0, sentence=sentence))


def _lost(
    record: RunRecord, facts: ReconcileInput, gone: Sequence[bytes], failed: WorkerStatus | None
) -> RunRecord:
    """A machine or a worker died that had done nothing wrong: start again, or give up and say why."""
    order = facts.order
    if failed is not None:
        outcome = outcome_of(failed, facts.name)
        why = outcome.sentence
    else:
        why = f"{_names(gone, facts)} went away"
        outcome = RunOutcome(code=FAILED, sentence=why)
    used = 0 if facts.since_s > _SETTLED_S else record.restarts
    if used >= order.restarts:
        often = f" after {counted(used, 'restart')}" if used else ""
        return _fail(record, replace(outcome, sentence=f"{why}{often}; no restart is left"))
    if len([node for node in order.nodes if node in facts.here]) < order.min_nodes:
        needed = "machine is" if order.min_nodes == 1 else "machines are"
        why = f"{why}; at least {order.min_nodes} {needed} needed"
    return replace(record, phase="restarting", restarts=used + 1, finished=False, why=why)


def _fail(record: RunRecord, outcome: RunOutcome) -> RunRecord:
    return replace(record, phase="stopping", why=outcome.sentence, outcome=outcome)


# between two generations, and at the end


def _restart(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    if facts.since_s < _RESTART_BACKOFF.wait(record.restarts - 1):
        return None
    out = {one.node for one in record.left_out}
    left = [node for node in facts.order.nodes if node in facts.here and node not in out]
    if not left:
        return None  # all had their lids closed, say: it goes on when one is back, or a person stops it
    ready = [node for node in left if node in facts.reports and facts.reports[node].is_idle]
    ready = [node for node in ready if facts.reports[node].stage in ("ready", "ended")]
    if len(ready) < len(left) and facts.since_s < _MOST_CARES_S:
        return None
    if len(ready) < facts.order.min_nodes:
        if facts.since_s < max(facts.order.wait_s, _MOST_CARES_S):
            return None
        rest = f"{len(ready)} of at least {facts.order.min_nodes} machines came back"
        return _fail(record, RunOutcome(code=FAILED, sentence=f"{record.why}; {rest}"))
    return _begin(record, facts, ready, record.why)


def _stop(record: RunRecord, facts: ReconcileInput) -> RunRecord | None:
    for node in record.nodes:
        report = facts.reports.get(node)
        late = facts.since_s > _MOST_STOPPING_S  # it says that it still works; nobody waits for it any more
        if node in facts.here and report is not None and not report.is_idle and not late:
            return None
    outcome = record.outcome or RunOutcome(code=FAILED, sentence=record.why)
    return replace(record, phase="ended", outcome=outcome)


def _end(record: RunRecord, code: int, sentence: str, node: bytes = b"") -> RunRecord:
    outcome = RunOutcome(code=code, sentence=sentence, node=node)
    return replace(record, phase="ended", why=sentence, outcome=outcome)


def _names(nodes: Sequence[bytes], facts: ReconcileInput) -> str:
    return ", ".join(facts.name(node) for node in nodes)
