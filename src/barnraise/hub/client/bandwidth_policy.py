"""Bandwidth policy of a member: an uplink cap, metered connections and quiet hours.

The decisions are pure. Only `PolicyGate` asks the operating system, and waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from time import monotonic, sleep
from typing import Literal

import msgspec

from barnraise.core.config import ContributorSettings
from barnraise.core.flow.retry import ReportedBackoff
from barnraise.core.host.daily_hours import DailyHours
from barnraise.core.host.metered import METERED_EVERY_S, is_metered

Metered = Literal["wait", "allow"]

_LOOK_S = 10.0
A_BETTER_TIME = "a better time"  # name in the wait message


class BandwidthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the use of the network, from the settings."""

    uplink_bytes_s: float = 0.0  # 0: as fast as the line
    metered: Metered = "wait"
    quiet: DailyHours | None = None

    def reason_to_wait(self, now: datetime, *, metered: bool) -> tuple[str, float]:
        """Return the reason to wait and the seconds until the next check; an empty reason and 0 if there is
        none."""
        if self.quiet is not None and (left := self.quiet.left_s(now)) > 0:
            return f"it is quiet here until {self.quiet.end:%H:%M}", min(left, 60.0)
        if metered and self.metered == "wait":
            return "this machine's connection is metered", 60.0
        return "", 0.0


def policy_from_settings(wishes: ContributorSettings) -> BandwidthPolicy:
    """Return the policy that the settings describe."""
    return BandwidthPolicy(
        uplink_bytes_s=wishes.uplink_mbps * 125_000,
        metered=wishes.metered,
        quiet=DailyHours.parse(wishes.quiet_hours or "", "contributing.quiet_hours"),
    )


class PolicyGate:
    """Gate that waits until the policy permits transfers. For one thread."""

    def __init__(
        self,
        manners: BandwidthPolicy,
        sleep: Callable[[float], None] = sleep,
        metered: Callable[[], bool] | None = None,
    ) -> None:
        self._manners, self._sleep, self._ask_metered = manners, sleep, metered or is_metered
        self._metered_at, self._metered = -math.inf, False

    def wait(self, waiting: ReportedBackoff) -> None:
        """Wait until the policy permits transfers, and report the reason."""
        while True:
            now = monotonic()
            if self._manners.metered == "wait" and now - self._metered_at > METERED_EVERY_S:
                self._metered_at, self._metered = now, self._ask_metered()
            why, again_s = self._manners.reason_to_wait(datetime.now().astimezone(), metered=self._metered)
            if not why:
                return
            waiting.note(why)
            self._sleep(min(again_s, _LOOK_S))
