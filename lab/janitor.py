"""Removes a lab: kills what runs in its namespaces, then deletes them.

Run as a script it is the process that guards one lab. It outlives the lab's owner by the moment it
takes to clean up, whether the owner closed the lab, crashed or was killed. Being the only way a lab is
removed, it is used every time. Standard library only, because it must start fast and alone.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

PREFIX = "bylab-"
NETNS = Path("/run/netns")
RECORDS = Path("/run/barnraise-lab")
_PATIENCE = 60.0

Mark = tuple[int, int]
"""Device and inode: what the kernel knows a namespace by, with or without a name."""


def started_at(pid: int) -> int | None:
    """Return when the process started, in kernel ticks: with the pid this names a process uniquely."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def namespaces_of(lab: str) -> list[Path]:
    return sorted(NETNS.glob(f"{PREFIX}{lab}-*"))


def marks_of(namespaces: list[Path]) -> set[Mark]:
    marks = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            status = namespace.stat()
            marks.add((status.st_dev, status.st_ino))
    return marks


def pids_in(marks: set[Mark]) -> list[int]:
    """Return all processes in these namespaces, in any process group."""
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/{entry}/ns/net")
            if (status.st_dev, status.st_ino) in marks:
                pids.append(int(entry))
    return pids


def kill_all_in(marks: set[Mark]) -> None:
    deadline = time.monotonic() + _PATIENCE
    # Again until none is left: a process may fork between the look and the kill.
    while (pids := pids_in(marks)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def remove(lab: str) -> None:
    """Remove everything of the lab. Safe to repeat, also beside another process that does the same."""
    namespaces = namespaces_of(lab)
    marks = marks_of(namespaces)
    kill_all_in(marks)
    if namespaces:
        batch = "".join(f"netns del {namespace.name}\n" for namespace in namespaces)
        subprocess.run(["ip", "-force", "-batch", "-"], input=batch.encode(), capture_output=True)
        # One that was just entering when the others died.
        kill_all_in(marks)
    record = RECORDS / lab
    with contextlib.suppress(OSError, ValueError):
        shutil.rmtree(json.loads(record.read_text())["directory"], ignore_errors=True)
    with contextlib.suppress(OSError):
        record.unlink()


def known_labs() -> list[str]:
    """Return every lab with a record or a namespace."""
    labs = {path.name for path in RECORDS.glob("*")} if RECORDS.is_dir() else set()
    labs |= {path.name.split("-")[1] for path in NETNS.glob(f"{PREFIX}*-*")}
    return sorted(labs)


def is_orphan(lab: str) -> bool:
    """Tell whether neither the owner nor the janitor of this lab lives."""
    import fcntl

    try:
        with open(RECORDS / lab) as record:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            owner = json.load(record)
            return bool(started_at(owner["pid"]) != owner["started_at"])
    except OSError:
        return True
    except (ValueError, KeyError):
        return False


def guard(lab: str, owner: int, owner_started_at: int, directory: str) -> None:
    """Wait for a line on stdin or the owner's death, then remove the lab."""
    import fcntl

    RECORDS.mkdir(exist_ok=True)
    with open(RECORDS / lab, "a+") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        record.write(json.dumps({"pid": owner, "started_at": owner_started_at, "directory": directory}))
        record.flush()
        try:
            os.mkdir(directory, 0o700)
            handle = os.pidfd_open(owner)
            if started_at(owner) == owner_started_at:
                os.write(1, b"ready\n")
                # The pipe alone would not do: a process forked by the owner holds its other end too.
                select.select([0, handle], [], [])
        except OSError as error:
            print(f"The janitor of lab {lab} gives up: {error}", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            crashed = started_at(owner) != owner_started_at
            remove(lab)
            # A command the owner had started may still have been making namespaces.
            while crashed:
                time.sleep(0.2)
                crashed = bool(namespaces_of(lab))
                remove(lab)


def _stop(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    guard(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
