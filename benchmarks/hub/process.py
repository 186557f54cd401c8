"""A hub in a process of its own on loopback: founded, started, watched, killed."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from barnraise.hub.private_options import PrivateOptions, write_private_options
from barnraise.hub.protocol.invites import Invite, invite_text
from barnraise.hub.protocol.messages import Role, RoundConfig
from barnraise.hub.storage.create import create_hub, create_invite
from barnraise.identity.keys import NodeKey
from benchmarks.ranks.hosts import PROCESS_ENVIRONMENT, tail

SERVES_S = 120.0
_WATCH_S = 0.2
# Without verification: callers verify the hub's signatures, or only check that the hub responds.
UNVERIFIED = ssl.create_default_context()
UNVERIFIED.check_hostname = False
UNVERIFIED.verify_mode = ssl.CERT_NONE


class HubProcess:
    """May be killed and started again. As a context it is watched: its memory is that of the process and its
    children, seen five times a second."""

    def __init__(
        self,
        directory: Path,
        terms: RoundConfig | None,
        *,
        name: str = "load",
        plain: bool = False,
        parent: Invite | None = None,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a hub process; without terms the hub exists already, or takes its terms from its parent.

        ``wrapper``: command that executes the hub in its own process, which is the one watched and killed.
        """
        self.directory = directory
        self._options = ["--plain"] if plain else []
        self._private = PrivateOptions(parent=invite_text(parent)) if parent else None
        self._wrapper, self._environment = tuple(wrapper), dict(environment or {})
        self.owner = NodeKey.generate()
        self.port = free_port()
        self.address = f"{'http' if plain else 'https'}://127.0.0.1:{self.port}"
        self.log = directory.with_suffix(".log")
        self.peak_mb = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        if terms is not None:
            create_hub(directory, name, self.owner.id, terms)

    def __enter__(self) -> HubProcess:
        self.start()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self.kill()
        if error is not None:
            print(f"--- the hub's last words\n{tail(self.log)}", file=sys.stderr)

    def start(self, *more: str, private: PrivateOptions | None = None) -> float:
        """Start the hub with more options and return the seconds until it responds."""
        options, private = self._options, private or self._private
        if private is not None:
            path = self.directory.with_suffix(".private")
            write_private_options(private, path)
            options = [*options, "--private-options", str(path)]
        begin = time.monotonic()
        argv = [*self._wrapper, sys.executable, "-m", "barnraise.hub", str(self.directory)]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), *options, *more]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env=os.environ | PROCESS_ENVIRONMENT | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - begin > SERVES_S:
                self.kill()
                raise RuntimeError(f"the hub does not serve:\n{tail(self.log)}")
            time.sleep(0.02)
        return time.monotonic() - begin

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def invite(self, role: Role = "friend", uses: int = 1) -> Invite:
        return create_invite(self.directory, [self.address], role=role, uses=uses)

    def memory_mb(self) -> float:
        if self._process is None:
            return 0.0
        try:
            own = psutil.Process(self._process.pid)
            return (
                float(sum(process.memory_info().rss for process in (own, *own.children(recursive=True))))
                / 1e6
            )
        except psutil.Error:
            return 0.0

    def cpu_s(self) -> float:
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def busy_s(self) -> tuple[float, float]:
        """Return the CPU seconds of its first thread, the event loop, and of its other threads."""
        assert self._process is not None
        spent = {}
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            try:
                spent[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
            except OSError:  # it has just ended
                continue
        loop_s = spent.pop(str(self._process.pid), 0.0)
        return loop_s, sum(spent.values())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/v1/run", timeout=5.0, context=UNVERIFIED) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code == 403  # it wants a proxy's token
        except (urllib.error.URLError, OSError):
            return False

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            self.peak_mb = max(self.peak_mb, self.memory_mb())


def free_port() -> int:
    """Return a free port outside the range that systems assign to connections.

    It stays free until a process listens there, also between the kill and the restart of that process.
    """
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as some, contextlib.suppress(OSError):
            some.bind(("127.0.0.1", port))
            return port
