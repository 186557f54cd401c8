"""Measure Flower 1.42.0 as a hub: 20 real clients on the lab, 100 MB of state, and faults.

    python -m benchmarks.against.flower --flower-python /tmp/flower/bin/python --only merges    seconds
    python -m benchmarks.against.flower --flower-python /tmp/flower/bin/python --only swarm --swarm 10
    python -m benchmarks.against.flower --flower-python /tmp/flower/bin/python    needs many cores

The whole benchmark did not finish on two shared cores (docs/decisions/0048-flower.md): each client is three
processes, and one of them is new for every message.

Flower needs an environment of its own; without it the benchmark prints how to create one. Its telemetry and
update check are switched off, and lab hosts reach nothing outside. The app (benchmarks/programs/flower_app)
does not train, so a round's time is Flower's. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.against.flower_nodes import MERGES, SWARM, Flower, Memory, Trace, traffic, wait_for
from benchmarks.ranks.hosts import prepare_driver
from benchmarks.report import environment_line, last_line
from lab import Host, Lab

INSTALL = """\
    python3.11 -m venv /tmp/flower
    /tmp/flower/bin/pip install flwr==1.42.0 numpy
    python -m benchmarks.against.flower --flower-python /tmp/flower/bin/python"""
_NODES = 20
_MEGABYTES = 100.0
_ROUND_S = 900.0


class Options(NamedTuple):
    python: Path
    nodes: int
    megabytes: float
    swarm: tuple[int, ...]


@contextmanager
def flower(python: Path, nodes: int) -> Iterator[tuple[Flower, list[Host]]]:
    directory = Path(tempfile.mkdtemp(prefix="by-flower-", dir="/tmp"))
    try:
        with Lab(hosts=nodes + 1) as lab:
            yield Flower(python, lab.hosts[0], directory), lab.hosts[1:]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def rounds_and_kill(options: Options) -> dict[str, Any]:
    """Run a whole round with a large state, then send SIGKILL to the SuperLink in the middle of the next
    round.
    """
    result: dict[str, Any] = {"clients": options.nodes, "state_mb": options.megabytes}
    with flower(options.python, options.nodes) as (side, hosts), Memory([side.link_host, hosts[0]]) as memory:
        begin = time.monotonic()
        result["link_up_s"] = side.start_link()
        side.start_nodes(hosts)
        result["all_nodes_up_s"] = time.monotonic() - begin
        before = traffic(hosts[0])
        # One client takes longer, so that the kill falls into the round.
        trace = side.run(clients=options.nodes, rounds=3, megabytes=options.megabytes, late_s=12.0)
        try:
            wait_for(lambda: len(trace.rounds()) > 1, _ROUND_S, "the first round")
        except TimeoutError as error:
            return result | {"first_round": str(error), "peak_rss_mb": dict(memory.peak)}
        first = trace.rounds()
        result["round_s"] = first[1]["at"] - first[0]["at"]
        replies = side.count_lines("Push replies")
        result["client_bytes_down_up"] = [b - a for a, b in zip(before, traffic(hosts[0]), strict=True)]
        result["database_mb"] = sum(file.stat().st_size for file in side.directory.glob("state.db*")) / 1e6
        wait_for(lambda: side.count_lines("Push replies") > replies, _ROUND_S, "a reply of the second round")
        time.sleep(2.0)
        result |= kill(side, trace)
        result["peak_rss_mb"] = dict(memory.peak)
    return result


def kill(side: Flower, trace: Trace) -> dict[str, Any]:
    known, app = len(trace.rounds()), trace.rounds()[-1]["pid"]
    side.kill_link()
    time.sleep(1.0)
    result: dict[str, Any] = {"restart_s": side.start_link()}
    begin, deadline = time.monotonic(), time.monotonic() + 100.0
    while time.monotonic() < deadline and len(trace.rounds()) == known:
        time.sleep(1.0)
    result["round_resumed"] = len(trace.rounds()) > known
    result["seconds_to_next_round"] = time.monotonic() - begin if result["round_resumed"] else None
    result["serverapp_survived"] = Path(f"/proc/{app}").exists() and trace.rounds()[-1]["pid"] == app
    result["status_after_kill"] = side.status(trace.run)
    result["nodes_that_ended"] = sum(node.poll() is not None for node in side.nodes)
    result["nodes_known_again"] = side.count_lines("Activated node_id")
    words = [node.output().strip().splitlines()[-1][-160:] for node in side.nodes[:1]]
    return result | {"a_node_said": words}


def answers(options: Options) -> dict[str, Any]:
    """Run five clients with 1 MB each, one of which misbehaves.

    Five clients are the fewest of which a fifth can be trimmed.
    """
    results: dict[str, Any] = {}
    tries: dict[str, dict[str, object]] = {
        "late_beyond_timeout": {"late_s": 120.0, "timeout": 80.0, "rounds": 2},
        "nan": {"update": "nan"},
        "ten_times_the_size": {"update": "oversize"},
        "int8": {"update": "int8"},
    }
    with flower(options.python, 5) as (side, hosts):
        side.start_link()
        side.start_nodes(hosts)
        for name, settings in tries.items():
            trace = side.run(**{"clients": 5, "rounds": 1, **settings})
            wanted = 1 + int(str(settings.get("rounds", 1)))
            try:
                wait_for(
                    lambda trace=trace, wanted=wanted: len(trace.rounds()) >= wanted,  # type: ignore[misc]
                    300.0,
                    "its rounds",
                )
            except TimeoutError:
                pass
            results[name] = _summary(side, trace)
            print(f"{time.strftime('%X')} {name}: {results[name]}", flush=True)
    return results


def _summary(side: Flower, trace: Trace) -> dict[str, Any]:
    rounds = trace.rounds()
    summary: dict[str, Any] = {"rounds_merged": len(rounds) - 1, "status": side.status(trace.run)}
    if rounds:
        last = rounds[-1]
        summary |= {"seconds": last["at"] - rounds[0]["at"], "dtype": last["dtype"]}
        summary |= {"model_is_finite": last["finite"], "largest": last["largest"], "values": last["values"]}
    return summary


def swarm(options: Options) -> dict[str, Any]:
    """Run many nodes without ClientApps, with 1 MB each, to measure the load that the SuperLink itself
    sustains.
    """
    results: dict[str, Any] = {}
    for nodes in options.swarm:
        with flower(options.python, 1) as (side, (host,)), Memory([side.link_host]) as memory:
            side.start_link()
            argv: list[str | Path] = [options.python, SWARM, side.address, str(nodes), "2", "300"]
            crowd = host.start(argv, env=side.environment("swarm"))
            wait_for(
                lambda crowd=crowd: "ready" in crowd.output() or crowd.poll() is not None,  # type: ignore[misc]
                230.0,
                "the swarm",
            )
            trace = side.run(clients=nodes, rounds=2, megabytes=1.0)
            crowd.wait(400.0)
            time.sleep(10.0)  # the last merge
            seen = json.loads(crowd.output().strip().splitlines()[-1])
            rounds = trace.rounds()
            results[str(nodes)] = {
                "registered": seen["registered"],
                "lost": seen["lost"],
                "why_lost": seen["why_lost"],
                "rounds_merged": max(0, len(rounds) - 1),
                "round_s": [b["at"] - a["at"] for a, b in pairwise(rounds)],
                "pulls": _spread(seen["pulls"]),
                "pushes": _spread(seen["pushes"]),
                "peak_rss_mb": dict(memory.peak),
                "database_mb": sum(file.stat().st_size for file in side.directory.glob("state.db*")) / 1e6,
                "signed_headers_are_reusable": seen["signed_headers_are_reusable"],
            }
            print(f"{time.strftime('%X')} swarm of {nodes}: {results[str(nodes)]}", flush=True)
    return results


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    worst = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"count": len(values), "p50_s": statistics.median(values), "p99_s": worst}


def installed(options: Options) -> dict[str, Any]:
    """Return the number of packages besides pip and setuptools, and their size on disk."""
    command = [str(options.python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    names = [package["name"] for package in listed if package["name"] not in ("pip", "setuptools")]
    folder = next((options.python.parent.parent / "lib").glob("python*")) / "site-packages"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    tools = sum(path.stat().st_size for path in options.python.parent.iterdir() if path.is_file()) / 1e6
    return {"packages": len(names), "site_packages_mb": size, "programs_mb": tools}


def merges(options: Options) -> dict[str, Any]:
    """Run Flower's merge rules on bad updates, without a network."""
    done = subprocess.run([options.python, MERGES], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "installed": installed,
    "merges": merges,
    "answers": answers,
    "swarm": swarm,
    "rounds_and_kill": rounds_and_kill,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--flower-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--only", choices=sorted(PARTS), action="append")
    parser.add_argument("--nodes", type=int, default=_NODES)
    parser.add_argument("--megabytes", type=float, default=_MEGABYTES)
    parser.add_argument("--swarm", type=int, nargs="+", default=[10, 100, 1000])
    given = parser.parse_args()
    options = Options(given.flower_python, given.nodes, given.megabytes, tuple(given.swarm))
    if not (options.python.parent / "flower-superlink").exists():
        raise SystemExit(f"{options.python} has no Flower. Make an environment for it:\n\n{INSTALL}")
    prepare_driver()
    print(environment_line(), flush=True)
    figures = {}
    for name in given.only or PARTS:
        figures[name] = PARTS[name](options)
        print(f"{time.strftime('%X')} {name}: {figures[name]}", flush=True)
    last_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
