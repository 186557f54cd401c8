"""The driver's side: a pool of worker processes that tests can kill, stop and send requests to."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from barnraise.agent_client.client import ListenerClient
from barnraise.identity import NodeKey
from barnraise.transport.ipc.messages import ListenerStanding
from tests.json_socket import JsonSocket

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
# On a busy machine any process may stand still for seconds. So timeouts are long where no timeout is tested,
# and where one is tested, it is longer than such a stall.
PATIENT_CLOCKS = {"BARNRAISE_LINK_SILENCE_S": "25", "BARNRAISE_LINK_HEARTBEAT_S": "0.5"}
SILENCE_S = 5.0
QUICK_CLOCKS = {"BARNRAISE_LINK_SILENCE_S": f"{SILENCE_S:g}", "BARNRAISE_LINK_HEARTBEAT_S": "0.5"}
# How soon every survivor must know: long before a patient clock has run. The promise is 0.5 s, and
# benchmarks.kills measures it.
NOTICE_S = 10.0


class WorkerError(AssertionError):
    """Error of a worker that raised, died or did not answer. The message ends with its log."""


@dataclass(eq=False)
class Worker:
    """One worker process, seen from the driver."""

    label: str
    pid: int
    json_socket: JsonSocket
    log: Path
    comm_process: int = 0
    dead: bool = False
    quick: bool = False

    def tell(self, body: str, **arguments: Any) -> None:
        try:
            self.json_socket.send({"body": body, **arguments})
        except OSError as error:
            raise WorkerError(f"{self.label} is gone: {error}\n{self.log_tail()}") from error

    def answer(self, timeout: float = ANSWER_SECONDS) -> Any:
        try:
            reply = self.json_socket.receive(timeout)
        except TimeoutError:
            self._dump()
            raise WorkerError(f"{self.label}: no answer in {timeout:g} s\n{self.log_tail()}") from None
        except OSError as error:
            raise WorkerError(f"{self.label}: {error}\n{self.log_tail()}") from error
        if reply is None:
            raise WorkerError(f"{self.label} ended without an answer\n{self.log_tail()}")
        if "error" in reply:
            raise WorkerError(f"{self.label}: {reply['error']}")
        return reply["ok"]

    def ask(self, body: str, *, timeout: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        self.tell(body, **arguments)
        return self.answer(timeout)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the trainer alone. Its communication process must exit by itself."""
        self.dead = True
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.json_socket.close()

    def log_tail(self) -> str:
        """Return the last output of the worker and its communication process."""
        try:
            return self.log.read_text(errors="replace")[-3000:]
        except OSError:
            return ""

    def _dump(self) -> None:
        """Make the worker write its stacks to its log."""
        try:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        except ProcessLookupError:
            pass


