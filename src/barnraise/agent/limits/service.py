"""Limits service of an agent: keeps the user's limits, watches the host, and reports every change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.limits.policy import HostConditions, is_expired, pause_reason
from barnraise.agent_client.machine_limits import MachineLimits, load_limits, save_limits
from barnraise.core.host.battery import is_on_battery
from barnraise.core.host.metered import METERED_EVERY_S, is_metered

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
_IDLE_METERED_EVERY_S = 900.0  # without a run here; the question costs a process


class LimitsService:
    """Limits of this machine. ``on_change`` is called after each change that matters to runs."""

    def __init__(
        self,
        context: AgentContext,
        has_runs: Callable[[], bool],
        on_change: Callable[[], None],
        *,
        on_battery: Callable[[], bool] = is_on_battery,
        metered: Callable[[], bool] = is_metered,
    ) -> None:
        self._context = context
        self._has_runs = has_runs
        self._on_change = on_change
        self._ask_battery, self._ask_metered = on_battery, metered
        self._metered_at = float("-inf")
        self._loop = asyncio.get_running_loop()
        self.limits = load_limits(context.directory)
        self.version = 0  # changes whenever workers need other limits
        self._conditions = HostConditions(_now())
        self._shown = pause_reason(self.limits, self._conditions, is_own_run=False)

    @property
    def shown_reason(self) -> str:
        """Return why runs of other machines may not use this one now; empty if they may."""
        return self._shown

    def reason_against(self, starter: bytes) -> str:
        """Return why a run that this machine started may not use this one now; empty if it may."""
        is_own = starter == self._context.me.raw
        return pause_reason(self.limits, replace(self._conditions, now=_now()), is_own_run=is_own)

    def set(self, limits: MachineLimits) -> None:
        """Apply and keep new limits of the user."""
        save_limits(self._context.directory, limits)
        old, self.limits = self.limits, limits
        if _of_workers(old) != _of_workers(limits):
            self.version += 1
        self._metered_at = float("-inf")
        self._update(is_changed=True)

    async def run(self) -> None:
        """Watch the clock, the battery and the connection, until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        limits, now = self.limits, self._loop.time()
        on_battery = limits.battery == "wait" and await asyncio.to_thread(self._ask_battery)
        metered = self._conditions.metered
        every_s = METERED_EVERY_S if self._has_runs() else _IDLE_METERED_EVERY_S
        if limits.metered == "allow":
            metered = False
        elif now - self._metered_at >= every_s:
            self._metered_at = now
            metered = await asyncio.to_thread(self._ask_metered)
        self._conditions = HostConditions(_now(), on_battery, metered)
        if is_expired(self.limits, _now().timestamp()):
            self.limits = replace(self.limits, paused=False, paused_until=0.0, paused_by="")
            try:
                save_limits(self._context.directory, self.limits)
            except OSError as error:  # the file's pause has ended as well
                _log.warning("the end of the pause was not saved: %s", error)
        self._update(is_changed=False)

    def _update(self, *, is_changed: bool) -> None:
        reason = pause_reason(self.limits, replace(self._conditions, now=_now()), is_own_run=False)
        if reason != self._shown:
            is_changed = True
            self._shown = reason
            self._context.report_event(
                f"this machine is paused: {reason}" if reason else "this machine is no longer paused"
            )
            self._context.machine_changed()
        if is_changed:
            self._on_change()


def _now() -> datetime:
    return datetime.now().astimezone()


def _of_workers(limits: MachineLimits) -> tuple[object, ...]:
    """Return the limits that only a new worker has."""
    return limits.cpus, limits.memory_bytes, limits.gpu_memory_percent, limits.mbps
