"""Long-lived pools of worker processes.

Importing torch takes seconds, so a pool is started once per backend and kept for the test session. Every
worker joins one process group of five. Sub-groups of the first 1, 2, 3, 4 and 5 ranks are ready for the
named bodies. A body that does not answer in time ends the pool, with each hung worker's stack in the
message.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORLD = 5
START_SECONDS = 200.0
CASE_SECONDS = 100.0
GRACE_SECONDS = 20.0  # after one worker failed, the others are probably waiting for it
MOST_STARTS = 8
REPOSITORY = Path(__file__).resolve().parents[3]


class PoolError(AssertionError):
    """Workers failed, hung or died; the message says which and where."""


@dataclass
class Answer:
    """Result of one body on one worker."""

    ok: bool
    value: Any = None
    failures: list[str] = field(default_factory=list)
    error: str = ""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[str]
    log: Path
    lines: queue.Queue[str | None]

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()


class Pool:
    """Five workers of one backend. Started at the first call, started again after a hang or a death."""

    def __init__(self, backend: str, environment: dict[str, str] | None = None) -> None:
        self.backend = backend
        self.environment = environment or {}
        self._workers: list[_Worker] = []
        self._starts = 0
        self._directory = tempfile.TemporaryDirectory(prefix=f"numerics-{backend}-")

    @property
    def directory(self) -> Path:
        """A directory that every worker can read and write."""
        return Path(self._directory.name)

    def run(
        self, body: str, world: int = WORLD, seconds: float = CASE_SECONDS, **arguments: Any
    ) -> list[Any]:
        """Run ``module:function`` on ranks 0..world-1; its return values in rank order, or PoolError."""
        if not self._workers:
            self._start()
        active = self._workers[:world]
        request = {"body": body, "world": world, "arguments": arguments}
        for worker in active:
            try:
                worker.send(request)
            except OSError:
                self._fail(f"worker {worker.rank} was dead before {body}", active)
        answers = self._collect(active, body, seconds)
        raise_failures(answers, body, world, arguments)
        return [answer.value for answer in answers]

    def close(self) -> None:
        """Ask the workers to leave, then end those that did not."""
        for worker in self._workers:
            try:
                worker.send({"body": "exit"})
            except OSError:
                pass
        deadline = time.monotonic() + 10
        for worker in self._workers:
            try:
                worker.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        self._kill()
        self._directory.cleanup()

    def _start(self) -> None:
        if self._starts >= MOST_STARTS:
            raise PoolError(f"the {self.backend} pool was given up after {self._starts} starts")
        self._starts += 1
        store = self.directory / f"store-{self._starts}"
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONWARNINGS="ignore")
        paths = [str(REPOSITORY / "src"), str(REPOSITORY), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment.update(self.environment)
        for rank in range(WORLD):
            log = self.directory / f"worker-{self._starts}-{rank}.log"
            arguments = ["--backend", self.backend, "--rank", str(rank), "--world", str(WORLD)]
            arguments += ["--store", str(store), "--scratch", str(self.directory)]
            with log.open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.numerics.harness.worker", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    cwd=REPOSITORY,
                )
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
            self._workers.append(_Worker(rank, process, log, lines))
        answers = self._collect(self._workers, "start", START_SECONDS)
        broken = [(rank, answer.error) for rank, answer in enumerate(answers) if not answer.ok]
        if broken:
            self._kill()
            raise PoolError("\n".join(f"rank {rank} did not start: {error}" for rank, error in broken))

    def _collect(self, workers: list[_Worker], body: str, seconds: float) -> list[Answer]:
        deadline = time.monotonic() + seconds
        answers: dict[int, Answer] = {}
        while len(answers) < len(workers):
            for worker in workers:
                if worker.rank in answers:
                    continue
                try:
                    line = worker.lines.get(timeout=0.02 if len(workers) - len(answers) > 1 else 0.2)
                except queue.Empty:
                    continue
                if line is None:
                    self._fail(f"worker {worker.rank} died in {body}", workers, answers)
                answer = Answer(**json.loads(line))
                answers[worker.rank] = answer
                if not answer.ok:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline and len(answers) < len(workers):
                self._fail(f"{body} did not end in time", workers, answers)
        return [answers[worker.rank] for worker in workers]

    def _fail(self, message: str, workers: list[_Worker], answers: dict[int, Answer] | None = None) -> None:
        """Stop the pool and raise PoolError with the log of each silent worker."""
        answers = answers or {}
        report = [message]
        silent = [worker for worker in workers if worker.rank not in answers]
        signalled = []
        for worker in silent:
            if worker.process.poll() is None and hasattr(signal, "SIGUSR1"):
                signalled.append((worker, worker.log.stat().st_size))
                worker.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 20
        while time.monotonic() < until and not all(_has_shown(*sent) for sent in signalled):
            time.sleep(0.05)
        for rank, answer in sorted(answers.items()):
            report.append(f"rank {rank} answered: {'ok' if answer.ok else answer.error.strip()[-2500:]}")
        for worker in silent:
            status = worker.process.poll()
            state = "hung" if status is None else f"died with {status}"
            tail = worker.log.read_text(errors="replace")[-3000:]
            report.append(f"rank {worker.rank} {state}; the end of its log:\n{tail}")
        self._kill()
        raise PoolError("\n".join(report))

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
            for stream in (worker.process.stdin, worker.process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:
                        pass
        self._workers = []


def _has_shown(worker: _Worker, before: int) -> bool:
    """Return True if the worker has written its stacks, which end with its main thread."""
    with worker.log.open("rb") as log:
        log.seek(before)
        return b"in <module>" in log.read().rpartition(b"most recent call first")[2]


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:  # closed under us when the pool ends
        pass
    lines.put(None)


def raise_failures(answers: list[Answer], body: str, world: int, arguments: dict[str, Any]) -> None:
    report = []
    for rank, answer in enumerate(answers):
        if not answer.ok:
            report.append(f"rank {rank} raised:\n{answer.error.strip()[-3000:]}")
        elif answer.failures:
            shown = answer.failures[:6]
            more = len(answer.failures) - len(shown)
            report.append(f"rank {rank}: " + "\n  ".join(shown) + (f"\n  and {more} more" if more else ""))
    if report:
        raise PoolError(f"{body} world={world} {arguments}\n" + "\n".join(report))
