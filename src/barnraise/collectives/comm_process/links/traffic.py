"""Traffic of a communication process: bytes and retransmitted segments of its links, also of closed ones."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable

from barnraise.transport.links.stream import StreamLink

# struct tcp_info of Linux: 8 bytes, then numbers of 4 bytes, of which the 24th counts retransmitted segments.
_TOTAL_RETRANSMITS = struct.Struct("=8x92xI")


def retransmits(tcp_info: bytes) -> int:
    """Return the retransmitted segments in what Linux tells of a connection; 0 if it tells too little."""
    if len(tcp_info) < _TOTAL_RETRANSMITS.size:
        return 0
    return int(_TOTAL_RETRANSMITS.unpack_from(tcp_info)[0])


class TrafficTotals:
    """Sums over all links since the process started. Closed links count, so no sum becomes smaller."""

    def __init__(self) -> None:
        self._sent = self._received = self._retransmits = 0
        self._seen: dict[StreamLink, int] = {}  # retransmits of open links, which a closed socket cannot tell

    def sample(self, links: Iterable[StreamLink]) -> tuple[int, int, int]:
        """Return the bytes sent, the bytes received and the retransmitted segments."""
        sent, received = self._sent, self._received
        for link in links:
            sent += link.total_bytes_out
            received += link.bytes_in
            self._seen[link] = max(self._seen.get(link, 0), _retransmits_of(link))
        return sent, received, self._retransmits + sum(self._seen.values())

    def close(self, link: StreamLink) -> None:
        """Keep the figures of a link that is gone."""
        self._sent += link.total_bytes_out
        self._received += link.bytes_in
        self._retransmits += self._seen.pop(link, 0)


def _retransmits_of(link: StreamLink) -> int:
    if sys.platform != "linux" or link.closed is not None:
        return 0
    try:
        return retransmits(link.tcp_info())
    except OSError:  # a socket of another family
        return 0
