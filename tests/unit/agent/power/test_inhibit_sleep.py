"""The machine is kept awake exactly as long as needed, with fake system tools."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from barnraise.agent.power import inhibit_sleep
from barnraise.agent.power.inhibit_sleep import keep_awake, tool_for
from tests.repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fakes on the path are shell scripts")

_TOOL = "systemd-inhibit" if sys.platform == "linux" else "caffeinate"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools that stand in end by themselves, however slow this machine is."""
    monkeypatch.setattr(inhibit_sleep, "_END_S", 60.0)


def _fake(home: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    tool = home / _TOOL
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:/usr/bin:/bin")


def _until(file: Path, words: str) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() or words not in file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_keep_awake_holds_tool_until_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trail = tmp_path / "trail"
    _fake(tmp_path, monkeypatch, f'trap "" TERM; echo "$@" > {trail}; cat; echo let go >> {trail}')
    with keep_awake("run 7 trains here"):
        _until(trail, "\n")
        assert "let go" not in trail.read_text()
    assert "let go" in trail.read_text()
    assert trail.read_text().splitlines()[0] == " ".join(tool_for(sys.platform, "run 7 trains here")[1:])


def test_keep_awake_killed_agent_releases_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trail = tmp_path / "trail"
    _fake(tmp_path, monkeypatch, f"echo held > {trail}; cat; echo let go >> {trail}")
    imports = "import time\nfrom barnraise.agent.power.inhibit_sleep import *\n"
    program = f"{imports}with keep_awake('x'): time.sleep(600)"
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    agent = subprocess.Popen([sys.executable, "-c", program])
    _until(trail, "held")
    agent.kill()
    agent.wait()
    _until(trail, "let go")


def test_keep_awake_missing_tool_logs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO), keep_awake("x"):
        pass
    assert [record.message for record in caplog.records] == [
        f"{_TOOL} is not installed: this machine may fall asleep during a run"
    ]


def test_keep_awake_refusal_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fake(tmp_path, monkeypatch, "echo Access denied >&2; exit 1")
    with caplog.at_level(logging.INFO), keep_awake("x"):
        deadline = time.monotonic() + 60
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (record,) = caplog.records
    assert record.message == "this machine may fall asleep during a run: Access denied"


def test_tool_for_macos_and_linux() -> None:
    assert tool_for("darwin", "x")[:3] == ["caffeinate", "-i", "-w"]
    assert tool_for("linux", "x") == [
        "systemd-inhibit",
        "--what=idle:sleep",
        "--mode=block",
        "--who=Barnraise",
        "--why=x",
        "cat",
    ]


def test_awake_by_thread_two_requests_are_independent() -> None:
    flags_by_thread: dict[int, list[int]] = {}

    def state(flags: int) -> int:
        flags_by_thread.setdefault(threading.get_ident(), []).append(flags)
        return 1

    with inhibit_sleep._awake_by_thread(state), inhibit_sleep._awake_by_thread(state):
        pass
    assert list(flags_by_thread.values()) == [[0x80000001, 0x80000000]] * 2
    assert threading.get_ident() not in flags_by_thread
