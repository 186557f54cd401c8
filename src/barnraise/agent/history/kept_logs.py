"""Logs of runs on this machine's disk: list them, and remove the oldest ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from barnraise.agent_client.history.requests import KeptLog
from barnraise.core.files import discard, remove_tree
from barnraise.history.log_file import ALONE, history_directory, logs_of, read_head
from barnraise.history.logs.retention import is_removed, runs_beyond


def kept_logs(state: Path) -> list[KeptLog]:
    """Return all logs; those of the run that changed last come first."""
    by_run: dict[str, list[KeptLog]] = defaultdict(list)
    for run in _runs(state):
        for node, path in logs_of(state, run).items():
            try:
                facts = path.stat()
            except OSError:
                continue
            by_run[run].append(KeptLog(run, node, facts.st_size, facts.st_mtime))
    newest_first = sorted(by_run.values(), key=lambda logs: -max(log.changed_at for log in logs))
    return [log for logs in newest_first for log in logs]


def remove_oldest(state: Path, most_bytes: int, active: Collection[str]) -> list[str]:
    """Remove records, those without a change for longest first, until they take at most ``most_bytes``."""
    removed = runs_beyond(kept_logs(state), most_bytes, active)
    for run in removed:
        remove_tree(history_directory(state) / run)
    return removed


def remove_named(state: Path, removals: Mapping[str, float], active: Collection[str]) -> list[str]:
    """Remove the records that a person has removed somewhere. Those of active runs stay until their end."""
    removed = []
    for run in _runs(state) if removals else ():
        if run in removals and run not in active:
            removed += [run for path in logs_of(state, run).values() if _remove_log(path, run, removals)]
            with suppress(OSError):  # it holds later logs
                (history_directory(state) / run).rmdir()
    return list(dict.fromkeys(removed))


def remove_drafts(state: Path) -> None:
    """Remove parts of logs that were not complete when the agent ended; scripts without one keep theirs."""
    for run in _runs(state):
        for draft in (history_directory(state) / run).glob("*.new"):
            if not draft.name.startswith(ALONE):
                discard(draft)


def _remove_log(path: Path, run: str, removals: Mapping[str, float]) -> bool:
    head = read_head(path)
    is_old = is_removed(run, head.at if head is not None else 0.0, removals)
    if is_old:
        discard(path)
    return is_old


def _runs(state: Path) -> list[str]:
    try:
        return sorted(path.name for path in history_directory(state).iterdir() if path.is_dir())
    except OSError:
        return []
