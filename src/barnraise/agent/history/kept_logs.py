"""Logs of runs on this machine's disk: list them, and remove the oldest ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from barnraise.agent_client.history.requests import KeptLog
from barnraise.core.files import remove_tree
from barnraise.history.log_file import history_directory, logs_of


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
    logs = kept_logs(state)
    total = sum(log.size for log in logs)
    removed = []
    for run in reversed(dict.fromkeys(log.run for log in logs)):
        if total <= most_bytes:
            break
        if run not in active:
            remove_tree(history_directory(state) / run)
            total -= sum(log.size for log in logs if log.run == run)
            removed.append(run)
    return removed


def _runs(state: Path) -> list[str]:
    try:
        return sorted(path.name for path in history_directory(state).iterdir() if path.is_dir())
    except OSError:
        return []
