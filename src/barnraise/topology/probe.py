"""Speed probe: measures this machine once in a child process and caches the result by hardware.

The child needs torch, which the agent must never load. It runs at low priority and ends after seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta

import barnraise
from barnraise.core.files import write_atomically
from barnraise.topology.devices import Machine, ProbeReport, best_of

CACHE_NAME = "probe_cache.json"
_DEADLINE_S = 300.0  # an emulated processor imports torch in 100 s
_MOST_TRIES = 3
_MOST_ENTRIES = 8
_LARGEST_CACHE = 256 * 1024
_LARGEST_LINE = 64 * 1024
# Changes when figures of an older probe cannot be compared with new ones.
_FORM = 1
_NICE = 10
_COMMAND = (sys.executable, "-P", "-m", "barnraise.worker.probe")
# The kernel's own share of the memory differs a little from boot to boot.
_MEMORY_STEP = 256 * 1024 * 1024
if sys.platform == "win32":
    _LOW_PRIORITY_ON_WINDOWS = subprocess.BELOW_NORMAL_PRIORITY_CLASS | subprocess.CREATE_NO_WINDOW
else:
    _LOW_PRIORITY_ON_WINDOWS = 0

_log = logging.getLogger(__name__)


class _Cache(msgspec.Struct, frozen=True):
    reports: Annotated[dict[str, ProbeReport], Meta(max_length=64)] = {}


async def measured_speeds(
    machine: Machine,
    state_dir: Path,
    *,
    again: bool = False,
    deadline_s: float = _DEADLINE_S,
    command: Sequence[str] = _COMMAND,
) -> ProbeReport:
    """Return the speeds of this machine, from the cache or measured now. Never raises: a note has the error.

    A disturbed measurement is repeated at later calls, three times at most, and the best figures count.
    """
    remembered = remembered_speeds(machine, state_dir)
    settled = remembered is not None and (not remembered.disturbed or remembered.tries >= _MOST_TRIES)
    if remembered is not None and settled and not again:
        return remembered
    report = await run_probe(command, deadline_s)
    if not report.speeds:
        return remembered or report
    report = best_of(remembered, report)
    _remember(machine, state_dir, report)
    return report


def remembered_speeds(machine: Machine, state_dir: Path) -> ProbeReport | None:
    """Return the cached measurement of this hardware."""
    return _load(state_dir / CACHE_NAME).reports.get(hardware_key(machine))


def hardware_key(machine: Machine) -> str:
    """Return a key that changes with the hardware, the system and the version of torch."""
    parts = [
        str(_FORM),
        machine.os,
        machine.arch,
        machine.cpu_name,
        str(machine.cores),
        str(round(machine.memory_bytes / _MEMORY_STEP)),
        machine.torch or "",
        *(f"{device.kind}:{device.index}:{device.name}" for device in machine.devices),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


async def run_probe(command: Sequence[str] = _COMMAND, deadline_s: float = _DEADLINE_S) -> ProbeReport:
    """Run the probe's process to its end; if it fails, return a report with a note and no speeds."""
    try:
        # Not a process of asyncio: on Windows only another event loop than the agent's can start one.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            creationflags=_LOW_PRIORITY_ON_WINDOWS,
        )
    except OSError as error:
        return _failed(f"it could not be started ({error})")
    reading = asyncio.ensure_future(asyncio.to_thread(process.communicate))
    try:
        _lower_priority(process.pid)
        async with asyncio.timeout(deadline_s):
            out, complaints = await asyncio.shield(reading)
    except TimeoutError:
        return _failed(f"it did not end within {deadline_s:g} s")
    finally:
        if not reading.done():
            process.kill()
            await reading
    lines = out[:_LARGEST_LINE].splitlines()
    if process.returncode != 0 or not lines:
        words = complaints.decode("utf-8", "replace").strip().splitlines()
        return _failed(words[-1][:200] if words else f"it ended with {process.returncode}")
    try:
        return msgspec.json.decode(lines[-1], type=ProbeReport)
    except (ValueError, RecursionError) as error:
        return _failed(f"its report cannot be read ({error})")


def _lower_priority(pid: int) -> None:
    if sys.platform == "win32":
        return
    try:
        psutil.Process(pid).nice(_NICE)
    except psutil.Error:
        pass  # it has ended already


def _failed(why: str) -> ProbeReport:
    return ProbeReport(notes=(f"the speed of this machine is not known: the probe failed, {why}"[:400],))


def _environment() -> dict[str, str]:
    """Return an environment in which the child can import Barnraise, and torch without its plugins."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    root = str(Path(barnraise.__file__).parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, root])
    return environment


def _load(path: Path) -> _Cache:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_LARGEST_CACHE), type=_Cache)
    except (OSError, ValueError, RecursionError):
        return _Cache()  # measuring again costs seconds


def _remember(machine: Machine, state_dir: Path, report: ProbeReport) -> None:
    path = state_dir / CACHE_NAME
    key = hardware_key(machine)
    kept = [(other, value) for other, value in _load(path).reports.items() if other != key]
    reports = dict([*kept[-(_MOST_ENTRIES - 1) :], (key, report)])
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(_Cache(reports))), shared=True)
    except OSError as error:
        _log.debug("cannot cache the measured speeds in %s: %s", path, error)
