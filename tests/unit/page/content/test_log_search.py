"""Search in logs: words in any case, and bounds."""

from __future__ import annotations

import asyncio

from barnraise.agent_client.run_requests import WatchRequest
from barnraise.page.content.log_search import MOST_LINES, search_logs
from benchmarks.invented_run import RUN
from benchmarks.page.invented import InventedMachine, invented_rows


def _machine(output: bytes) -> InventedMachine:
    return InventedMachine(rows=invented_rows(2), output=output)


def test_lines_with_the_words_are_found() -> None:
    matches = asyncio.run(search_logs(_machine(b"Loss 4\nstep\nthe LOSS is 3"), RUN, "loss"))
    assert [line.text for line in matches.lines] == ["Loss 4", "the LOSS is 3"]
    assert matches.lines[0].worker == "desk cuda:0"
    assert matches.is_complete


def test_many_lines_are_cut_and_said_so() -> None:
    matches = asyncio.run(search_logs(_machine(b"x\n" * 5000), RUN, ""))
    assert len(matches.lines) == MOST_LINES
    assert not matches.is_complete


def test_run_without_output_ends_the_search() -> None:
    machine = _machine(b"")
    assert asyncio.run(search_logs(machine, RUN, "x")).lines == []
    assert len(machine.requests) <= 3
    assert all(isinstance(request, WatchRequest) for request in machine.requests)
