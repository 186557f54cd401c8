"""Search in the output of a run's workers, on all machines, within bounds of bytes, lines and time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from barnraise.agent_client.log_tail import LogTail
from barnraise.agent_client.run_requests import WatchRequest, WatchResponse, WorkerRow
from barnraise.page.source import PageSource

MOST_LINES = 500
MOST_BYTES = 64 << 20
MOST_SECONDS = 10.0
_MOST_CHARACTERS = 1000  # of a line


@dataclass(frozen=True)
class FoundLine:
    """Line of the output with the name of its worker."""

    worker: str
    text: str


@dataclass
class FoundLines:
    """Lines with the words, what was searched, and the workers whose machines did not answer."""

    lines: list[FoundLine] = field(default_factory=list)
    searched_bytes: int = 0
    missing: tuple[str, ...] = ()
    is_complete: bool = False


async def search_logs(source: PageSource, run: str, words: str) -> FoundLines:
    """Return the lines of a run that have these words, in any case; all lines if there are no words."""
    matches, tail, wanted = FoundLines(), LogTail(), words.casefold()
    names: dict[int, str] = {}
    starts: dict[int, int] = {}
    deadline = asyncio.get_running_loop().time() + MOST_SECONDS
    while asyncio.get_running_loop().time() < deadline and matches.searched_bytes < MOST_BYTES:
        request = WatchRequest(run=run, follow=tail.wanted(starts), wait_s=0.0)
        response = await source.ask(request, WatchResponse)
        for worker in (*response.past, *response.workers):
            names[worker.number] = _name(worker)
            starts[worker.number] = 0
        for number, line in tail.heard(response):
            if wanted in line.casefold():
                matches.lines.append(FoundLine(names.get(number, str(number)), line[:_MOST_CHARACTERS]))
        matches.searched_bytes += sum(len(chunk.data) for chunk in response.heard)
        matches.missing = tuple(names[number] for number in tail.missing() if number in names)
        if len(matches.lines) >= MOST_LINES:
            del matches.lines[MOST_LINES:]
            return matches
        if not starts or (tail.has_started and not any(chunk.data for chunk in response.heard)):
            matches.is_complete = True
            break
    return matches


def _name(worker: WorkerRow) -> str:
    return f"{worker.name} {worker.device}".strip()
