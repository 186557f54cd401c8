"""Cost of watching: the same training bare, and with the terminal, the page, the metrics and the record.

    python -m benchmarks.overhead --quick     about 5 minutes
    python -m benchmarks.overhead             more pairs, longer runs

Two agents share this computer, and each trains with one thread. The first machine shows `barnraise watch`
on a terminal and the page to one reader; both are scraped each second. Bare runs have none of it, and write
no steps into the record. Runs alternate; a pair's ratio is of the medians of their steps. Then one update of
the page with 64 invented machines and the list of 200 runs are measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from benchmarks.agents.local import LocalAgents, free_port
from benchmarks.overhead.displays import Displays
from benchmarks.page.__main__ import measure_list, measure_updates
from benchmarks.report import REPOSITORY, Spread, environment_line, last_line, table

MACHINES, RUNS, UPDATES = 64, 200, 20
REPEATS = 24  # of the forward pass: a step takes about a tenth of a second
WARM = 20  # steps that are left out


class MeasuredAgents(LocalAgents):
    """Two agents that serve their metrics."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.metrics_ports = [free_port() for _ in range(count)]

    def environment(self, place: int) -> dict[str, str]:
        return {**super().environment(place), "BARNRAISE_METRICS_PORT": str(self.metrics_ports[place])}


class Arm:
    """Runs of one kind: bare or watched. ``medians``: seconds of a step, one of each run."""

    def __init__(self, agents: MeasuredAgents, folder: Path, steps: int, *, is_watched: bool) -> None:
        self._agents, self._folder, self._steps, self._is_watched = agents, folder, steps, is_watched
        self.medians: list[float] = []
        self.screen_cpu: list[float] = []

    def measure(self) -> None:
        """Train once, and keep the median time of a step."""
        into = self._folder / f"times-{time.monotonic_ns()}.json"
        options = {
            "INTO": str(into),
            "STEPS": str(self._steps),
            "REPEATS": str(REPEATS),
            "RECORD": "on" if self._is_watched else "off",
        }
        words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        begun = self._agents.type(
            0, "run", "--env", "agent", "--detach", *words, "watched.py", folder=self._folder
        )
        assert begun.returncode == 0, begun.stderr
        run = begun.stdout.split()[-1]
        assert run in self._phases(), (begun.stdout, self._phases())
        if self._is_watched:
            with Displays(self._agents, run, self._agents.metrics_ports, self._folder) as displays:
                displays.settle()
                begin_s, begin_cpu = time.monotonic(), displays.screen_cpu_s()
                self._wait(into)
                cpu = displays.screen_cpu_s() - begin_cpu
                self.screen_cpu.append(cpu / (time.monotonic() - begin_s))
            assert not displays.problems, displays.problems
        else:
            self._wait(into)
        self._agents.until(lambda: self._phases()[run] == "ended", f"{run} ends")
        self.medians.append(statistics.median(json.loads(into.read_text())[WARM:]))

    def _wait(self, into: Path) -> None:
        self._agents.until(lambda: into.exists() and into.read_text(), "the training ends", 600)

    def _phases(self) -> dict[str, str]:
        answer = self._agents.ask(0, RunsRequest(), RunsResponse)
        return {row.run: row.phase for row in answer.runs}


def measure_steps(pairs: int, steps: int) -> tuple[Arm, Arm]:
    """Return the bare and the watched runs, measured in turn."""
    with MeasuredAgents(2) as agents, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = REPOSITORY / "benchmarks" / "overhead" / "watched.py"
        (folder / "watched.py").write_text(source.read_text())
        agents.form()
        bare = Arm(agents, folder, steps, is_watched=False)
        watched = Arm(agents, folder, steps, is_watched=True)
        bare.measure()  # the first run of an agent prepares more than later ones
        bare.medians.clear()
        for pair in range(pairs):
            for arm in (bare, watched) if pair % 2 == 0 else (watched, bare):
                arm.measure()
            print(f"pair {pair + 1}: {bare.medians[-1]:.4f} s bare, {watched.medians[-1]:.4f} s", flush=True)
        return bare, watched


def main() -> int:
    """Print the figures, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    pairs = options.pairs or (6 if options.quick else 16)
    steps = options.steps or (200 if options.quick else 400)
    print(environment_line(), flush=True)
    bare, watched = measure_steps(pairs, steps)
    ratios = [median / other for median, other in zip(watched.medians, bare.medians, strict=True)]
    updates = [ms for ms, _ in measure_updates(MACHINES, UPDATES)[1:]]
    listed = asyncio.run(measure_list(RUNS))
    rows = [
        ("step, bare", Spread.of(bare.medians).text(1000, 2), "ms"),
        ("step, watched", Spread.of(watched.medians).text(1000, 2), "ms"),
        ("watched / bare", Spread.of(ratios).text(1, 4), ""),
        ("processor of the screen", Spread.of(watched.screen_cpu).text(100, 1), "% of a core"),
        (f"update of the page, {MACHINES} machines", Spread.of(updates).text(1, 1), "ms"),
    ]
    print(table(("figure", "median [quartiles]", "unit"), rows))
    figures = {
        "watch_over_bare": statistics.median(ratios),
        "watch_over_bare_quartiles": [Spread.of(ratios).low, Spread.of(ratios).high],
        "step_bare_ms": 1000 * statistics.median(bare.medians),
        "screen_cores": statistics.median(watched.screen_cpu),
        "page_update_ms": statistics.median(updates),
        **listed,
    }
    last_line(figures)
    slowest_s = max(listed["list_http_s"], listed.get("list_chromium_s", 0.0))
    return 0 if figures["watch_over_bare"] <= 1.01 and max(updates) <= 100 and slowest_s < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
