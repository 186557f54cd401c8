"""Rules about owners and modes on Unix, as ssh has them for keys: pure functions that return a reason.

Root counts as this user everywhere, because root can read and change all files anyway.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

_ROOT = 0
_SECRET = 0o077
_WRITABLE = 0o022


class PathFacts(NamedTuple):
    """Owner and mode of one path, as lstat returns them."""

    path: str
    owner: int
    group: int
    mode: int


class Refusal(NamedTuple):
    """Reason why a path is not private, and one action that fixes it."""

    reason: str
    hint: str


def refuse_directory(
    chain: Sequence[PathFacts], user: int, is_own_group: Callable[[int], bool], safe_place: str
) -> Refusal | None:
    """Return why another user can change this directory or put another one in its place; None if not.

    ``chain``: the directory itself, then its parents. ``is_own_group``: whether a group has no other member.
    ``safe_place``: a directory to suggest.
    """
    itself = chain[0]
    if itself.owner != user:
        return Refusal(
            f"the directory {itself.path} belongs to another user ({_user(itself.owner)})",
            f"Choose a directory inside {safe_place} (BARNRAISE_STATE_DIRECTORY).",
        )
    for facts in chain:
        if facts.owner not in (user, _ROOT):
            return Refusal(
                f"{facts.path}, above {itself.path}, belongs to another user ({_user(facts.owner)})",
                f"Choose a directory inside {safe_place} (BARNRAISE_STATE_DIRECTORY).",
            )
        if _others_may_write(facts, is_own_group) and not _keeps_entries(facts, is_itself=facts is itself):
            return Refusal(
                f"other users may write to the directory {facts.path} (mode {_mode(facts)})",
                f"Run `chmod go-w {facts.path}`. If other people use this machine, first look at the "
                f"files in {itself.path}.",
            )
    return None


def refuse_file(facts: PathFacts, user: int, *, is_secret: bool) -> Refusal | None:
    """Return why another user can change this file, or read it if it is a secret; None if not."""
    if not stat.S_ISREG(facts.mode):
        return Refusal(f"{facts.path} is not a file", "Move it away; a new one will be created.")
    if facts.owner not in (user, _ROOT):
        return Refusal(
            f"{facts.path} belongs to another user ({_user(facts.owner)})",
            "Move it away; do not use what another user has put there.",
        )
    if facts.mode & (_SECRET if is_secret else _WRITABLE):
        return Refusal(
            f"{facts.path} holds {'a secret' if is_secret else 'state'} and others may read or change it "
            f"(mode {_mode(facts)})",
            f"Run `chmod 600 {facts.path}`; if another user could have used it, make a new one.",
        )
    return None


def _others_may_write(facts: PathFacts, is_own_group: Callable[[int], bool]) -> bool:
    if stat.S_ISLNK(facts.mode):  # its mode means nothing; its owner was checked
        return False
    by_group = facts.mode & stat.S_IWGRP and not is_own_group(facts.group)
    return bool(facts.mode & stat.S_IWOTH or by_group)


def _keeps_entries(facts: PathFacts, *, is_itself: bool) -> bool:
    """Return True for a parent with the sticky bit: others cannot rename what belongs to us in it."""
    return not is_itself and bool(facts.mode & stat.S_ISVTX)


def _mode(facts: PathFacts) -> str:
    return f"{stat.S_IMODE(facts.mode):04o}"


def _user(number: int) -> str:
    return "root" if number == _ROOT else f"user id {number}"
