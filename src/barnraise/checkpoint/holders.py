"""Which step was saved last, and by which machines: what a member remembers that saves nothing itself.

After everybody died it knows for whom to wait, instead of beginning anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from barnraise.core.files import write_atomically
from barnraise.runs.checkpoint_manifest import Step
from barnraise.runs.record import Node, Version


class HolderNote(msgspec.Struct, frozen=True, array_like=True):
    """Of step 0: nothing was saved."""

    step: Step = 0
    holders: tuple[Node, ...] = ()
    generation: Version = 0  # in which it was


UNREADABLE = HolderNote(1)  # something was saved, and nobody here knows by whom


def note_saved(path: Path, step: int, holders: Sequence[bytes], generation: int) -> None:
    content = msgspec.msgpack.encode(HolderNote(step, tuple(holders), generation))
    write_atomically(path, content, synced=True)


def read_saved(path: Path) -> HolderNote:
    """`UNREADABLE` if there is a note that cannot be read: that is not the same as none."""
    try:
        return _notes.decode(path.read_bytes())
    except FileNotFoundError:
        return HolderNote()
    except (OSError, msgspec.DecodeError):
        return UNREADABLE


_notes = msgspec.msgpack.Decoder(HolderNote)
