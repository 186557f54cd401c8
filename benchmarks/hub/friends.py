"""Six friends behind three home routers train one model with a hub, with the commands they would type.

    python -m benchmarks.hub.friends --quick     400 batches, about eight minutes
    python -m benchmarks.hub.friends             1,200 batches
    python -m benchmarks.hub.friends --round 10s

The hub is on a public host. Two friends are behind each of three routers with NAT. The routers have 20, 50
and 100 Mbit/s up and 20, 40 and 80 ms one way to the hub. Everything is started with the real commands. The
model is that of `programs/characters.py`. A sample takes each friend's device 50 to 80 ms. It is computed,
and the rest of that time is a wait, because two cores carry all hosts.

Utilisation is the device time of all counted samples over elapsed time. Time starts at the first version that
all have contributed to, and stops at the last version. The loss is compared with the same script alone, with
exact steps and as many samples. Needs root. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from barnraise.hub.storage.log import CommittedRound, Contribution, HubLog
from benchmarks.agents.runs import figures_in
from benchmarks.report import REPOSITORY, environment_line, last_line, table
from lab import Host, Lab, LabProcess

PROGRAMS = Path(__file__).parents[1] / "programs"
SCRIPT = "with_friends.py"
PORT, RUN = 52480, "characters"
BATCH, UNIT = 64, 4
LONGEST_S = 1500.0


class Home(NamedTuple):
    """A router, and the seconds that a sample takes each machine behind it."""

    up_mbps: int
    delay_ms: int  # one way to the hub
    sample_s: tuple[float, ...]


HOMES = (Home(20, 20, (0.05, 0.07)), Home(50, 40, (0.06, 0.08)), Home(100, 80, (0.07, 0.06)))


class Friend(NamedTuple):
    name: str
    home: Home
    host: Host
    sample_s: float
    process: LabProcess
    asked_at: float

    def figures(self) -> dict[str, Any]:
        return figures_in(self.process.output())


class Written(NamedTuple):
    """Versions and contributions in the hub's log."""

    versions: tuple[CommittedRound, ...]
    parts: dict[int, tuple[Contribution, ...]]  # by version
    names: dict[str, str]  # by node

    def firsts(self) -> dict[str, float]:
        """Return the time at which each friend's first update became part of a version."""
        first_times: dict[str, float] = {}
        for version in self.versions:
            for part in self.parts[version.number]:
                first_times.setdefault(self.names[part.node], version.time)
        return first_times

    @property
    def samples(self) -> int:
        return sum(version.samples for version in self.versions)


class Village:
    """The hub and its friends, in an open lab."""

    def __init__(self, lab: Lab, room: Path, variables: dict[str, str]) -> None:
        self._lab, self._room, self._variables = lab, room, variables
        self.folder = project(room)
        self.directory = room / "hub" / "hub" / RUN
        self._started: list[LabProcess] = []

    def type(self, host: Host, name: str, *words: str, **more: str) -> LabProcess:
        state = self._room / name
        state.mkdir(exist_ok=True)
        environment = {**script_environment(self._variables | more), "BARNRAISE_STATE_DIRECTORY": str(state)}
        command = [sys.executable, "-m", "barnraise.cli.main", *words]
        started = host.start(command, env=environment, cwd=self.folder)
        self._started.append(started)
        return started

    def keep_hub(self, round_time: str) -> str:
        """Start the hub and return its invite."""
        host = self._lab.hosts[0]
        address = f"https://{host.address}:{PORT}"
        words = ("--name", RUN, "--address", address, "--round", round_time, "--no-train")
        count = sum(len(home.sample_s) for home in HOMES)
        hub = self.type(host, "hub", "hub", "up", *words, "--uses", str(count), SCRIPT)
        self.until(lambda: "barnraise-invite:" in hub.output(), 200.0, "the hub prints an invite", [hub])
        match = re.search(r"barnraise-invite:\S+", hub.output())
        assert match is not None
        return match[0]

    def invite_friends(self, invite: str) -> list[Friend]:
        """Start all friends at once with this invite."""
        friends = []
        for number, (nat, home) in enumerate(zip(self._lab.nats, HOMES, strict=True)):
            for place, (host, sample_s) in enumerate(zip(nat.hosts, home.sample_s, strict=True)):
                name = f"home{number}-{place}"
                words = ("join", "--invite", invite, "--yes", "--name", name)
                asked_at = time.time()
                process = self.type(host, name, *words, SAMPLE_S=str(sample_s))
                friends.append(Friend(name, home, host, sample_s, process, asked_at))
        return friends

    def read(self) -> Written:
        log = HubLog(self.directory)
        try:
            content = log.read()
            parts = {version.number: log.contributions(version.number) for version in content.versions}
        finally:
            log.close()
        names = {node: member.name for node, member in content.members.items()}
        return Written(tuple(content.versions), parts, names)

    def until(
        self, is_so: Callable[[], bool], seconds: float, what: str, processes: Sequence[LabProcess]
    ) -> None:
        begin = time.monotonic()
        while not is_so():
            if time.monotonic() - begin > seconds or any(process.returncode for process in processes):
                words = "\n---\n".join(process.output()[-2000:] for process in processes)
                raise SystemExit(f"a process ended, or timed out after {seconds:g} s: {what}\n{words}")
            time.sleep(0.5)

    def close(self) -> None:
        for process in self._started:
            process.signal(signal.SIGINT)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def project(room: Path) -> Path:
    """Create the project folder that every friend gets."""
    folder = room / "project"
    folder.mkdir()
    for name in (SCRIPT, "characters.py", "planned.py"):
        shutil.copy(PROGRAMS / name, folder)
    return folder


