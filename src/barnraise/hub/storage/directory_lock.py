"""Whose a hub's directory is: one process's at a time, and one run's for good.

Two processes would sweep each other's blobs. And what follows another hub follows that one only: versions of
two hubs have the same numbers and other bits, also if one of them took over from the other a little behind.
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
def held(directory: Path) -> Iterator[None]:
    """By this process alone. Whatever ends it, the system lets go."""
    lock = FileLock(private_directory(directory) / "hub.lock")
    if not lock.try_acquire():
        raise HubError(
            f"another process keeps the hub in {directory} already",
            hint="End that `barnraise hub up` or `barnraise hub follow` first; if it just ends, try again.",
        )
    try:
        yield
    finally:
        lock.release()


def read_facts(directory: Path) -> dict[str, bytes]:
    log = HubLog(private_directory(directory))
    try:
        return log.read().facts
    finally:
        log.close()


def check_hub(facts: Mapping[str, bytes], directory: Path) -> None:
    """HubError for a region: without its parent it would make versions of its own."""
    if PARENT in facts:
        raise HubError(
            f"{directory} is a region of another hub",
            hint="Go on with it by an invite of that hub: barnraise hub up --parent INVITE",
        )


def check_mirror(facts: Mapping[str, bytes], directory: Path, hub: NodeId) -> None:
    """HubError unless the directory is new, or has a copy of this very hub."""
    if SUCCEEDS in facts:
        raise HubError(
            f"the copy in {directory} took over: it is the run's hub now, and follows nobody",
            hint=f"Go on with it: barnraise hub up --no-train --name {directory.name}; or {_ELSEWHERE}",
        )
    if FOUNDING in facts and facts.get(FOLLOWS) != hub.raw:
        what = "a copy of another hub" if FOLLOWS in facts else "a hub of its own"
        raise HubError(f"there is {what} in {directory}", hint=f"To keep it, {_ELSEWHERE}")


def check_region(facts: Mapping[str, bytes], directory: Path, parent: NodeId) -> None:
    """HubError unless the directory is new, or has a region of this very parent."""
    if FOUNDING not in facts or facts.get(PARENT) == parent.raw:
        return
    if PARENT in facts:
        raise HubError(
            f"the region in {directory} is one of another hub",
            hint=f"If that hub was lost and another took over, begin anew as its members do: {_ELSEWHERE}",
        )
    raise HubError(f"there is no region in {directory}, but another hub", hint=f"To keep it, {_ELSEWHERE}")


_ELSEWHERE = "move that directory away, or name another one with --name."
