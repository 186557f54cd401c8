"""Notices that follow from two versions of a run's record: its end, and machines that are gone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from barnraise.agent.history.run_events import UNANSWERED, change_entries
from barnraise.agent.notifications.notice import MAX_NAME, MOST_NAMES, Notice, clean
from barnraise.core.sanitize import printable
from barnraise.history.entries import MembershipChange
from barnraise.history.outcome import end_state
from barnraise.runs.control.elastic import UNREACHABLE, UNRESPONSIVE
from barnraise.runs.record import ENDED, NodeReport, RunRecord

MOST_FILES_S = 60.0  # the notice of a success waits so long for the files
_LEAVES = " leaves"  # what a record says of a machine that left after its last step


class ChangeFacts(NamedTuple):
    """State of the cluster while a record changes. ``leaving``: machines that said goodbye."""

    run: str
    sender: str
    at: float
    reports: Mapping[bytes, NodeReport]
    present: Collection[bytes]
    leaving: Collection[bytes]
    name: Callable[[bytes], str]
    files: str = ""  # what is to be said of the files of a run that has ended


class FileFacts(NamedTuple):
    """State of the cluster after the end of a run. ``since_s``: seconds since its end was seen here."""

    since_s: float
    present: Collection[bytes]
    name: Callable[[bytes], str]


def notices_of(old: RunRecord, new: RunRecord, facts: ChangeFacts) -> list[Notice]:
    """Return the notices that the change from one version of a record to a later one calls for.

    A run that a person stopped calls for none. A provisional end may be followed by another one.
    """
    if new.phase == ENDED:
        return [] if _has_same_end(old, new) else _end(old, new, facts)
    if new.phase == "stopping":
        return []
    notices = []
    for entry in change_entries(old, new, facts.reports, facts.present, facts.at):
        if isinstance(entry, MembershipChange) and _is_gone(entry, old, new, facts):
            notices.append(_gone(entry, new, facts))
    return notices


def files_note(record: RunRecord, reports: Mapping[bytes, NodeReport], facts: FileFacts) -> str | None:
    """Return what a person should know of the files that a successful run wrote; empty if all are collected.

    Return None while their machine may still report it.
    """
    holder = record.results_at or (record.slots[0].node if record.slots else b"")
    if record.outcome is None or record.outcome.code or not holder:
        return ""
    name, report = facts.name(holder), reports.get(holder)
    if report is not None and report.collected:
        return f"{name}: {report.words}" if report.words else ""
    if facts.since_s < MOST_FILES_S:
        return None
    if holder not in facts.present:
        return f"the files that it wrote are on {name}, which is not here"
    return f"the files that it wrote on {name} are not all collected yet"


def watched_part(record: RunRecord) -> RunRecord:
    """Return what later changes of a record are compared with: without its spec and output of scripts."""
    failures = tuple(
        replace(failure, failure=replace(failure.failure, tail="")) for failure in record.failures
    )
    outcome = replace(record.outcome, tail="") if record.outcome is not None else None
    return replace(record, order=b"", failures=failures, outcome=outcome)


def names_of(nodes: Collection[bytes], name: Callable[[bytes], str]) -> tuple[str, ...]:
    """Return names of machines as a notice may have them."""
    return tuple(clean(name(node), MAX_NAME) for node in tuple(nodes)[:MOST_NAMES])


def _has_same_end(old: RunRecord, new: RunRecord) -> bool:
    """Tell whether a run has ended before in the same way; the majority only confirms such an end."""
    if old.phase != ENDED or old.outcome is None or new.outcome is None:
        return old.phase == ENDED
    return old.outcome.code == new.outcome.code


def _end(old: RunRecord, new: RunRecord, facts: ChangeFacts) -> list[Notice]:
    outcome = new.outcome
    if outcome is None or outcome.is_stop:
        return []
    is_done = end_state(outcome.code, was_stopped=outcome.is_stop) == "ended"
    reason = f"{outcome.sentence}; {facts.files}" if is_done and facts.files else outcome.sentence
    if new.provisional:
        reason += "; the other machines have not confirmed it yet"
    notice = Notice(
        event="done" if is_done else "failed",
        key=f"end {outcome.code}" + (" provisional" if new.provisional else ""),
        run=facts.run,
        state="done" if is_done else "failed",
        reason=clean(reason),
        at=facts.at,
        sender=clean(facts.sender, MAX_NAME),
        machines=names_of(new.nodes or old.nodes, facts.name),
    )
    return [notice]


def _is_gone(change: MembershipChange, old: RunRecord, new: RunRecord, facts: ChangeFacts) -> bool:
    """Tell whether a machine is gone by death or a lost connection, not by a stop of its agent.

    A worker that died on a machine that is here is restarted there: no machine is gone.
    """
    name = facts.name(change.node)
    if change.change == "evicted":
        shown, reasons = printable(name), change.reason.split("; ")
        return any(shown in reason and reason.endswith((UNRESPONSIVE, UNREACHABLE)) for reason in reasons)
    if change.change != "died" or change.reason != UNANSWERED or change.node in facts.leaving:
        return False
    newest = (entry.why.partition("; ")[0] for entry in new.changes if entry.version > old.version)
    left = {each for why in newest if why.endswith(_LEAVES) for each in why.removesuffix(_LEAVES).split(", ")}
    return name not in left


def _gone(change: MembershipChange, new: RunRecord, facts: ChangeFacts) -> Notice:
    return Notice(
        event="machine-gone",
        key=f"gone {change.node.hex()} {new.generation}",
        run=facts.run,
        state="running",
        reason=clean(change.reason),
        at=facts.at,
        sender=clean(facts.sender, MAX_NAME),
        lost_machine=clean(facts.name(change.node), MAX_NAME),
        machines=names_of(new.nodes, facts.name),
    )
