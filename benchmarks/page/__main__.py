"""Costs of the page with invented runs: one update of a run's page, and the list of runs.

    python -m benchmarks.page --machines 64 --runs 200
    python -m benchmarks.page --day

An update reads one new step from the log of each machine, and a sample of some. It makes a new view, the
parts of the page, and the events for one browser. The first look does the same with all entries.

The last line is one JSON object. Exit code 1: a cost is above its limit.
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

from barnraise.history.entries import MachineSample, StepBatch, ValueBatch
from barnraise.history.log_format import decode_frames, encode_frames
from barnraise.history.view_builder import RunHistory
from barnraise.page.render import RunParts
from barnraise.page.updates import encode_event
from benchmarks.invented_run import START, step_entries
from benchmarks.page.browser import browser, find_chromium
from benchmarks.page.invented import (
    PLACE,
    InventedMachine,
    invented_entries,
    invented_nodes,
    invented_rows,
    served,
)
from benchmarks.page.long_record import measure_day

UPDATE_MS = 50.0
LIST_S = 1.0
DAY_MACHINES, DAY_FIRST_MS, DAY_UPDATE_MS = 8, 2000.0, 100.0
FIRST_STEP = 440
SAMPLE_STEPS = 7  # between two samples of a machine: 15 s, when a step takes 2 s


class GrowingRun:
    """Run on many machines, each of which writes every step into its own log."""

    def __init__(self, machines: int) -> None:
        self._nodes = invented_nodes(machines)
        self._steps = step_entries(rows=1)  # a batch of steps and one of values for each step
        self.step = FIRST_STEP
        first = self._steps[: 2 * self.step]
        events = [
            entry
            for entry in invented_entries(machines, self.step)
            if not isinstance(entry, StepBatch | ValueBatch)
        ]
        self.logs = {node: encode_frames(first) for node in self._nodes}
        self.logs[self._nodes[0]] = encode_frames([*events, *first])

    def grow(self) -> dict[bytes, bytes]:
        """Return what each log gets with the next step. Each machine is sampled every few steps."""
        step, self.step = self.step, self.step + 1
        news = self._steps[2 * step : 2 * step + 2]
        return {
            node: encode_frames([*news, *([] if (place + step) % SAMPLE_STEPS else [self._sample(node)])])
            for place, node in enumerate(self._nodes)
        }

    def _sample(self, node: bytes) -> MachineSample:
        speed, share = 20.0 + self.step % 5, 1 / len(self._nodes)
        at = START + 2.0 * self.step
        return MachineSample(at, node, 6e9, 50.0, 150.0 + self.step, samples_per_s=speed, share=share)


def measure_updates(machines: int, count: int) -> list[tuple[float, int]]:
    """Return processor milliseconds and sent bytes of the first look at a page, and of its updates."""
    run, sent, results = GrowingRun(machines), dict[str, str](), []
    history, parts = RunHistory("train-k3f9"), RunParts("/page/machine")
    news = run.logs
    for _ in range(count + 1):
        begin = time.process_time()
        for node, data in news.items():
            history.add(node, decode_frames(data).entries)
        made = parts.render(history.view())
        events = [encode_event(name, text) for name, text in made.items() if sent.get(name) != text]
        results.append((1000 * (time.process_time() - begin), sum(map(len, events))))
        sent, news = dict(made), run.grow()
    return results


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


def _check_day(costs: dict[str, float]) -> int:
    """Print the costs of a long record, and return 1 if one is above its limit."""
    for name, ms in costs.items():
        print(f"{name}: {ms:g} (limit {DAY_UPDATE_MS if 'update' in name else DAY_FIRST_MS:g})")
    print(json.dumps(costs))
    is_slow = any(ms > (DAY_UPDATE_MS if "update" in name else DAY_FIRST_MS) for name, ms in costs.items())
    return int(is_slow)


def main() -> int:
    """Print the costs, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", type=int, default=64)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--day", action="store_true", help="measure a record of a day on 8 machines instead")
    options = parser.parse_args()
    if options.day:
        return _check_day(measure_day(DAY_MACHINES, options.updates))
    (first_ms, _), *updates = measure_updates(options.machines, options.updates)
    result = {
        "machines": options.machines,
        "runs": options.runs,
        "first_look_ms": round(first_ms, 1),
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
