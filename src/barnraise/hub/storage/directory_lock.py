"""Locks a hub directory to one process and checks that it belongs to the expected run.

Two processes would remove each other's blobs. A mirror or region belongs to one hub for good. Versions of two
hubs have the same numbers but different content, even if one hub took over from the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from barnraise.core.errors import HubError
from barnraise.core.file_lock import FileLock
from barnraise.hub.storage.create import FOLLOWS, FOUNDING, PARENT, SUCCEEDS
from barnraise.hub.storage.log import HubLog
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import private_directory


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock the directory for this process while the context is open.

    The system releases the lock if the process dies.
    """
    lock = FileLock(private_directory(directory) / "hub.lock")
    if not lock.try_acquire():
        raise HubError(
            f"another process already runs the hub in {directory}",
            hint="Stop that `barnraise hub up` or `barnraise hub follow` first, then try again.",
        )
    try:
        yield
    finally:
        lock.release()


def read_facts(directory: Path) -> dict[str, bytes]:
    """Return the facts in the log of this directory."""
    log = HubLog(private_directory(directory))
    try:
        return log.read().facts
    finally:
        log.close()


def check_hub(facts: Mapping[str, bytes], directory: Path) -> None:
    """Raise HubError for a region: without its parent it would make versions of its own."""
    if PARENT in facts:
        raise HubError(
            f"{directory} is a region of another hub",
            hint="Start it with an invite of that hub: `barnraise hub up --parent INVITE`.",
        )


def check_mirror(facts: Mapping[str, bytes], directory: Path, hub: NodeId) -> None:
    """Raise HubError unless the directory is new, or has a mirror of this hub."""
    if SUCCEEDS in facts:
        raise HubError(
            f"the mirror in {directory} has taken over and cannot follow a hub",
            hint=f"Start it: `barnraise hub up --no-train --name {directory.name}`; or {_ELSEWHERE}",
        )
    if FOUNDING in facts and facts.get(FOLLOWS) != hub.raw:
        what = "a mirror of another hub" if FOLLOWS in facts else "a hub of its own"
        raise HubError(f"there is {what} in {directory}", hint=f"To keep it, {_ELSEWHERE}")


def check_region(facts: Mapping[str, bytes], directory: Path, parent: NodeId) -> None:
    """Raise HubError unless the directory is new, or has a region of this parent."""
    if FOUNDING not in facts or facts.get(PARENT) == parent.raw:
        return
    if PARENT in facts:
        raise HubError(
            f"the region in {directory} belongs to another hub",
            hint=f"If that hub was lost and another took over, start again: {_ELSEWHERE}",
        )
    raise HubError(f"there is another hub in {directory}, not a region", hint=f"To keep it, {_ELSEWHERE}")


_ELSEWHERE = "move that directory away, or name another one with --name."
