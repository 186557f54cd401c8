"""Journals: queues of a durable store that processes append to and read in one order. Pure.

A journal is the lobby namespace of its name. Its key ``ID`` holds a random id, and the queue of that name
holds the entries. The store takes entries for that queue only. A process that still appends to a deleted
journal gets an error, and never writes into its successor.
"""

from __future__ import annotations

import json
import re
from typing import Any

from barnraise.agent_client.kv_messages import (
    LOBBY,
    CompareAndSet,
    DropNamespace,
    GetKey,
    Operation,
    PushToQueue,
    ReadQueue,
    WatchKey,
)
from barnraise.core.errors import AgentError, ProtocolError
from barnraise.core.sanitize import printable
from barnraise.kvstore.store import StoreRules

ID = "id"
REOPEN = "Open the storage again. What this process has not finished is lost."
MAX_ENTRY_BYTES = 256 << 10
MAX_ENTRIES = 200_000
MAX_JOURNAL_BYTES = 32 << 20
MAX_JOURNALS = 16
MAX_ALL_BYTES = 128 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"[0-9a-f]{32}")
_DELETE = "delete one: barnraise.optuna.delete_storage(NAME)"

JOURNALS = StoreRules(
    noun="journal",
    is_durable=True,
    max_namespaces=MAX_JOURNALS,
    max_namespace_bytes=MAX_JOURNAL_BYTES,
    max_bytes=MAX_ALL_BYTES,
    max_value=MAX_ENTRY_BYTES,
    max_keys=8,
    max_queue=MAX_ENTRIES,
    free_namespaces=f"Use another journal, or {_DELETE}.",
    free_bytes=f"Start the next study in another journal, or {_DELETE}.",
    shorten="Write large values into a file, and only its path into the journal.",
    current_queue=ID,
    reopen=REOPEN,
)


def check_journal_name(name: str) -> str:
    """Return the name of a journal. Raise AgentError if it is not allowed."""
    if _NAME.fullmatch(name) is None:
        raise AgentError(
            f"{name[:80]!r} is not the name of a journal",
            hint="Use at most 64 letters, digits, points, hyphens and underscores. Begin with a letter.",
        )
    return name


def refuse_journal_operation(operation: Operation | WatchKey) -> str | None:
    """Return the reason why an operation is not one of a journal, or None if it is one."""
    scope = operation.scope
    if scope.generation != LOBBY or _NAME.fullmatch(scope.run) is None:
        return f"{scope.run[:80]!r} is not the name of a journal"
    match operation:
        case DropNamespace():
            return None
        case GetKey(key=key) if key == ID:
            return None
        case CompareAndSet(key=key, expected=b"", desired=desired) if key == ID:
            is_id = _ID.fullmatch(desired.decode("latin-1")) is not None
            return None if is_id else "the id of a journal has 32 hexadecimal digits"
        case PushToQueue(key=key) | ReadQueue(key=key) if _ID.fullmatch(key) is not None:
            return None
    return f"a journal has no operation {type(operation).__name__} with these keys"


def decode_entry(entry: bytes, name: str) -> dict[str, Any]:
    """Return an entry of the journal ``name``; raise ProtocolError if it is no JSON object."""
    problem = f"an entry of journal {name!r} cannot be read"
    try:
        # Optuna writes numbers that are not finite, which only this decoder of JSON accepts.
        log = json.loads(entry)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{problem}: {printable(str(error))}") from error
    if not isinstance(log, dict):
        raise ProtocolError(f"{problem}: it is no JSON object")
    return log
