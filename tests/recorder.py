"""A plugin of pytest that writes down how a lane of the checks ended: ``-p tests.recorder --record FILE``.

The file names every failed test, with the first failure's text, the kind of its exception, and whether the
test waits for machines or clocks. `tests.lanes` reads it. It also holds how long each test took: the table in
`tests.tiers` is made from that.
"""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Before pytest does it: then pytest leaves it on at its end, and a process that does not exit still shows its
# stacks when `tests.lanes` ends it.
faulthandler.enable()

WAITING_MARKERS = ("lab", "clocks")
WAITING_FOLDERS = ("lab", "failure")
NEVER_WAITING_FOLDERS = ("numerics", "sim")
_MOST_TEXT = 8000


def waits(item: pytest.Item) -> bool:
    """Say whether a busy machine may be the reason for a failure of this test."""
    path = item.path
    folders = path.relative_to(item.config.rootpath).parts if item.config.rootpath in path.parents else ()
    if any(folder in folders for folder in NEVER_WAITING_FOLDERS):
        return False
    marked = any(item.get_closest_marker(name) is not None for name in WAITING_MARKERS)
    return marked or any(folder in folders for folder in WAITING_FOLDERS)


def kind_of(error: BaseException) -> str:
    """Return the name under which a failure is written down; a rerun is only for the first three."""
    if isinstance(error, AssertionError):
        return "AssertionError"
    if isinstance(error, TimeoutError):
        return "TimeoutError"
    if isinstance(error, pytest.fail.Exception):
        return "pytest.fail"  # pytest-timeout fails a test by this, too
    return type(error).__name__


class Recorder:
    """Collects the reports of one pytest process, or of all its workers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed: set[str] = set()
        self._skipped: set[str] = set()
        self._failures: list[dict[str, Any]] = []
        self._durations: dict[str, float] = {}
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._durations[report.nodeid] = self._durations.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._note(report, getattr(report, "kind", "unknown"), getattr(report, "waits", False))
        elif report.skipped:
            self._skipped.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report, "collection", False)

    def _note(self, report: pytest.TestReport | pytest.CollectReport, kind: str, waits: bool) -> None:
        text = report.longreprtext[-_MOST_TEXT:]
        self._failures.append({"test": report.nodeid, "kind": kind, "waits": waits, "text": text})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        failed = {failure["test"] for failure in self._failures}
        outcome = {
            "exit": int(exitstatus),
            "passed": len(self._passed - failed),
            "skipped": len(self._skipped - failed),
            "failures": self._failures,
            "seconds": round(time.monotonic() - self._began, 1),
            "durations": {test: round(took, 1) for test, took in self._durations.items() if took >= 0.1},
        }
        self._file.write_text(json.dumps(outcome), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write down here how all this ended")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file is not None and not hasattr(
        config, "workerinput"
    ):  # the workers of xdist report to the first process
        config.pluginmanager.register(Recorder(file.resolve()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Runs where the test runs: xdist carries these attributes to the first process."""
    report = yield
    if report.failed and call.excinfo is not None:
        report.kind = kind_of(call.excinfo.value)
        report.waits = waits(item)
    return report
