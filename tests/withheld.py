"""Tests that wait for machines and clocks mean nothing while a hypervisor withholds the processor.

A virtual machine is told how much of the time that it wanted went to others ("steal"). It is not told when it
stood still as a whole, or its disk did; a process beside the tests notices that. A test with machines or
processes that fails while much was withheld is neither passed nor failed: it is reported as skipped, with the
figure and the failure. Too many of these fail the whole run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

MOST_WITHHELD = 0.3  # of the time that was wanted: beyond this, a failure proves nothing
_LEAST_TICKS = 100  # of a hundredth of a second; less is no reason for anything
_MOST_UNDECIDED = 0.1  # of these tests
LONGEST_PAUSE_S = 1.5  # in which a process that only sleeps and syncs a byte does neither
_WATCH = """
import os, sys, threading, time
# Ends with the tests, however they end: then nobody holds the other end.
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
file = open(sys.argv[1] + ".byte", "wb", buffering=0)
last = time.monotonic()
while True:
    time.sleep(0.2)
    file.seek(0)
    file.write(b"x")
    os.fsync(file.fileno())
    now = time.monotonic()
    if now - last > float(sys.argv[2]):
        with open(sys.argv[1], "a") as pauses:
            print(last, now, file=pauses)
    last = now
"""


class Ticks(NamedTuple):
    """Of all processors since the system began."""

    wanted: int
    withheld: int

    def since(self, earlier: Ticks) -> float:
        """The share that was withheld."""
        wanted, withheld = self.wanted - earlier.wanted, self.withheld - earlier.withheld
        return withheld / wanted if withheld >= _LEAST_TICKS else 0.0


def ticks(path: Path = Path("/proc/stat")) -> Ticks:
    try:
        words = path.read_text().split("\n", 1)[0].split()
    except OSError:
        return Ticks(0, 0)
    user, nice, system, _, _, interrupt, soft, steal = map(int, words[1:9])
    return Ticks(user + nice + system + interrupt + soft + steal, steal)


class Pauses:
    """A process of its own: pytest's may be busy in one long call."""

    def __init__(self) -> None:
        self._room = tempfile.TemporaryDirectory(prefix="by-pauses-")
        self._file = Path(self._room.name) / "pauses"
        words = [sys.executable, "-S", "-E", "-c", _WATCH]
        words += [str(self._file), str(LONGEST_PAUSE_S)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._room.cleanup()

    def longest(self, since: float) -> float:
        """Seconds; 0 if there was none."""
        if not self._file.exists():
            return 0.0
        pairs = [tuple(map(float, line.split())) for line in self._file.read_text().splitlines()]
        return max((end - begin for begin, end in pairs if end > since), default=0.0)


class Undecided:
    """A plugin of pytest; the window is the test, or its module from the beginning if that was worse."""

    def __init__(self, pauses: Pauses | None = None) -> None:
        self.undecided: list[str] = []
        self._pauses = pauses
        self._test_began_at = time.monotonic()
        self._tests = 0
        self._module = ""
        self._module_began = self._test_began = ticks()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test_began, self._test_began_at = ticks(), time.monotonic()
        self._tests += _waits(item)
        if str(item.path) != self._module:
            self._module, self._module_began = str(item.path), self._test_began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if not report.failed or not _waits(item):
            return report
        now = ticks()
        share = max(now.since(self._test_began), now.since(self._module_began))
        pause = self._pauses.longest(self._test_began_at) if self._pauses is not None else 0.0
        if share > MOST_WITHHELD or pause:
            self.undecided.append(item.nodeid)
            words = _first_words(report)
            what = f"everything stood still for {pause:.1f} s"
            what = what if pause else f"{share:.0%} of the processor was withheld"
            why = f"undecided: {what} while it failed: {words}"
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, why)
        return report

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._pauses is not None:
            self._pauses.close()
        if len(self.undecided) > max(3, _MOST_UNDECIDED * self._tests):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.undecided:
            names = ", ".join(dict.fromkeys(self.undecided))
            terminalreporter.write_line(f"undecided, because the processor was withheld: {names}")


def _waits(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(name) is not None for name in ("lab", "slow"))
    return marked or "failure" in item.path.parts


def _first_words(report: pytest.TestReport) -> str:
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return lines[0][1:].strip() if lines else "no words"