def script_environment(variables: dict[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", **variables}


def reachable_ports(host: Host) -> int:
    """Count the listening TCP sockets that are not on loopback."""
    text = host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    rows = [line.split() for line in text.splitlines()]
    addresses = [row[1].partition(":")[0] for row in rows if len(row) > 3 and row[3] == "0A"]
    return sum(address not in ("0100007F", "00000000000000000000000001000000") for address in addresses)


def train_together(batches: int, round_time: str, seed: int) -> dict[str, Any]:
    variables = {"BATCHES": str(batches), "SEED": str(seed), "UNIT": str(UNIT)}
    with (
        tempfile.TemporaryDirectory(prefix="by-friends-") as room,
        Lab(hosts=1, nat=[len(home.sample_s) for home in HOMES], rate="1gbit", shaped=True) as lab,
    ):
        for nat, home in zip(lab.nats, HOMES, strict=True):
            lab.set_rate(nat.router, f"{home.up_mbps}mbit", "200mbit")
            lab.set_path(lab.hosts[0], nat.router, f"{home.delay_ms}ms")
        village = Village(lab, Path(room), variables)
        try:
            friends = village.invite_friends(village.keep_hub(round_time))
            processes = [friend.process for friend in friends]
            village.until(
                lambda: len(village.read().firsts()) == len(friends), 300.0, "all contribute", processes
            )
            ports = [reachable_ports(friend.host) for friend in friends]
            village.until(
                lambda: all(process.poll() is not None for process in processes),
                LONGEST_S,
                "all end",
                processes,
            )
            return print_figures(village.read(), friends) | {"inbound_ports": sum(ports)}
        finally:
            village.close()


def print_figures(written: Written, friends: Sequence[Friend]) -> dict[str, Any]:
    """Print the work of each friend and return the figures of all."""
    firsts, by_name = written.firsts(), {friend.name: friend for friend in friends}
    began, ended = max(firsts.values()), written.versions[-1].time
    rounds = [version for version in written.versions if began < version.time]
    busy = dict.fromkeys(by_name, 0.0)
    counts = dict.fromkeys(by_name, 0)
    for version in rounds:
        for part in written.parts[version.number]:
            name = written.names[part.node]
            busy[name] += part.samples * by_name[name].sample_s
            counts[name] += 1
    wall = ended - began
    ends = {friend.name: friend.figures() for friend in friends}
    rows = [
        [
            f"{name}, {friend.home.up_mbps} Mbit/s, {friend.home.delay_ms} ms",
            friend.sample_s,
            firsts[name] - friend.asked_at,
            counts[name],
            statistics.median(sorted(ends[name]["pauses"])[-counts[name] :]),
            statistics.mean(sorted(ends[name]["pauses"])[: -counts[name]]),
            busy[name] / wall,
        ]
        for name, friend in by_name.items()
    ]
    head = ["friend", "sample s", "first round s", "rounds", "exchange s", "between units s", "utilisation"]
    print(table(head, rows))
    lengths = [later.time - earlier.time for earlier, later in itertools.pairwise(rounds)]
    late = sum(part.behind > 0 for version in rounds for part in written.parts[version.number])
    losses = [
        figures["loss"]
        for figures in ends.values()
        if figures["done"] == max(x["done"] for x in ends.values())
    ]
    return {
        "join_to_first_round_s_worst": max(firsts[friend.name] - friend.asked_at for friend in friends),
        "utilisation": sum(busy.values()) / len(friends) / wall,
        "rounds": len(written.versions) - 1,
        "round_s": statistics.median(lengths),
        "late_updates": late,
        "samples": written.samples,
        "loss": losses[0],
        "same_model": len(set(losses)) == 1,
    }


def train_alone(batches: int, stop: int, seed: int) -> float:
    """Train the same script without a hub, in a session with exact steps, and return its loss."""
    variables = {"BATCHES": str(batches), "STOP": str(stop), "SEED": str(seed)}
    with tempfile.TemporaryDirectory(prefix="by-alone-") as room:
        done = subprocess.run(
            [sys.executable, SCRIPT],
            cwd=project(Path(room)),
            env={**os.environ, **script_environment(variables)},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=True,
        )
    return float(figures_in(done.stdout)["loss"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", type=int)
    parser.add_argument("--round", default="30s", help="of the hub")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    batches = options.batches or (400 if options.quick else 1200)
    print(environment_line(), flush=True)
    figures = train_together(batches, options.round, options.seed)
    print(figures, flush=True)
    alone = train_alone(batches, round(figures["samples"] / BATCH), options.seed)
    last_line({**figures, "loss_one_cluster": alone, "loss_gap": figures["loss"] / alone - 1})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
