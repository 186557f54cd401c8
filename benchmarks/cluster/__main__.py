"""The cluster, measured on real agents in the lab and on simulated ones.

    python -m benchmarks.cluster --quick     about 4 minutes
    python -m benchmarks.cluster             50 kills and 50 stops of the coordinator, 10,000 schedules

The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import psutil

from benchmarks.agents.machines import Machines
from benchmarks.report import environment_line, last_line, table
from benchmarks.simulation.membership.schedules import forming_time, message_cost, run_many
from lab import Lab


class Size(NamedTuple):
    """Number of repetitions of each measurement."""

    joins: int
    kills: int
    idle_s: float
    schedules: int
    formings: int


QUICK = Size(joins=3, kills=5, idle_s=20.0, schedules=1500, formings=1)
FULL = Size(joins=7, kills=50, idle_s=60.0, schedules=10_000, formings=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    begin = time.monotonic()
    print(environment_line())
    figures: dict[str, object] = {}
    with Lab(hosts=4) as lab, Machines(lab.hosts) as machines:
        joins = machines.form()
        figures |= _idle(machines, size)
        figures |= _status(machines)
        with _traffic(lab):
            for how in ("kill", "stop"):
                figures |= _coordinator(machines, how, size)
    for _ in range(size.joins // 3 - 1):
        with Lab(hosts=4) as lab, Machines(lab.hosts) as machines:
            joins += machines.form()
    figures["join_s_median"] = round(statistics.median(joins), 2)
    figures["join_s_worst"] = round(max(joins), 2)
    times = [_form_eight() for _ in range(size.formings)]
    figures["form_8_s"] = round(statistics.median(times), 2)
    worst = [float(str(figures[f"coordinator_{how}_s_worst"])) for how in ("kill", "stop")]
    figures["coordinator_s_worst"] = max(worst)
    figures |= _simulated(size)
    figures["seconds"] = round(time.monotonic() - begin, 1)
    print(table(["figure", "value"], [[name, str(value)] for name, value in figures.items()]))
    last_line(figures)
    return 0


def _idle(machines: Machines, size: Size) -> dict[str, object]:
    """Measure CPU and memory of idle agents; the worst of the four counts."""
    time.sleep(5.0)
    agents = [psutil.Process(machines.process(place).pid) for place in range(4)]
    before = [sum(agent.cpu_times()[:2]) for agent in agents]
    begin = time.monotonic()
    time.sleep(size.idle_s)
    seconds = time.monotonic() - begin
    used = [sum(agent.cpu_times()[:2]) - then for agent, then in zip(agents, before, strict=True)]
    return {
        "idle_cpu_percent": round(100 * max(used) / seconds, 2),
        "idle_rss_mb": round(max(agent.memory_info().rss for agent in agents) / 1e6, 1),
    }


def _status(machines: Machines) -> dict[str, object]:
    """Time the whole `barnraise status` command, and the agent's response alone."""
    command = [sys.executable, "-m", "barnraise.cli.main", "status"]
    times, answers = [], []
    for _ in range(9):
        begin = time.monotonic()
        subprocess.run(command, env=machines.environment(0), check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - begin)
        begin = time.monotonic()
        machines.status(0)
        answers.append(time.monotonic() - begin)
    return {
        "status_ms": round(1e3 * statistics.median(times)),
        "status_answer_ms": round(1e3 * statistics.median(answers), 1),
    }


_POUR = """
import socket, sys, threading, time
def drain(link):
    while link.recv(1 << 20): pass
def receive():
    server = socket.create_server(("0.0.0.0", 5000))
    while True:
        link, _ = server.accept()
        threading.Thread(target=drain, args=(link,), daemon=True).start()
threading.Thread(target=receive, daemon=True).start()
time.sleep(1)
link = socket.create_connection((sys.argv[1], 5000))
while True: link.sendall(bytes(250_000)); time.sleep(0.05)
"""


@contextmanager
def _traffic(lab: Lab) -> Iterator[None]:
    """Send 40 Mbit/s from every host to the next one while the body runs."""
    following = [*lab.hosts[1:], lab.hosts[0]]
    pours = [
        host.start([sys.executable, "-S", "-c", _POUR, to.address])
        for host, to in zip(lab.hosts, following, strict=True)
    ]
    try:
        yield
    finally:
        for pour in pours:
            pour.kill()


def _coordinator(machines: Machines, how: str, size: Size) -> dict[str, object]:
    """Return the seconds until every survivor holds a view without the killed or stopped coordinator."""
    times, returns = [], []
    for _ in range(size.kills):
        name = machines.status(0).coordinator
        victim = int(name[1:])
        others = [place for place in range(4) if place != victim]
        begin = time.monotonic()
        if how == "kill":
            machines.kill(victim)
        else:
            machines.freeze(victim)
        machines.until(partial(machines.agree, others), 20.0, f"the others replace {name}")
        times.append(time.monotonic() - begin)
        begin = time.monotonic()
        if how == "kill":
            machines.start(victim)
        else:
            machines.thaw(victim)
        machines.until(lambda: machines.agree(range(4)), 30.0, f"{name} is back")
        returns.append(time.monotonic() - begin)
    return {
        f"coordinator_{how}_s_median": round(statistics.median(times), 2),
        f"coordinator_{how}_s_worst": round(max(times), 2),
        f"coordinator_{how}_back_s_median": round(statistics.median(returns), 2),
    }


def _form_eight() -> float:
    """Start eight machines of one cluster at once; return the seconds until they agree on one view."""
    with Lab(hosts=8) as lab, Machines(lab.hosts) as machines:
        machines.form()
        for place in range(8):
            machines.kill(place)
        begin = time.monotonic()
        for place in range(8):
            machines.launch(place)
        machines.until(lambda: machines.agree(range(8)), 60.0, "eight agree")
        return time.monotonic() - begin


def _simulated(size: Size) -> dict[str, object]:
    outcomes = run_many(range(size.schedules))
    figures: dict[str, object] = {
        "sim_schedules": len(outcomes),
        "sim_violations": sum(outcome.fault is not None for outcome in outcomes),
    }
    for count in (8, 64, 200):
        figures[f"sim_messages_per_node_s_{count}"] = round(message_cost(count), 1)
    figures["sim_form_200_s"] = round(forming_time(200), 1)
    return figures


if __name__ == "__main__":
    sys.exit(main())
