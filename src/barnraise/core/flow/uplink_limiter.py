"""Rate limit of sent bytes. Unlike `rate_limit` it delays and never rejects. Pure."""

from __future__ import annotations

_BURST_S = 0.25
_LARGEST_BURST = 1 << 18


class UplinkLimiter:
    """Rate limit of sent bytes, in small bursts; a rate of 0 is no limit. ``now`` is monotonic."""

    def __init__(self, bytes_s: float) -> None:
        self._rate = bytes_s
        self._free_at = 0.0

    @property
    def is_limited(self) -> bool:
        return self._rate > 0

    @property
    def burst_bytes(self) -> int:
        """Return the number of bytes to send at once."""
        if not self._rate:
            return _LARGEST_BURST
        return int(min(_LARGEST_BURST, max(1 << 10, self._rate * _BURST_S)))

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

    def free_in(self, now: float) -> float:
        """Return the seconds until all bytes that were sent fit the rate; 0 if more may be sent now."""
        return max(0.0, self._free_at - now) if self._rate else 0.0
