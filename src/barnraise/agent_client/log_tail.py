"""Keeps the place in the output of a run's workers, and cuts it into lines. Pure.

A worker is named by its number: its place among all workers that ever took part in the run. So the output of
a worker is found after its machine has left the run, and no line is shown twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from barnraise.agent_client.run_requests import (
    LARGEST_OFFSET,
    MOST_FOLLOWED,
    FollowPosition,
    LogChunk,
    WatchResponse,
)
from barnraise.core.sanitize import coloured, rewritten_line
from barnraise.core.units import format_size

_LONGEST_LINE = 64 << 10
_UP_AND_DOWN = b"\x1b[A\n"  # between two states of a progress bar that is below another one


@dataclass
class _Lines:
    """The output of one worker."""

    offset: int = 0
    rest: bytes = b""
    is_over: bool = False  # the worker has exited and all of its output was read
    is_missing: bool = False  # its machine does not answer
    is_rewritten: bool = False  # the unfinished line has carriage returns, like a progress bar
    is_trusted: bool = False  # of an owner, to an owner: unchanged

    def feed(self, heard: LogChunk) -> Iterator[str]:
        data = heard.data
        if self.offset == LARGEST_OFFSET:  # what was there before is not shown
            self.offset = heard.start
        if heard.start > self.offset:
            yield f"... {format_size(heard.start - self.offset)} of output are left out here ..."
            self.rest, self.is_rewritten = b"", False
            data = data.partition(b"\n")[2]
        self.offset = heard.start + len(heard.data)
        *lines, self.rest = (self.rest + data).replace(_UP_AND_DOWN, b"").split(b"\n")
        self.is_rewritten = b"\r" in self.rest or (self.is_rewritten and not lines)
        kept = self.rest.rstrip(b"\r")
        self.rest = kept.rpartition(b"\r")[2] + self.rest[len(kept) :]
        if len(self.rest) > _LONGEST_LINE or (self.is_over and self.rest):
            lines.append(self.rest)
            self.rest = b""
        for line in lines:
            # A progress bar rewrites its line: only what it showed last is worth a line of ours.
            yield self.shown(line)

    def shown(self, line: bytes) -> str:
        """Return a line as a terminal may show it; of a guest's worker, only colours command the terminal."""
        text = rewritten_line(line.decode("utf-8", "replace"))
        return text if self.is_trusted else coloured(text)


@dataclass
class LogTail:
    """Position in the output of several workers."""

    _lines: dict[int, _Lines] = field(default_factory=dict)

    def wanted(self, starts: Mapping[int, int]) -> tuple[FollowPosition, ...]:
        """Return the requests for new output of these workers and of all that were followed before.

        ``starts``: by worker, the place in its output before which nothing is shown.
        """
        for number, start in starts.items():
            if number not in self._lines:
                self._lines[number] = _Lines(start)
        open_lines = [(number, lines) for number, lines in sorted(self._lines.items()) if not lines.is_over]
        return tuple(FollowPosition(number, lines.offset) for number, lines in open_lines[:MOST_FOLLOWED])

    @property
    def has_started(self) -> bool:
        """Return True if the output of any worker was asked for."""
        return bool(self._lines)

    def heard(self, response: WatchResponse) -> Iterator[tuple[int, str]]:
        """Yield each new line with the number of its worker."""
        trusted = {worker.number for worker in (*response.past, *response.workers) if worker.is_trusted}
        exited = {worker.number for worker in response.workers if worker.state == "ended"}
        exited |= {worker.number for worker in response.past}
        for heard in response.heard:
            lines = self._lines[heard.worker]
            is_final = response.row.phase == "ended" or heard.worker in exited
            lines.is_over = heard.whole and is_final
            lines.is_missing = heard.missing
            lines.is_trusted = heard.worker in trusted
            for line in lines.feed(heard):
                yield heard.worker, line

    def open_lines(self) -> list[tuple[int, str, bool]]:
        """Return the unfinished line of each worker, and whether it is rewritten like a progress bar."""
        return [
            (number, lines.shown(lines.rest), lines.is_rewritten)
            for number, lines in self._lines.items()
            if lines.rest
        ]

    def missing(self) -> list[int]:
        """Return the workers whose machines did not answer."""
        return [number for number, lines in self._lines.items() if lines.is_missing]

    def is_complete(self, numbers: Collection[int]) -> bool:
        """Tell whether the output of these workers, and of all followed ones, was read to its end."""
        return all(number in self._lines for number in numbers) and all(
            lines.is_over for lines in self._lines.values()
        )
