"""Span of hours that returns every day. Pure."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta

import msgspec

from barnraise.core.errors import ConfigError

_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class DailyHours(msgspec.Struct, frozen=True):
    """Daily time span from ``begin`` to ``end`` by this machine's clock. It may cross midnight."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str, setting: str) -> DailyHours | None:
        """Parse a text such as ``22:30-07:00``; return None if it is empty.

        Raise ConfigError with the name of the setting if it is invalid.
        """
        if not text.strip():
            return None
        match = _SPAN.fullmatch(text.strip())
        if match is None or match.groups()[:2] == match.groups()[2:]:
            raise ConfigError(
                f"{setting} = {text!r} is no span of a day",
                hint="Write the begin and the end with minutes, such as 22:30-07:00.",
            )
        hour, minute, last_hour, last_minute = (int(group) for group in match.groups())
        return cls(time(hour, minute), time(last_hour, last_minute))

    def left_s(self, now: datetime) -> float:
        """Return the seconds until the span ends; 0 outside of it."""
        clock = now.time()
        if self.begin < self.end:
            inside = self.begin <= clock < self.end
        else:
            inside = clock >= self.begin or clock < self.end
        if not inside:
            return 0.0
        over = datetime.combine(now.date(), self.end, now.tzinfo)
        return ((over if over > now else over + timedelta(days=1)) - now).total_seconds()
