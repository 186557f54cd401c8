"""Flower's SuperLink and SuperNodes on lab hosts, for `benchmarks.against.flower`."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents.machines import REPOSITORY
from lab import Host, LabProcess

APP = REPOSITORY / "benchmarks" / "programs" / "flower_app"
MERGES = REPOSITORY / "benchmarks" / "programs" / "flower_merges.py"
SWARM = REPOSITORY / "benchmarks" / "programs" / "flower_swarm.py"
PORT = 8000
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
_KINDS = {
    "superlink": "flower-superlink",
    "supernode": "flower-supernode",
    "superexec": "flower-superexec",
    "serverapp": "flwr-serverapp",
    "clientapp": "flwr-clientapp",
}


class Flower:
    """One SuperLink with its database, and nodes."""

    def __init__(self, python: Path, link: Host, directory: Path) -> None:
        self.bin = python.parent
        self.link_host = link
        self.directory = directory
        self.address = f"{link.address}:{PORT}"
        self.database = directory / "state.db"
        self.link: LabProcess | None = None
        self.nodes: list[LabProcess] = []
        self.runs = 0

    def environment(self, name: str) -> dict[str, str]:
        home = self.directory / name
        home.mkdir(exist_ok=True)
        words = f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "{self.address}"\n'
        (home / "config.toml").write_text(f"{words}insecure = true\n")
        return _QUIET | {"FLWR_HOME": str(home), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def start_link(self, wait_s: float = 180.0) -> float:
        """Start the SuperLink and return the seconds until it serves."""
        begin = time.monotonic()
        argv: list[str | Path] = [
            self.bin / "flower-superlink",
            "--insecure",
            "--host",
            "0.0.0.0",
            "--port",
            str(PORT),
        ]
        argv += ["--database", self.database, "--disable-runtime-dependency-installation"]
        self.link = self.link_host.start(argv, env=self.environment("link"))
        started = self.link
        wait_for(lambda: "Uvicorn running" in started.output(), wait_s, "the SuperLink to serve")
        return time.monotonic() - begin

    def start_nodes(self, hosts: Sequence[Host], wait_s: float = 600.0) -> None:
        for number, host in enumerate(hosts, len(self.nodes)):
            argv: list[str | Path] = [
                self.bin / "flower-supernode",
                "--insecure",
                "--superlink",
                self.address,
            ]
            argv += ["--node-config", f"partition-id={number}"]
            self.nodes.append(host.start(argv, env=self.environment(host.name)))
        wait_for(
            lambda: self.count_lines("Activated node_id") >= len(self.nodes), wait_s, "all nodes to be known"
        )

    def count_lines(self, words: str) -> int:
        assert self.link is not None
        return self.link.output().count(words)

    def run(self, **settings: object) -> Trace:
        """Start a run of the app and return at once."""
        self.runs += 1
        trace = Trace(self.directory / f"trace-{self.runs}")
        words = {**settings, "trace": str(trace.path)}
        text = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in words.items())
        done = self.link_host.run(
            [self.bin / "flwr", "run", APP, "lab", "--run-config", text],
            env=self.environment("user"),
            cwd=self.directory,
            timeout=120.0,
        )
        match = re.search(r"started run (\d+)", done.stdout)
        trace.run = match.group(1) if match else done.stdout + done.stderr
        return trace

    def status(self, run: str) -> str:
        command: list[str | Path] = [self.bin / "flwr", "ls", "lab", "--run-id", run, "--format", "json"]
        environment, folder = self.environment("user"), self.directory
        done = self.link_host.run(command, env=environment, cwd=folder, timeout=120.0, check=False)
        match = re.search(r'"status":\s*"([^"]+)"', done.stdout)
        return match.group(1) if match else (done.stdout + done.stderr).strip()[-200:]

    def kill_link(self) -> None:
        """Kill only the SuperLink's process, and leave its SuperExec and ServerApp running."""
        assert self.link is not None
        self.link.signal(signal.SIGKILL)
        self.link.wait()


class Trace:
    """Records that the app's ServerApp wrote after each round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = ""

    def rounds(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class Memory:
    """The largest resident set that each kind of process on some hosts reached, in MB."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._ended = threading.Event()
        self.peak: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            for pid in [pid for host in self._hosts for pid in host.pids()]:
                try:
                    process = psutil.Process(pid)
                    words, used = " ".join(process.cmdline()[:3]), process.memory_info().rss / 1e6
                except psutil.Error:
                    continue
                for kind, name in _KINDS.items():
                    if name in words:
                        self.peak[kind] = max(self.peak[kind], round(used))


def traffic(host: Host) -> tuple[int, int]:
    """Return the bytes that the host has received and sent."""
    text = host.run(["cat", "/proc/net/dev"]).stdout
    fields = next(line for line in text.splitlines() if "eth0:" in line).split(":")[1].split()
    return int(fields[0]), int(fields[8])


def wait_for(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)
