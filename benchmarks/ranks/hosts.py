"""Start ranks on lab hosts (or on this machine) and send them commands.

Importing torch costs about two CPU-seconds, which would distort every figure taken at the same time. So each
host runs one *fork server* that imports torch once and forks ranks on request. A forked rank connects back to
the driver's Unix socket (network namespaces do not divide the file system). Then it executes commands: one
JSON object per line in, one per line out.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Any, Protocol

from tests.json_socket import JsonSocket

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
PROCESS_ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
Answer = Any
"""What a rank answered, already parsed from JSON."""


class RankError(RuntimeError):
    """A rank answered with an error, died, or did not answer in time."""


class Host(Protocol):
    """Interface of a machine for benchmarks; the lab's hosts and ``ThisMachine`` implement it."""

    address: str

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> object: ...


class ThisMachine:
    """The machine the driver runs on, for runs without root: loopback only, nothing shaped."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Popen[bytes]:
        return Popen([str(word) for word in argv], env={**os.environ, **(env or {})})


@dataclass
class Rank:
    """One long-lived worker process, seen from the driver."""

    label: str
    host: int
    pid: int
    connection: JsonSocket

    def tell(self, do: str, **arguments: Any) -> None:
        try:
            self.connection.send({"do": do, **arguments})
        except OSError as error:
            raise RankError(f"{self.label}: gone before it could be told to {do}: {error}") from error

    def answer(self, timeout: float = 120.0) -> Answer:
        try:
            reply = self.connection.receive(timeout)
        except TimeoutError as error:
            raise RankError(f"{self.label}: no answer in {timeout:.0f} s") from error
        except OSError as error:
            raise RankError(f"{self.label}: {error}") from error
        if reply is None:
            raise RankError(f"{self.label}: ended without an answer")
        if "error" in reply:
            raise RankError(f"{self.label}: {reply['error']}")
        return reply["ok"]

    def ask(self, do: str, *, timeout: float = 120.0, **arguments: Any) -> Answer:
        self.tell(do, **arguments)
        return self.answer(timeout)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self.connection.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def ask_all(ranks: Sequence[Rank], do: str, /, *, timeout: float = 120.0, **arguments: Any) -> list[Answer]:
    """Send the same command to all ranks, and return their answers in order."""
    for rank in ranks:
        rank.tell(do, **arguments)
    return [rank.answer(timeout) for rank in ranks]


class Fleet:
    """Fork servers on some hosts, and the ranks forked from them."""

    def __init__(
        self, hosts: Sequence[Host], directory: Path, environments: Sequence[Mapping[str, str]]
    ) -> None:
        self.hosts = hosts
        self.directory = directory
        self._environments = environments
        self._fork_servers: list[JsonSocket] = []
        self._ranks: list[Rank] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = directory / f"driver-{secrets.token_hex(3)}.sock"

    def __enter__(self) -> Fleet:
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        for index, (host, environment) in enumerate(zip(self.hosts, self._environments, strict=True)):
            argv: list[str | Path] = [sys.executable, "-m", "benchmarks.ranks.process"]
            argv += [self._path, str(index), self.log(index), host.address]
            host.start(argv, env=PROCESS_ENVIRONMENT | dict(environment))
        waiting: dict[int, JsonSocket] = {}
        while len(waiting) < len(self.hosts):
            hello, connection = self._accept(START_SECONDS)
            waiting[hello["fork_server"]] = connection
        self._fork_servers = [waiting[index] for index in range(len(self.hosts))]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RankError):
            for index in range(len(self.hosts)):
                print(f"--- host {index}: last words\n{tail(self.log(index))}", file=sys.stderr)
        for rank in self._ranks:
            rank.end()
        for fork_server in self._fork_servers:
            fork_server.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def log(self, host: int) -> Path:
        return self.directory / f"host{host}.log"

    def fork(self, host: int, label: str, environment: Mapping[str, str] | None = None) -> Rank:
        """Fork a new rank on that host, ready for commands."""
        self._fork_servers[host].send({"label": label, "environment": dict(environment or {})})
        hello, connection = self._accept(30.0)
        if hello.get("label") != label:
            raise RankError(f"expected rank {label} on host {host}, got {hello}")
        rank = Rank(label, host, hello["pid"], connection)
        self._ranks.append(rank)
        return rank

    def retire(self, rank: Rank) -> None:
        rank.end()
        self._ranks.remove(rank)

    def _accept(self, timeout: float) -> tuple[dict[str, Any], JsonSocket]:
        self._listener.settimeout(timeout)
        try:
            stream, _ = self._listener.accept()
            connection = JsonSocket(stream)
            hello = connection.receive(timeout)
        except TimeoutError as error:
            raise RankError(f"a process did not start in {timeout:.0f} s") from error
        if hello is None:
            raise RankError("a process exited before it sent its identity")
        return hello, connection


def prepare_driver() -> None:
    """Remove settings of the user that would change a figure, and make SIGTERM exit with cleanup."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in [name for name in os.environ if name.startswith(("BARNRAISE_", "GLOO_", "TORCH_"))]:
        del os.environ[name]


def identities(directory: Path, addresses: Sequence[str]) -> list[dict[str, str]]:
    """Return one environment per machine: each with its own key, and trust in the others."""
    from barnraise.identity.keys import NodeKey

    secret = directory / "discovery.secret"
    secret.write_text(secrets.token_hex(32) + "\n")
    secret.chmod(0o600)
    states = [directory / f"host{index}" for index in range(len(addresses))]
    nodes = []
    for state in states:
        state.mkdir(mode=0o700, exist_ok=True)
        nodes.append(str(NodeKey.load_or_create(state / "node.key").id))
    return [
        {
            "BARNRAISE_STATE_DIRECTORY": str(state),
            "BARNRAISE_NETWORK_ADDRESSES": address,
            "BARNRAISE_TRUST_NODES": ",".join(nodes),
            "BARNRAISE_TRUST_SECRET_FILE": str(secret),
        }
        for state, address in zip(states, addresses, strict=True)
    ]


@contextmanager
def working_directory() -> Iterator[Path]:
    """Create a temporary directory with a short path, because Unix sockets allow about 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="by-bench-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(nothing)"
