"""Kills processes that a killed supervisor left behind. Runs in the agent."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from barnraise.agent.supervisor.messages import MARK_VARIABLE
from barnraise.agent.supervisor.pidfile import SUFFIX, PidRecord, ProcessIdentity, read_record
from barnraise.core.errors import ProtocolError

_SAME_START_S = 3.0  # precision of start times; process ids are not reused so soon
_DEADLINE_S = 5.0
_PAUSE_S = 0.02

_log = logging.getLogger(__name__)


class OrphanProcess(msgspec.Struct, frozen=True):
    """A run of an earlier agent, and how many of its processes were killed."""

    run: str
    generation: int
    killed: int


def kill_orphans(state_dir: Path) -> list[OrphanProcess]:
    """Kill processes that earlier supervisors left, by their pid files; call it before any new start."""
    orphans = []
    for path in sorted(state_dir.glob(f"*{SUFFIX}")):
        try:
            record = read_record(path)
        except (OSError, ProtocolError) as error:
            _log.warning("removing an unreadable pid file of an earlier run: %s", error)
        else:
            killed = kill_orphans_of(record)
            _log.info("killed %d leftover processes of run %s", killed, record.run)
            orphans.append(OrphanProcess(record.run, record.generation, killed))
        path.unlink(missing_ok=True)
    return orphans


def kill_orphans_of(record: PidRecord) -> int:
    """Kill a supervisor, its workers, their groups and all marked processes; return their number."""
    killed: set[int] = set()
    deadline = time.monotonic() + _DEADLINE_S
    while left := list(_processes_of(record)):
        if time.monotonic() > deadline:
            names = ", ".join(str(process.pid) for process in left)
            _log.warning("cannot kill processes %s of run %s; restart the machine", names, record.run)
            break
        for process in left:
            killed.add(process.pid)
            try:
                process.kill()
            except psutil.Error:
                pass  # gone, or not ours
        time.sleep(_PAUSE_S)
    return len(killed)


def _processes_of(record: PidRecord) -> Iterator[psutil.Process]:
    known = {seen.pid: seen for seen in (record.supervisor, *record.workers) if seen is not None}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (
                _is_recorded(process, known)
                or _in_group_of(process, known)
                or _has_mark(process, record.mark)
            ):
                yield process
        except psutil.Error:
            continue  # gone, or of another user


def _is_recorded(process: psutil.Process, known: dict[int, ProcessIdentity]) -> bool:
    seen = known.get(process.pid)
    return seen is not None and abs(process.create_time() - seen.started) <= _SAME_START_S


def _in_group_of(process: psutil.Process, known: dict[int, ProcessIdentity]) -> bool:
    """Tell whether the process group is led by a recorded process.

    A group keeps its number while it has members, so that checking the leader is enough.
    """
    if sys.platform == "win32":
        return False
    try:
        group = os.getpgid(process.pid)
        return group in known and _is_recorded(psutil.Process(group), known)
    except (OSError, psutil.Error):
        return False  # without a leader the mark decides


def _has_mark(process: psutil.Process, mark: str) -> bool:
    return bool(process.environ().get(MARK_VARIABLE) == mark)
