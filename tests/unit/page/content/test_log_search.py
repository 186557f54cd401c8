"""Search in logs: words in any case, and bounds."""

from __future__ import annotations

import asyncio
import time

import pytest

from barnraise.agent_client.run_requests import WatchRequest, WatchResponse
from barnraise.page.content import log_search
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


def test_search_that_ran_out_of_time_says_that_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "MOST_SECONDS", 0.2)
    machine = _machine(b"loss 4\n")
    watched = machine._watched

    def slow(request: WatchRequest) -> WatchResponse:
        time.sleep(0.15)
        return watched(request)

    monkeypatch.setattr(machine, "_watched", slow)
    matches = asyncio.run(search_logs(machine, RUN, "loss"))
    assert [line.text for line in matches.lines] == ["loss 4"]
    assert not matches.is_complete


def test_run_without_output_ends_the_search() -> None:
    machine = _machine(b"")
    assert asyncio.run(search_logs(machine, RUN, "x")).lines == []
    assert len(machine.requests) <= 3
    assert all(isinstance(request, WatchRequest) for request in machine.requests)
