"""Optuna on several machines without a database: a storage whose journal the agents of the cluster keep.

``barnraise.optuna.storage()`` works in a run, and in plain Python on a machine with an agent. Optuna decides
everything by the order of the entries in its journal. An entry takes effect when it is on the disks of a
quorum, and every machine reads the same entries in the same order.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from barnraise.agent_client.bootstrap import standing_of
from barnraise.agent_client.kv_client import KvClient, agent_at
from barnraise.agent_client.kv_messages import LOBBY, Namespace
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import AgentError, RunError
from barnraise.kvstore.journals import ID, REOPEN, check_journal_name, decode_entry

try:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import BaseJournalBackend
except ModuleNotFoundError as _error:
    raise RunError(
        f"Optuna cannot be imported: there is no module {_error.name}",
        hint="Install `optuna` 4.0 or later on each machine, or add it to the environment of the folder.",
    ) from _error

TIMEOUT_S = 60.0


def storage(name: str = "default", *, timeout_s: float = TIMEOUT_S) -> JournalStorage:
    """Return Optuna's storage over the journal ``name`` of this machine's cluster.

    ``timeout_s``: seconds that one request waits for a quorum of the machines. After that it raises
    MembershipError, which names the machines that are missing. Raise AgentError if no agent serves this
    machine.
    """
    return JournalStorage(AgentJournal(_directory(), name, timeout_s))


def delete_storage(name: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Delete the journal ``name`` with all its studies on all machines; return False if there was none.

    This cannot be undone. Processes that still use it get an AgentError.
    """
    client = _client(_directory(), name, timeout_s)
    exists = client.get(ID) is not None
    client.drop()
    client.close()
    return exists


class AgentJournal(BaseJournalBackend):  # type: ignore[misc, unused-ignore] # Any where optuna is missing
    """Optuna's journal in the replicated store of the agents.

    ``directory``: the state directory of this machine's agent, or the local interface of a run.
    """

    def __init__(self, directory: Path, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self._arguments = (directory, name, timeout_s)
        self._name = name
        self._client = _client(directory, name, timeout_s)
        self._queue = ""
        self._entries_read = 0

    def __reduce__(self) -> tuple[Callable[..., AgentJournal], tuple[Path, str, float]]:
        """Copy only what another process needs to open the same journal."""
        return AgentJournal, self._arguments

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries in order; each is on the disks of a quorum when the call returns."""
        entries = [json.dumps(log, separators=(",", ":")).encode() for log in logs]
        queue = self._open()
        for entry in entries:
            count = self._client.push(queue, entry)
            if count <= self._entries_read:
                raise self._deleted(count - 1)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Return the entries from this number on, up to at least the last one that was committed before."""
        if log_number_from == 0:
            self._queue = ""  # another process may have deleted the journal before the first entry was read
        queue, start = self._open(), log_number_from
        while True:
            entries, count = self._client.read_queue(queue, start)
            self._entries_read = start
            if count < start:
                raise self._deleted(count)
            for entry in entries:
                yield decode_entry(entry, self._name)
            start += len(entries)
            if start >= count:
                self._entries_read = start
                return

    def _deleted(self, count: int) -> AgentError:
        return AgentError(
            f"journal {self._name!r} has {count} entries, but this process has read {self._entries_read}: "
            "it was deleted, or the machines with its newest entries were removed",
            hint=REOPEN,
        )

    def _open(self) -> str:
        """Return the name of the journal's queue; the first process of all chooses it."""
        if not self._queue:
            queue = self._client.get(ID) or self._client.compare_set(
                ID, b"", secrets.token_bytes(16).hex().encode()
            )
            self._queue = queue.decode()
        return self._queue


def _directory() -> Path:
    """Return the state directory. Raise AgentError if no agent serves this machine."""
    directory = state_directory(load_settings())
    if not os.environ.get("BARNRAISE_LAUNCHED"):  # an agent has started the process otherwise
        standing = standing_of(directory)
        if standing is None or not standing.agent:
            raise AgentError("no agent keeps journals on this machine", hint="Start it: barnraise up")
    return directory


def _client(directory: Path, name: str, timeout_s: float) -> KvClient:
    scope = Namespace(check_journal_name(name), LOBBY)
    return KvClient(agent_at(directory), scope, timeout_s, durable=True)
