"""A cluster of ours and one of torchft on the same kind of lab hosts, for `benchmarks.against.torchft`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from benchmarks.agents.commits import Commit
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from benchmarks.session.soak import PROGRAM
from lab import Host, Lab, LabProcess

HOSTS = 4
DELAY_S = 0.01
LOOP = REPOSITORY / "benchmarks" / "programs" / "torchft_loop.py"
_PORT = 29510

# Of torchft: what its lighthouse gets on the command line, and its loop in the environment.
Settings = tuple[tuple[str, ...], Mapping[str, str]]
DEFAULT: Settings = ((), {})
DEFAULT_DDP: Settings = ((), {"AVERAGING": "ddp"})
# As in torchft's README and the example that it points to.
EXAMPLE: Settings = (("--join_timeout_ms", "10000"), {"TIMEOUT_S": "30", "GLOO_TIMEOUT_S": "5"})
SHORT: Settings = (
    ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000", "--quorum_tick_ms", "50"),
    {"TIMEOUT_S": "3", "QUORUM_TIMEOUT_S": "20", "CONNECT_TIMEOUT_S": "5", "QUORUM_RETRIES": "10"},
)


class Trace:
    """Commits that the members recorded, read incrementally to use little CPU time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken = 0
        self._commits: list[Commit] = []

    def commits(self) -> list[Commit]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._taken)
                whole = file.read().rpartition(b"\n")[0]
            self._taken += len(whole) + 1 if whole else 0
            self._commits += [Commit(line) for line in whole.decode().splitlines()]
        return self._commits

    def since(self, moment: float) -> list[Commit]:
        """Return the commits after this moment, in the order in which they were written."""
        late = takewhile(lambda commit: commit.at > moment - 1.0, reversed(self.commits()))
        return [commit for commit in late if commit.at > moment][::-1]


class Ours:
    """A session, run as a person runs it."""

    def __init__(self, machines: Machines, room: Path) -> None:
        self._machines = machines
        self.hosts = machines.hosts
        self.trace = Trace(room / "trace")
        folder = room / "project"
        folder.mkdir()
        shutil.copy(PROGRAM, folder / "train.py")
        given = {"MODEL": "words", "EPOCHS": "1000000", "DELAY": str(DELAY_S)}
        given["BARNRAISE_TRACE_COMMITS"] = str(self.trace.path)
        words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        command = ["run", "--detach", "--restarts", "1000", *words, "train.py"]
        result = CommandLine(machines).run(0, *command, folder=folder)
        if result.returncode != 0:
            raise SystemExit(f"the run did not start:\n{result.stderr}")

    def coordinator(self) -> Host:
        status = self._machines.status(0)
        return self.hosts[next(int(row.name[1]) for row in status.nodes if row.coordinator)]

    def revive(self, host: Host) -> None:
        """Start the agent again after all processes of the host were killed."""
        place = self.hosts.index(host)
        self._machines.agents[place] = None
        self._machines.launch(place)


class Torchft:
    """A lighthouse on the first host, and on each a replica group, which is started again when it ends."""

    def __init__(self, lab: Lab, python: Path, settings: Settings, room: Path) -> None:
        self.hosts = lab.hosts
        self._python = python
        self._lighthouse_words, loop = settings
        self.trace = Trace(room / "trace")
        self.lighthouse = self.start_lighthouse()
        for group, host in enumerate(self.hosts):
            environment = {
                "TORCHFT_LIGHTHOUSE": f"http://{self.hosts[0].address}:{_PORT}",
                "GROUP": str(group),
                "GROUPS": str(HOSTS),
                "ADDRESS": host.address,
                "TRACE": str(self.trace.path),
                "DELAY": str(DELAY_S),
                "GLOO_SOCKET_IFNAME": "eth0",  # all hosts of the lab have one name, which leads nowhere
                **loop,
            }
            again = 'while :; do "$0" "$1"; sleep 0.1; done'
            host.start(["sh", "-c", again, str(python), str(LOOP)], env=environment, cwd=room)

    def coordinator(self) -> Host:
        return self.hosts[0]

    def start_lighthouse(self) -> LabProcess:
        program = self._python.parent / "torchft_lighthouse"
        words = ["--min_replicas", "1", "--bind", f"[::]:{_PORT}", *self._lighthouse_words]
        return self.hosts[0].start([str(program), *words])


@contextmanager
def ours() -> Iterator[Ours]:
    with (
        tempfile.TemporaryDirectory(prefix="by-vs-") as room,
        Lab(hosts=HOSTS) as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        yield Ours(machines, Path(room))


@contextmanager
def torchft(python: Path, settings: Settings) -> Iterator[Torchft]:
    with tempfile.TemporaryDirectory(prefix="by-vs-") as room, Lab(hosts=HOSTS) as lab:
        yield Torchft(lab, python, settings, Path(room))
