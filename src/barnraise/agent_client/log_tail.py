"""Keeps the place in the output of a run's workers, and cuts it into lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from barnraise.agent_client.run_requests import MOST_FOLLOWED, FollowPosition, LogChunk, WatchResponse
from barnraise.core.units import format_size

_LONGEST_LINE = 64 << 10


@dataclass
class _Lines:
    """The output of one worker."""

    generation: int
    source: str  # whose output it is
    rest: bytes = b""
    offset: int = 0
    is_over: bool = False  # its generation has ended and all of it was shown

    def feed(self, heard: LogChunk) -> Iterator[str]:
        data = heard.data
        if heard.start > self.offset:
            yield f"... {format_size(heard.start - self.offset)} of output are left out here ..."
            self.rest = b""
            data = data.partition(b"\n")[2]
        self.offset = heard.start + len(heard.data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE or (self.is_over and self.rest):
            lines.append(self.rest)
            self.rest = b""
        for line in lines:
            # A progress bar rewrites its line: only what it showed last is worth a line of ours.
            yield line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


@dataclass
class LogTail:
    """Position in the output of several workers, through all generations."""

    _lines: dict[int, _Lines] = field(default_factory=dict)

    def wanted(self, response: WatchResponse, ranks: Sequence[int]) -> tuple[FollowPosition, ...]:
        """Return the requests for these ranks' new output, and for the rest of workers that have stopped."""
        sources = _sources(response)
        unfinished = [rank for rank, lines in self._lines.items() if not lines.is_over]
        wanted = []
        for rank in sorted({*ranks, *unfinished})[:MOST_FOLLOWED]:
            source = sources.get(rank, "")
            lines = self._lines.get(rank)
            if lines is None or (lines.is_over and source not in ("", lines.source)):
                lines = self._lines[rank] = _Lines(response.row.generation, source)
            elif lines.source == source and response.row.phase != "ended":
                # Of a session: the group may be another, the worker is the same.
                lines.generation, lines.is_over = response.row.generation, False
            if not lines.is_over:
                wanted.append(FollowPosition(rank, lines.generation, lines.offset))
        return tuple(wanted)

    def heard(self, response: WatchResponse) -> Iterator[tuple[int, str]]:
        """Yield each new line with its rank."""
        for heard in response.heard:
            lines = self._lines[heard.rank]
            over = response.row.phase == "ended" or response.row.generation > heard.generation
            lines.is_over = heard.whole and over
            for line in lines.feed(heard):
                yield heard.rank, line

    def is_complete(self, response: WatchResponse) -> bool:
        """Tell whether all output was read to its end, including that of replaced workers."""
        if response.workers and not self._lines:  # it was over before we looked for the first time
            return False
        sources = _sources(response)
        return all(
            lines.is_over and sources.get(rank, lines.source) == lines.source
            for rank, lines in self._lines.items()
        )


def _sources(response: WatchResponse) -> dict[int, str]:
    return {worker.rank: f"{worker.name} {worker.start} {worker.local_rank}" for worker in response.workers}
