"""Note of the last checkpoint and its holders, on machines that do not save it themselves.

After all workers died, such a machine knows which machines to wait for, instead of starting from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from barnraise.core.files import write_atomically
from barnraise.runs.checkpoint_manifest import Step
from barnraise.runs.record import Node, Version


class HolderNote(msgspec.Struct, frozen=True, array_like=True):
    """The newest step that was saved, and the machines that hold it; step 0: nothing was saved."""

    step: Step = 0
    holders: tuple[Node, ...] = ()
    generation: Version = 0  # in which it was saved


UNREADABLE = HolderNote(1)  # something was saved, but the holders are unknown


def write_note(path: Path, step: int, holders: Sequence[bytes], generation: int) -> None:
    """Write the note atomically."""
    content = msgspec.msgpack.encode(HolderNote(step, tuple(holders), generation))
    write_atomically(path, content, synced=True)


def read_note(path: Path) -> HolderNote:
    """Read the note from disk. Return `UNREADABLE` if it is damaged, which differs from a missing note."""
    try:
        return _notes.decode(path.read_bytes())
    except FileNotFoundError:
        return HolderNote()
    except (OSError, msgspec.DecodeError):
        return UNREADABLE


_notes = msgspec.msgpack.Decoder(HolderNote)
