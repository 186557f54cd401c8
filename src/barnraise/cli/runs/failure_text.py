"""Texts about the failures of a run at its end: each error once, with its machines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.agent_client.run_requests import FailureRow, RunRow
from barnraise.core.units import counted

_NO_KEYBOARD = "Workers have no keyboard. Pass values as arguments: barnraise run train.py --epochs 3"


def restarted_lines(row: RunRow) -> list[str]:
    """Return a line for each error after which workers were restarted, with the names of their machines."""
    final = set(map(id, final_failures(row)))  # two failures of one worker may be equal
    restarted = [failure for failure in row.failures if not failure.follows and id(failure) not in final]
    by_summary: dict[str, list[str]] = {}
    for failure in restarted:
        machines = by_summary.setdefault(failure.summary, [])
        if failure.machine not in machines:
            machines.append(failure.machine)
    return [f"{', '.join(machines)}: {summary}; restarted" for summary, machines in by_summary.items()]


def final_failures(row: RunRow) -> list[FailureRow]:
    """Return the failure that ended the run, and the same one of other workers; empty if it did not fail."""
    roots = [failure for failure in row.failures if not failure.follows]
    if row.code in (None, 0) or row.was_stopped or not roots:
        return []
    of_rank = [item for item in roots if (item.rank, item.machine) == (row.failed_rank, row.failed_on)]
    summary = (of_rank or roots)[-1].summary
    last = {(failure.machine, failure.rank): failure for failure in roots}
    return [failure for failure in last.values() if failure.summary == summary]


def final_line(row: RunRow) -> str:
    """Return the last line about a run: its result, or the error and the machines on which it happened."""
    news = news_of(row)
    return f"run {row.run}: {news}" if news == row.sentence else f"run {row.run} failed: {news}"


def news_of(row: RunRow) -> str:
    """Return how the run is, or the error that ended it and the machines on which it happened."""
    failures = final_failures(row)
    if not failures or failures[0].signal:
        return row.sentence
    return f"{failures[0].summary}, on {_machines(row, failures)}"


def is_traceback_shown(row: RunRow, *, all_output: bool) -> bool:
    """Return whether the output of rank 0, or of all ranks, had the traceback of the failure already."""
    return any(all_output or failure.rank == 0 for failure in final_failures(row) if not failure.signal)


def failure_hint(row: RunRow) -> str:
    """Return what to do about a failure whose cause is common and not obvious; empty if there is nothing."""
    failures = final_failures(row)
    return _NO_KEYBOARD if failures and failures[0].summary.startswith("EOFError") else ""


def _machines(row: RunRow, failures: Sequence[FailureRow]) -> str:
    names = list(dict.fromkeys(failure.machine for failure in failures))
    if len(names) > 1 and set(names) == set(row.machines):
        return f"all {counted(len(names), 'machine')}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
