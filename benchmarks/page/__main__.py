"""Costs of the page with invented runs: one update of a run's page, and the list of runs.

    python -m benchmarks.page --machines 64 --runs 200

An update is a new view of the run's entries, all parts of the page, and the events for one browser. The last
line is one JSON object. Exit code 1: a cost is above its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import httpx

from barnraise.history.view_builder import build_view
from barnraise.page.render import render_parts
from barnraise.page.updates import Parts, encode_event
from benchmarks.page.browser import browser, find_chromium
from benchmarks.page.invented import PLACE, InventedMachine, invented_entries, invented_rows, served

UPDATE_MS = 100.0
LIST_S = 1.0


def measure_updates(machines: int, count: int) -> list[tuple[float, int]]:
    """Return processor milliseconds and sent bytes of successive updates of one page."""
    sent: Parts = {}
    results = []
    for number in range(count + 1):
        entries = invented_entries(machines, last=440 + number)
        begin = time.process_time()
        view = build_view(entries, run="train-k3f9")
        parts = render_parts(view, "/page/machine")
        events = [encode_event(name, text) for name, text in parts.items() if sent.get(name) != text]
        results.append((1000 * (time.process_time() - begin), sum(map(len, events))))
        sent = parts
    return results[1:]  # the first one reads the templates


async def measure_list(runs: int, tries: int = 5) -> dict[str, Any]:
    """Return the seconds until the list of runs is there: over HTTP, and in Chromium if it is installed."""
    async with served(InventedMachine(rows=invented_rows(runs))) as page:
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(page.new_link())
            seconds = []
            for _ in range(tries):
                begin = time.perf_counter()
                answer = await client.get(f"{page.base}/")
                seconds.append(time.perf_counter() - begin)
                assert answer.text.count("<tr>") == runs + 1
        measured: dict[str, Any] = {"list_http_s": round(statistics.median(seconds), 4)}
        if find_chromium() is not None:
            async with browser() as tab:
                await tab.visit(page.new_link())
                await tab.until(f"location.pathname.endsWith('/{PLACE}/')")
                loads = []
                for _ in range(tries):
                    await tab.visit(f"{page.base}/")
                    timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
                    await tab.until(f"{timing} > 0")
                    loads.append(await tab.evaluate(timing) / 1000)
                measured["list_chromium_s"] = round(statistics.median(loads), 4)
    return measured


def main() -> int:
    """Print the costs, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", type=int, default=64)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    updates = measure_updates(options.machines, options.updates)
    result = {
        "machines": options.machines,
        "runs": options.runs,
        "update_ms": round(statistics.median(ms for ms, _ in updates), 1),
        "update_ms_max": round(max(ms for ms, _ in updates), 1),
        "update_bytes": round(statistics.median(size for _, size in updates)),
        **asyncio.run(measure_list(options.runs)),
    }
    slowest_s = max(result["list_http_s"], result.get("list_chromium_s", 0.0))
    print(f"an update with {options.machines} machines: {result['update_ms']} ms (limit {UPDATE_MS:g})")
    print(f"the list of {options.runs} runs: {slowest_s} s (limit {LIST_S:g})")
    print(json.dumps(result))
    return 0 if result["update_ms"] <= UPDATE_MS and slowest_s <= LIST_S else 1


if __name__ == "__main__":
    sys.exit(main())
