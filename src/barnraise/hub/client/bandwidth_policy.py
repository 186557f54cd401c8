"""Bandwidth policy of a member: an uplink cap, metered connections and quiet hours.

The decisions are pure. Only `is_metered` asks the operating system, and only `PolicyGate` waits.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime, time, timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import msgspec

from barnraise.core.command import runner
from barnraise.core.config import ContributorSettings
from barnraise.core.errors import ConfigError
from barnraise.core.flow.retry import ReportedBackoff

Metered = Literal["wait", "allow"]

METERED_VARIABLE = "BARNRAISE_METERED"  # of a script in a sandbox: a file with METERED if it is so
METERED = "metered"
_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_BURST_S = 0.25
METERED_EVERY_S = 60.0
_LOOK_S = 10.0
A_BETTER_TIME = "a better time"  # name in the wait message
_WINDOWS_QUESTION = (
    "[void][Windows.Networking.Connectivity.NetworkInformation,Windows,ContentType=WindowsRuntime];"
    "[Windows.Networking.Connectivity.NetworkInformation]::GetInternetConnectionProfile()"
    ".GetConnectionCost().NetworkCostType"
)

Asked = Callable[[list[str]], str]


class QuietHours(msgspec.Struct, frozen=True):
    """Daily time span without transfers, from ``begin`` to ``end`` by this machine's clock.

    It may cross midnight.
    """

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> QuietHours | None:
        """Parse a text such as ``22:30-07:00``; return None if it is empty.

        Raise ConfigError if it is invalid.
        """
        if not text.strip():
            return None
        match = _SPAN.fullmatch(text.strip())
        if match is None or match.groups()[:2] == match.groups()[2:]:
            raise ConfigError(
                f"the quiet hours {text!r} are no span of a day",
                hint="Write them as in contributing.quiet_hours = '22:30-07:00', or leave them empty.",
            )
        hour, minute, last_hour, last_minute = (int(group) for group in match.groups())
        return cls(time(hour, minute), time(last_hour, last_minute))

    def left_s(self, now: datetime) -> float:
        """Return the seconds until the quiet hours end; 0 outside of them."""
        clock = now.time()
        if self.begin < self.end:
            inside = self.begin <= clock < self.end
        else:
            inside = clock >= self.begin or clock < self.end
        if not inside:
            return 0.0
        over = datetime.combine(now.date(), self.end, now.tzinfo)
        return ((over if over > now else over + timedelta(days=1)) - now).total_seconds()


class BandwidthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the use of the network, from the settings."""

    uplink_bytes_s: float = 0.0  # 0: as fast as the line
    metered: Metered = "wait"
    quiet: QuietHours | None = None

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
        quiet=QuietHours.parse(wishes.quiet_hours or ""),
    )


# Not core.flow.rate_limit: bytes are delayed, never rejected, and there is one source.
class UplinkLimiter:
    """Rate limit of sent bytes, in small bursts. ``now`` is monotonic."""

    def __init__(self, bytes_s: float) -> None:
        self._rate = bytes_s
        self._free_at = 0.0

    @property
    def burst_bytes(self) -> int:
        """Return the number of bytes to send at once."""
        if not self._rate:
            return 1 << 18
        return int(min(1 << 18, max(1 << 10, self._rate * _BURST_S)))

    def bytes_in(self, seconds: float) -> int:
        """Return the maximum number of bytes in this time; 0 without a cap."""
        return int(self._rate * seconds)

    def delay(self, size: int, now: float) -> float:
        """Return the seconds to wait before ``size`` bytes are sent."""
        if not self._rate:
            return 0.0
        begin = max(now, self._free_at)
        self._free_at = begin + size / self._rate
        return begin - now


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


def is_metered(platform: str = sys.platform, ask: Asked | None = None) -> bool:
    """Tell whether the system marks the connection as metered.

    Systems that cannot tell (macOS, no NetworkManager) count as unmetered. In a sandbox the system cannot be
    asked; a process outside writes the answer to a file.
    """
    if noted := os.environ.get(METERED_VARIABLE):
        try:
            return Path(noted).read_text(encoding="ascii") == METERED
        except OSError:
            return False
    run_command = ask or _answer
    if platform == "linux":
        lines = run_command(
            ["nmcli", "-t", "-f", "GENERAL.STATE,GENERAL.METERED", "device", "show"]
        ).splitlines()
        is_up = False
        for line in lines:
            name, _, value = line.partition(":")
            if name == "GENERAL.STATE":
                is_up = value.startswith("100")
            elif name == "GENERAL.METERED" and is_up and value.startswith("yes"):
                return True
        return False
    if platform == "win32":
        words = run_command(["powershell", "-NoProfile", "-Command", _WINDOWS_QUESTION]).split()
        return bool(words) and words[-1] in ("Fixed", "Variable")
    return False


def _answer(command: list[str]) -> str:
    return runner(5.0)(command).stdout
