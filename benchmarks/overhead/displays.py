"""Displays that look at a run as people do: the screen in a terminal, the page, and a scraper of metrics."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import TracebackType

import httpx

from benchmarks.agents.local import LocalAgents

_SCRAPE_S = 1.0
_SETTLE_S = 0.2


class Displays:
    """All displays of one run on the first machine. ``updates``: events of the page that arrived."""

    def __init__(self, agents: LocalAgents, run: str, metrics_ports: list[int], folder: Path) -> None:
        self._agents, self._run, self._ports, self._folder = agents, run, metrics_ports, folder
        self._is_closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._screen: subprocess.Popen[bytes] | None = None
        self._terminal = -1
        self.screen_bytes = self.updates = self.scrapes = 0
        self.problems: list[str] = []

    def __enter__(self) -> Displays:
        self._open_screen()
        for target in (self._drain, self._read_page, self._scrape):
            thread = threading.Thread(target=self._checked, args=(target,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing.set()
        if self._screen is not None and self._screen.poll() is None:
            os.write(self._terminal, b"q")
            try:
                self._screen.wait(20)
            except subprocess.TimeoutExpired:
                self.problems.append("the screen does not leave with q")
                self._screen.kill()
                self._screen.wait()
        for thread in self._threads:
            thread.join(10)
        os.close(self._terminal)

    def _checked(self, target: object) -> None:
        try:
            target()  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - a thread's error is a result of the benchmark
            if not self._is_closing.is_set():
                self.problems.append(f"{getattr(target, '__name__', target)}: {error!r}")

    def _open_screen(self) -> None:
        """Start `barnraise watch` in a terminal of 120 columns and 40 lines."""
        self._terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._screen = subprocess.Popen(
            [sys.executable, "-m", "barnraise.cli.main", "watch", self._run],
            env={**self._agents.environment(0), "TERM": "xterm-256color"},
            cwd=self._folder,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)

    def _drain(self) -> None:
        """Read what the screen draws, as a terminal does."""
        while True:
            try:
                read = os.read(self._terminal, 1 << 16)
            except OSError:  # the screen has ended
                return
            if not read:
                return
            self.screen_bytes += len(read)

    def _read_page(self) -> None:
        """Open the page of the run with a one-time link, and read its updates."""
        done = self._agents.type(0, "open", "--print", "--json", folder=self._folder)
        link = json.loads(done.stdout)["link"]
        with httpx.Client(trust_env=False, timeout=None) as client:
            opened = client.get(link)
            home = re.search(r'url=([^"]+)"', opened.text)
            assert home is not None, opened.text
            base = str(opened.url.join(home[1])).rstrip("/")
            page = client.get(f"{base}/runs/{self._run}")
            page.raise_for_status()
            with client.stream("GET", f"{base}/runs/{self._run}/updates") as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    self.updates += line.startswith("event:")
                    if self._is_closing.is_set():
                        return

    def _scrape(self) -> None:
        """Read the metrics of each machine once a second, as Prometheus may."""
        with httpx.Client(trust_env=False) as client:
            while not self._is_closing.wait(_SCRAPE_S):
                for port in self._ports:
                    client.get(f"http://127.0.0.1:{port}/metrics").raise_for_status()
                    self.scrapes += 1

    def screen_cpu_s(self) -> float:
        """Return the processor time of the screen so far."""
        if self._screen is None:
            return 0.0
        fields = Path(f"/proc/{self._screen.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def settle(self) -> None:
        """Wait until all displays have shown the run once."""
        begin = time.monotonic()
        while not (self.screen_bytes and self.updates and self.scrapes):
            assert time.monotonic() - begin < 120, f"no display: {self.problems}"
            assert not self.problems, self.problems
            time.sleep(_SETTLE_S)
