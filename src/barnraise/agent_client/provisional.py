"""Training without a quorum: a worker notes in its run's folder how far it came, its agent settles it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.files import write_atomically

_NOTE, _DROPPED = "provisional", "dropped"

Step = Annotated[int, Meta(ge=0, lt=10**12)]


class _Note(msgspec.Struct, frozen=True):
    began: Step
    done: Step


def note_steps(home: Path, began: int, done: int) -> None:
    """Record a step without a quorum; ``began``: last step that was agreed upon."""
    write_atomically(home / _NOTE, msgspec.json.encode(_Note(began, done)))


def settle_steps(home: Path, *, counts: bool) -> None:
    """Decide the provisional steps, once there is a quorum again."""
    with contextlib.suppress(FileNotFoundError):
        if counts:
            (home / _NOTE).unlink()
        else:
            (home / _NOTE).replace(home / _DROPPED)


def take_dropped(home: Path) -> int:
    """Return how many steps were dropped since the last call."""
    try:
        note = msgspec.json.decode((home / _DROPPED).read_bytes(), type=_Note)
        (home / _DROPPED).unlink()
    except (OSError, ValueError):
        return 0
    return max(0, note.done - note.began)
