"""Policy of a machine's limits: whether a run may use it now, and what happens if it may not. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple

import msgspec

from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.core.host.daily_hours import DailyHours
from barnraise.runs.record import RunRecord

Action = Literal["leave", "freeze", "keep"]


class HostConditions(msgspec.Struct, frozen=True):
    """Facts about this machine that limits depend on. ``now`` is in local time."""

    now: datetime
    on_battery: bool = False
    metered: bool = False


class PauseAction(NamedTuple):
    """Action for a run's workers on a paused machine, and a sentence that says so."""

    action: Action
    sentence: str


def pause_reason(limits: MachineLimits, conditions: HostConditions, *, is_own_run: bool) -> str:
    """Return why a run may not use this machine now; an empty text if it may.

    A user that starts a run on this machine wants it to work. Only an explicit pause stops such a run.
    """
    now = conditions.now
    if limits.paused and (not limits.paused_until or now.timestamp() < limits.paused_until):
        person = f"a person at {limits.paused_by}" if limits.paused_by else "its user"
        if not limits.paused_until:
            return f"{person} paused it"
        until = datetime.fromtimestamp(limits.paused_until, now.tzinfo)
        day = "" if until.date() == now.date() else f"{until:%Y-%m-%d} "
        return f"{person} paused it until {day}{until:%H:%M}"
    if is_own_run:
        return ""
    hours = DailyHours.parse(limits.hours, "--hours")
    if hours is not None and not hours.left_s(now):
        return f"its user lets runs use it from {hours.begin:%H:%M} to {hours.end:%H:%M} only"
    if conditions.on_battery and limits.battery == "wait":
        return "it runs on battery"
    if conditions.metered and limits.metered == "wait":
        return "its connection is metered"
    return ""


def is_expired(limits: MachineLimits, now: float) -> bool:
    """Return True if a pause has reached its end. ``now`` is in Unix time."""
    return limits.paused and 0 < limits.paused_until <= now


def choose_pause_action(record: RunRecord, me: bytes) -> PauseAction:
    """Return what happens to this machine's workers of a run while the machine is paused."""
    others = [node for node in record.nodes if node != me]
    if not others:
        return PauseAction("freeze", "trains on this machine alone: it stands still until then")
    if record.elastic:
        return PauseAction("leave", "continues on the other machines, and this one joins it again then")
    return PauseAction(
        "keep", "is a plain process group and cannot continue without this machine: it goes on here"
    )
