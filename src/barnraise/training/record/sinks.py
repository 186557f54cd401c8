"""Destinations of a worker's entries: the agent that started it, or a log of its own."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import encode
from barnraise.agent_client.history.requests import MAX_FRAMES, RecordRequest
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import BarnraiseError
from barnraise.history.entries import Entry, LogHead, MachineFacts, RunStart
from barnraise.history.log_file import RunLogWriter, log_path
from barnraise.history.log_format import encode_frames, pieces
from barnraise.training.autotune.profiler import is_dry_run
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.record.script_end import ScriptEnd

_REQUEST_S = 5.0
_SYNC_S = 10.0
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


class RecordSink(Protocol):
    """Destination of entries of a worker.

    Only the recorder's thread uses it, and `close` after that thread has ended.
    """

    @property
    def node(self) -> bytes:
        """Return the machine of this worker."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries; raise BarnraiseError or OSError if they have to be written again."""

    def close(self) -> None:
        """Write what is left, and close."""


class AgentSink:
    """Sink of a worker that an agent has started: the agent writes the log of its machine."""

    def __init__(self, worker: WorkerId) -> None:
        self.node = bytes.fromhex(worker.node)
        self._worker = worker
        self._client: ListenerClient | None = None

    def write(self, entries: Sequence[Entry]) -> None:
        run, local_rank, start, *_ = self._worker
        try:
            if self._client is None:
                self._client = ListenerClient.connect(self._worker.state)
            for frames in pieces(encode_frames(entries), MAX_FRAMES):
                self._client.ask(encode(RecordRequest(run, local_rank, start, frames)), _REQUEST_S)
        except BarnraiseError:
            self.close()
            raise

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class FileSink:
    """Sink of a process that no agent has started: a log in the state directory, under a new name."""

    node = b""

    def __init__(self, state: Path) -> None:
        self.run = _new_name()
        head = LogHead(self.run, b"", "worker-0", bytes(16), time.time())
        self._writer = RunLogWriter(log_path(state, self.run, b""), head)
        self._synced_at = time.monotonic()
        self._writer.append(_start_entries())
        self._end = ScriptEnd()

    @classmethod
    def create(cls) -> FileSink | None:
        """Return None if this process may not write to the state directory."""
        try:
            return cls(state_directory(load_settings()))
        except (OSError, BarnraiseError):
            return None

    def write(self, entries: Sequence[Entry]) -> None:
        self._writer.append(entries)
        if time.monotonic() - self._synced_at >= _SYNC_S:
            self._synced_at = time.monotonic()
            self._writer.sync()

    def close(self) -> None:
        self._writer.append([self._end.entry(time.time())])
        self._writer.close()


def open_sink(worker: WorkerId | None) -> RecordSink | None:
    """Return where a worker writes its entries; None in a dry run, or if nothing can be written."""
    if is_dry_run():
        return None
    return AgentSink(worker) if worker is not None else FileSink.create()


def _new_name() -> str:
    """Return a name for this run after its script, as an agent would."""
    stem = Path(sys.argv[0] or "python").stem if sys.argv else "python"
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:32] or "run"
    return f"{slug}-{''.join(secrets.choice(_LETTERS) for _ in range(6))}"


def _start_entries() -> list[Entry]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name = platform.node()[:64]
    return [
        MachineFacts(
            b"", name, accelerator.type if accelerator is not None else "cpu", 0, platform.platform()[:200]
        ),
        RunStart(
            time.time(),
            shlex.join(["python", *sys.argv])[:4000],
            title=os.path.basename(sys.argv[0] if sys.argv else "")[:200],
            started_by=name,
            environment=(("python", platform.python_version()), ("torch", str(torch.__version__))),
        ),
    ]
