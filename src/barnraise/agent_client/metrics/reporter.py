"""Reporter: a thread of each worker that hands the worker's metrics to the agent about once a second."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.metrics.requests import MetricsReport
from barnraise.core import metrics
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import BarnraiseError
from barnraise.core.metrics import ProcessValues, Sample, catalogue
from barnraise.core.metrics.sample import MAX_SAMPLES

log = logging.getLogger("barnraise.metrics")

INTERVAL_S = 1.0
_REQUEST_S = 5.0
_CLOSE_S = 1.0

Source = Callable[[], ProcessValues | None]


class MetricsReporter:
    """Reports of one worker. ``sources``: asked for the values of other processes before each report."""

    def __init__(self, state: Path, run: str, local_rank: int) -> None:
        self._state, self._run, self._local_rank = state, run, local_rank
        self._instance = secrets.token_bytes(8)
        self._process = psutil.Process()
        self._client: ListenerClient | None = None
        self._is_closing = threading.Event()
        self._sending = threading.Lock()
        self.sources: list[Source] = []
        self._thread = threading.Thread(target=self._report_often, name="barnraise-metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Report the last values, when the script ends."""
        self._is_closing.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self.report(_CLOSE_S)

    def report(self, timeout_s: float = _REQUEST_S) -> None:
        """Report the values of now. The agent may be away for a while: then these values are lost."""
        with self._sending:
            others = [values for source in self.sources if (values := source()) is not None]
            request = MetricsReport(self._run, self._local_rank, (self._own_values(), *others[:1]))
            try:
                if self._client is None:
                    self._client = ListenerClient.connect(self._state)
                self._client.ask(msgspec.msgpack.encode(request), timeout_s)
            except BarnraiseError as error:
                log.debug("the metrics were not reported to the agent: %s", error.message)
                if self._client is not None:
                    self._client.close()
                self._client = None

    def _report_often(self) -> None:
        while not self._is_closing.wait(INTERVAL_S):
            self.report()

    def _own_values(self) -> ProcessValues:
        times = self._process.cpu_times()
        own = [
            Sample(catalogue.WORKER_CPU.name, (), times.user + times.system),
            Sample(catalogue.WORKER_MEMORY.name, (), float(self._process.memory_info().rss)),
        ]
        samples = [*own, *metrics.registry.samples()][:MAX_SAMPLES]
        return ProcessValues("worker", self._instance, tuple(samples))


_reporter: MetricsReporter | None = None
_lock = threading.Lock()


def start_reporter(source: Source | None = None) -> None:
    """Start to report this worker's metrics, unless that has begun or no agent launched this process."""
    global _reporter
    if not os.environ.get("BARNRAISE_LAUNCHED"):
        return
    with _lock:
        if _reporter is None:
            run, local_rank = os.environ["BARNRAISE_RUN"], int(os.environ["LOCAL_RANK"])
            _reporter = MetricsReporter(state_directory(load_settings()), run, local_rank)
        if source is not None:
            _reporter.sources.append(source)


def _forget_in_child() -> None:
    """Forget the reporter in a forked child: its thread belongs to the parent."""
    global _reporter, _lock
    if _reporter is not None:
        atexit.unregister(_reporter.close)
    _reporter, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
