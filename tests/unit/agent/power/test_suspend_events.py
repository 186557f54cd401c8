"""Suspend events reach the agent, and the sleep delay is released after the goodbye."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from barnraise.agent.power.suspend_events import watch_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="logind is Linux's")

_MONITOR = """
import os, sys, time
print("Monitoring signals", flush=True)
while not os.path.exists(sys.argv[1]) or "held " not in open(sys.argv[1]).read():
    time.sleep(0.01)
for word in ("true", "false"):
    print(f"/org/freedesktop/login1: org.freedesktop.login1.Manager.PrepareForSleep ({word},)", flush=True)
"""
_HOLD = """
import sys
open(sys.argv[1], "a").write("held ")
sys.stdin.read()
open(sys.argv[1], "a").write("let go ")
"""


def test_watch_sleep_calls_back_before_and_after(tmp_path: Path) -> None:
    events: list[str] = []
    trail = tmp_path / "trail"

    async def asleep() -> None:
        events.append("asleep, " + trail.read_text())

    async def awake() -> None:
        events.append("awake")

    async def run() -> None:
        monitor = [sys.executable, "-c", _MONITOR, str(trail)]
        await watch_sleep(asleep, awake, monitor, [sys.executable, "-c", _HOLD, str(trail)])

    asyncio.run(asyncio.wait_for(run(), 90))
    assert events == ["asleep, held ", "awake"]


def test_watch_sleep_without_tools_returns() -> None:
    async def never() -> None:
        raise AssertionError

    asyncio.run(asyncio.wait_for(watch_sleep(never, never, ["no-such-tool"]), 60))