@dataclass(eq=False)
class WorkerPool:
    """One fork server and its workers. Healthy workers are used again."""

    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # short: the path of a Unix socket may have about a hundred characters only
        self.directory = Path(tempfile.mkdtemp(prefix="by-f-"))
        self.state = self.directory / "state"
        self.friend = NodeKey.generate()  # another machine, which this one trusts
        self._idle: list[Worker] = []
        self._acquired: list[Worker] = []
        self._numbers = itertools.count()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.directory / "control.sock"))
        self._listener.listen(64)
        self._fork_server, self._process = self._start()

    def close(self) -> None:
        for worker in [*self._idle, *self._acquired]:
            worker.kill()
        self._fork_server.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        until(lambda: not running_processes(self.state), 30.0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def take(self, count: int, quick: bool = False) -> list[Worker]:
        """Return workers without a group, optionally with short timeouts.

        Their communication processes run.
        """
        taken = [worker for worker in self._idle if worker.quick == quick][:count]
        self._idle = [worker for worker in self._idle if worker not in taken]
        while len(taken) < count:
            taken.append(self.fork(QUICK_CLOCKS if quick else None))
            taken[-1].quick = quick
        for worker in taken:
            worker.tell("prepare")
        for worker in taken:
            worker.comm_process = int(worker.answer()["comm_process"])
        self._acquired += taken
        return taken

    def release_all(self) -> None:
        """Return healthy workers to the pool after a test, and kill the others."""
        for worker in self._acquired:
            try:
                if not worker.dead:
                    worker.ask("leave_all")
                    self._idle.append(worker)
            except WorkerError:
                self.end(worker)
        self._acquired = []

    def end(self, worker: Worker) -> None:
        """Kill a worker in any state, even if it is stopped."""
        for pid in (worker.comm_process, worker.pid):
            try:
                os.kill(pid or worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        worker.kill()

    def fork(
        self,
        environment: Mapping[str, str] | None = None,
        namespace: str | None = None,
        label: str = "worker",
    ) -> Worker:
        label = f"{label}-{next(self._numbers)}"
        log = self.directory / f"{label}.log"
        settings = {
            "BARNRAISE_STATE_DIRECTORY": str(self.state),
            "BARNRAISE_NETWORK_ADDRESSES": "127.0.0.1",
            "BARNRAISE_TRUST_NODES": str(self.friend.id),
            **self.environment,
            **(environment or {}),
        }
        request = {"label": label, "environment": settings, "namespace": namespace, "log": str(log)}
        self._fork_server.send(request)
        hello, json_socket = self._accept(ANSWER_SECONDS)
        return Worker(label, int(hello["pid"]), json_socket, log)

    def meeting(self) -> str:
        """Return the path of a new file store for a group."""
        return str(self.directory / f"meeting-{next(self._numbers)}")

    def join(self, workers: Sequence[Worker], **arguments: Any) -> None:
        """Form a default group of these workers, ranked in this order."""
        place = self.meeting()
        for rank, worker in enumerate(workers):
            worker.tell("join", place=place, rank=rank, world=len(workers), **arguments)
        answers(workers)

    def start_all_reduces(self, workers: Sequence[Worker], elements: int) -> None:
        """Start all-reduces on these workers until one fails. Return after the first one of each worker."""
        places = [Path(self.meeting()) for _ in workers]
        for worker, place in zip(workers, places, strict=True):
            worker.tell("all_reduces_until_error", elements=elements, begun=str(place))
        assert until(lambda: all(place.exists() for place in places), ANSWER_SECONDS), "they do not begin"

    def standing(self) -> ListenerStanding:
        with ListenerClient.connect(self.state, timeout=ANSWER_SECONDS) as client:
            return client.standing()

    def _start(self) -> tuple[JsonSocket, subprocess.Popen[bytes]]:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONWARNINGS="ignore")
        paths = [str(REPOSITORY / "src"), str(REPOSITORY), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        # here too, because /proc shows a forked worker with the fork server's environment
        environment["BARNRAISE_STATE_DIRECTORY"] = str(self.state)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.failure.fork_server", str(self.directory / "control.sock")],
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
        )
        return self._accept(START_SECONDS)[1], process

    def _accept(self, timeout: float) -> tuple[dict[str, Any], JsonSocket]:
        self._listener.settimeout(timeout)
        stream, _ = self._listener.accept()
        json_socket = JsonSocket(stream)
        hello = json_socket.receive(timeout)
        if hello is None:
            raise WorkerError("a process exited before it sent its identity")
        return hello, json_socket


def ask_all(
    workers: Sequence[Worker], body: str, *, timeout: float = ANSWER_SECONDS, **rest: Any
) -> list[Any]:
    """Send one request to all workers, and return their answers in order."""
    for worker in workers:
        worker.tell(body, **rest)
    return answers(workers, timeout)


def answers(workers: Sequence[Worker], timeout: float = ANSWER_SECONDS) -> list[Any]:
    """Return one answer of each worker, in order.

    All answers are read before the first failure is raised, so that no answer is left for the next request.
    """
    taken, failures = [], []
    for worker in workers:
        try:
            taken.append(worker.answer(timeout))
        except WorkerError as error:
            failures.append(str(error))
            timeout = min(timeout, 5.0)  # the others have had their time already
    if failures:
        raise WorkerError("\n".join(failures))
    return taken


def until(truth: Callable[[], bool], seconds: float, every: float = 0.05) -> bool:
    """Wait until ``truth`` returns True. Return False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not truth():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def running_processes(state: Path) -> list[int]:
    """Return every process that was started for this state directory."""
    pids = []
    for process in psutil.process_iter():
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if not zombie and process.environ().get("BARNRAISE_STATE_DIRECTORY") == str(state):
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
