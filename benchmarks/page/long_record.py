"""Costs of a record of a day: of the first look, and of each new step on the page and on the screen."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from barnraise.agent_client.cluster_requests import AgentResponse
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartResponse,
    KeptLog,
)
from barnraise.cli.watch.page import page_lines
from barnraise.cli.watch.snapshot import Snapshot
from barnraise.display.report.document import ReportOptions, build_report
from barnraise.history.log_file import logs_of, read_part
from barnraise.history.logs.record_reader import ReaderRequest, RecordReader, read_all
from barnraise.history.view_builder import RunHistory
from barnraise.page.render import RunParts
from benchmarks.invented_run import RUN, START
from benchmarks.page.day import STEPS, day_entries, write_day

_COLUMNS = 100


def measure_day(machines: int, updates: int, steps: int = STEPS) -> dict[str, float]:
    """Return processor milliseconds of the page, the screen and the report with a record of a day."""
    with tempfile.TemporaryDirectory() as place:
        state = Path(place)
        write_day(state, machines, steps)
        logs = logs_of(state, RUN)

        def ask(request: ReaderRequest) -> AgentResponse:
            if isinstance(request, HistoryListRequest):
                kept = (KeptLog(RUN, node, path.stat().st_size, 1.0) for node, path in logs.items())
                return HistoryListResponse(tuple(kept))
            return HistoryPartResponse(*read_part(logs[request.node], request.identity, request.offset))

        reader, parts = RecordReader(RUN, RunHistory(RUN)), RunParts("/page")
        begin = time.process_time()
        read_all(reader.update(), ask)
        view = reader.history.view(START + steps)
        first_ms = 1000 * (time.process_time() - begin)
        results = {
            "first_page_ms": first_ms + _cost_ms(lambda: parts.render(view)),
            "first_screen_ms": first_ms + _cost_ms(lambda: page_lines(Snapshot(view), _COLUMNS, stale="")),
            "report_ms": first_ms + _cost_ms(lambda: build_report(view, ReportOptions())),
        }
        costs = [_update_ms(reader.history, parts, steps + number) for number in range(updates)]
        results["page_update_ms"] = statistics.median(page for page, _ in costs)
        results["screen_update_ms"] = statistics.median(screen for _, screen in costs)
        return {name: round(ms, 1) for name, ms in results.items()}


def _update_ms(history: RunHistory, parts: RunParts, step: int) -> tuple[float, float]:
    """Return the costs of one new step in the log of each machine: for the page, and for the screen."""
    news = {node: next(day_entries(node, range(step, step + 1))) for node in history.nodes}
    begin = time.process_time()
    for node, entries in news.items():
        history.add(node, entries)
    view = history.view(START + step)
    view_ms = 1000 * (time.process_time() - begin)
    page_ms = _cost_ms(lambda: parts.render(view))
    return view_ms + page_ms, view_ms + _cost_ms(lambda: page_lines(Snapshot(view), _COLUMNS, stale=""))


def _cost_ms(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return 1000 * (time.process_time() - begin)
