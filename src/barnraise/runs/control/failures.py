"""Failures of workers that the record of a run keeps, and one line for each of them. Pure.

A failure that is restarted does not fail the run. The record still keeps it, so that every machine can show
it during the run and afterwards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath

from msgspec.structs import replace

from barnraise.runs.record import (
    MAX_RECORDED_FAILURES,
    NodeReport,
    RecordedFailure,
    RunRecord,
    WorkerFailure,
)

_TRACE = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_RUN_FOLDER = "folder"  # the name of a run's working folder
_MAX_SUMMARY = 300
# Our errors say enough without their class and code.
_OURS = re.compile(r"^barnraise\.core\.errors\.\w+: \[[a-z-]+\] ")
_STEP_FAILED = "barnraise.core.errors.StepFailed: "  # an error of the script, which the script has caught
# These texts appear in workers that only notice the failure of another one.
FOLLOWERS = ("PeerLost", "peer-lost", "rank is lost", "DistBackendError", "Connection closed by peer")
_REFUSED = "barnraise.core.errors.WorkerRefused: "


def merge_failures(record: RunRecord, reports: Mapping[bytes, NodeReport]) -> RunRecord:
    """Return the record with the failures that the machines report.

    If there are too many, the machine with the most loses its newest one. So the first ones of each machine
    stay, and no machine can push out the failures of the others.

    A worker that was being stopped counts only if its exception is the one that ended the run: it had failed
    in the same way.
    """
    ended_by = exception_line(record.outcome.tail) if record.outcome is not None else ""
    known = {failure.key for failure in record.failures}
    added = [
        RecordedFailure(node, failure)
        for node, report in sorted(reports.items())
        for failure in report.failures
        if (node, failure.local_rank, failure.start) not in known
        and (not failure.is_stopping or (ended_by and exception_line(failure.tail) == ended_by))
    ]
    failures = _within_limit([*record.failures, *added])
    return record if failures == record.failures else replace(record, failures=failures)


def _within_limit(failures: list[RecordedFailure]) -> tuple[RecordedFailure, ...]:
    while len(failures) > MAX_RECORDED_FAILURES:
        counts = Counter(item.node for item in failures)
        highest = max(counts.values())
        newest = max(place for place, item in enumerate(failures) if counts[item.node] == highest)
        del failures[newest]
    return tuple(failures)


def root_failures(
    failures: Sequence[RecordedFailure], *, has_succeeded: bool = False
) -> list[RecordedFailure]:
    """Return the failures without those that follow from another one, or from the loss of a machine.

    Of a run that has not succeeded, the first one stays, so that something is shown.
    """
    roots = [item for item in failures if not any(text in item.failure.tail for text in FOLLOWERS)]
    return roots or ([] if has_succeeded else list(failures[:1]))


def final_failure(record: RunRecord) -> RecordedFailure | None:
    """Return the failure that ended the run: that of the worker in its outcome, else the last one."""
    outcome = record.outcome
    if outcome is None or outcome.code == 0 or outcome.is_stop or not record.failures:
        return None
    roots = root_failures(record.failures)
    named = [item for item in roots if (item.failure.rank, item.node) == (outcome.rank, outcome.node)]
    return (named or roots)[-1]


def summarize(failure: WorkerFailure) -> str:
    """Return a failure in one line: the exception and the script's line, the signal, or the exit code."""
    if failure.signal:
        if "memory was exhausted" in failure.tail:
            return "out of memory: the system killed the worker"
        return f"killed by signal {failure.signal}"
    exception = _OURS.sub("", exception_line(failure.tail))
    if not exception:
        return f"exited with code {failure.code}"
    place = _script_line(failure.tail)
    return f"{exception[:_MAX_SUMMARY]}{f' ({place})' if place else ''}"


def exception_line(tail: str) -> str:
    """Return the line that names the exception of the last traceback in a worker's output, or ""."""
    _, separator, trace = tail.rpartition(_TRACE)
    lines = [line for line in trace.splitlines() if line and not line[0].isspace()] if separator else []
    return lines[0].strip() if lines else ""


def has_failed_by_itself(tail: str) -> bool:
    """Tell whether a worker's output ends with an exception of its script, not with one that follows another.

    Such a worker may be slow to exit. If it is killed meanwhile, it has still failed.
    """
    exception = exception_line(tail)
    if exception.startswith(_STEP_FAILED):  # its hint follows
        return True
    if not exception or exception.startswith("barnraise.") or any(text in tail for text in FOLLOWERS):
        return False
    return tail.rstrip().rpartition("\n")[2].strip() == exception


def _script_line(tail: str) -> str:
    """Return ``train.py:31``: the last frame of the last traceback in the folder of the run."""
    for path, line in reversed(_FRAME.findall(tail.rpartition(_TRACE)[2])):
        parts = (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).parts
        if _RUN_FOLDER in parts:
            place = len(parts) - 1 - parts[::-1].index(_RUN_FOLDER)
            return f"{'/'.join(parts[place + 1 :])}:{line}"
    return ""


def refusal(tail: str) -> str:
    """Return why the other workers refused a worker, from its output; empty if they did not."""
    line = exception_line(tail)
    return _OURS.sub("", line)[:_MAX_SUMMARY] if line.startswith(_REFUSED) else ""
