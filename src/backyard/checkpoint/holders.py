"""Which step was saved last, and by which machines: what a member remembers that saves nothing itself.

After everybody died it knows for whom to wait, instead of beginning anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from backyard.core.whole_files import write_whole
from backyard.runs.checkpoints import Step
from backyard.runs.record import Node


class Saved(msgspec.Struct, frozen=True, array_like=True):
    step: Step = 0
    holders: tuple[Node, ...] = ()


def note_saved(path: Path, step: int, holders: Sequence[bytes]) -> None:
    write_whole(path, msgspec.msgpack.encode(Saved(step, tuple(holders))))


def read_saved(path: Path) -> Saved:
    """Of nothing, if there is no note that can be read."""
    try:
        return _notes.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return Saved()


_notes = msgspec.msgpack.Decoder(Saved)
