"""Limits service: keeps limits over a restart, follows the host, and tells of changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent.limits.service import LimitsService
from barnraise.agent_client.machine_limits import MachineLimits, load_limits

ME, OTHER = bytes(32), bytes([1]) * 32


class Scene:
    """An agent's context, with a battery and a connection that a test sets."""

    def __init__(self, directory: Path) -> None:
        self.events: list[str] = []
        self.sent = self.changes = 0
        self.on_battery = self.is_metered = False
        self.asked_metered = 0
        self.context: Any = SimpleNamespace(
            directory=directory,
            me=SimpleNamespace(raw=ME),
            report_event=self.events.append,
            machine_changed=self._send,
        )

    def _send(self) -> None:
        self.sent += 1

    def _change(self) -> None:
        self.changes += 1

    def _metered(self) -> bool:
        self.asked_metered += 1
        return self.is_metered

    def service(self) -> LimitsService:
        return LimitsService(
            self.context,
            lambda: True,
            self._change,
            on_battery=lambda: self.on_battery,
            metered=self._metered,
        )


def within_loop(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(check(), 30))


def test_pause_is_kept_over_a_restart_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        scene = Scene(tmp_path)
        service = scene.service()
        service.set(MachineLimits(paused=True, paused_until=time.time() + 3600))
        assert scene.changes == scene.sent == 1
        assert "is paused: its user paused it until" in scene.events[-1]
        again = scene.service()
        assert again.reason_against(OTHER)
        assert again.reason_against(ME)
        again.set(MachineLimits(paused=True, paused_until=time.time() + 60))
        later = datetime.now().astimezone() + timedelta(minutes=2)
        monkeypatch.setattr("barnraise.agent.limits.service._now", lambda: later)
        await again._look()
        assert again.limits == load_limits(tmp_path) == MachineLimits()
        assert again.shown_reason == ""
        assert "no longer paused" in scene.events[-1]

    within_loop(check)


def test_battery_counts_for_runs_of_others_until_mains_are_back(tmp_path: Path) -> None:
    async def check() -> None:
        scene = Scene(tmp_path)
        service = scene.service()
        await service._look()
        assert (scene.changes, scene.events) == (0, [])
        scene.on_battery = True
        await service._look()
        assert service.shown_reason == service.reason_against(OTHER) == "it runs on battery"
        assert service.reason_against(ME) == "", "its user started that run here"
        assert (scene.changes, scene.sent) == (1, 1)
        await service._look()
        assert (scene.changes, scene.sent) == (1, 1), "nothing has changed"
        scene.on_battery = False
        await service._look()
        assert service.shown_reason == ""
        assert (scene.changes, scene.sent) == (2, 2)

    within_loop(check)


def test_system_is_asked_rarely_whether_the_connection_is_metered(tmp_path: Path) -> None:
    async def check() -> None:
        scene = Scene(tmp_path)
        scene.is_metered = True
        service = scene.service()
        for _ in range(5):
            await service._look()
        assert scene.asked_metered == 1
        assert service.shown_reason == "its connection is metered"
        service.set(MachineLimits(metered="allow"))
        await service._look()
        assert scene.asked_metered == 1
        assert service.shown_reason == ""

    within_loop(check)


def test_workers_start_again_only_for_limits_that_concern_them(tmp_path: Path) -> None:
    async def check() -> None:
        service = Scene(tmp_path).service()
        service.set(MachineLimits(hours="22:00-07:00"))
        assert service.version == 0
        service.set(MachineLimits(hours="22:00-07:00", cpus=2))
        assert service.version == 1
        service.set(MachineLimits(cpus=2, paused=True))
        assert service.version == 1

    within_loop(check)


def test_damaged_file_of_limits_is_no_limit(tmp_path: Path) -> None:
    for text in ("", "{", '{"cpus": -1}', '{"cpus": "many"}', '{"hours": "at night"}'):
        (tmp_path / "limits.json").write_text(text)
        assert load_limits(tmp_path) == MachineLimits()


def test_pause_ends_also_if_its_end_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path, limits: MachineLimits) -> None:
        raise OSError(28, "No space left on device")

    async def check() -> None:
        scene = Scene(tmp_path)
        service = scene.service()
        service.set(MachineLimits(paused=True, paused_until=time.time() + 60))
        later = datetime.now().astimezone() + timedelta(minutes=2)
        monkeypatch.setattr("barnraise.agent.limits.service._now", lambda: later)
        monkeypatch.setattr("barnraise.agent.limits.service.save_limits", refuse)
        await service._look()
        assert service.shown_reason == ""
        with pytest.raises(OSError, match="No space left"):
            service.set(MachineLimits(paused=True))
        assert not service.limits.paused, "it would hold until the next start only"

    within_loop(check)
