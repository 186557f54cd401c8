"""Notes of a Trainer: the part of its state that checkpoints contain and joining workers receive.

They describe the Trainer at the last commit. ``pending`` holds commits whose logging, evaluation and saving
are still to be done. A worker that gets the notes does that first, like the others.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Name = Annotated[str, Meta(max_length=200)]


class CommittedBatch(msgspec.Struct, frozen=True):
    """Numbers of one committed step. ``rate``: the learning rate that it was made with."""

    step: Count
    weight: float
    sums: Annotated[list[float], Meta(min_length=5, max_length=64)]
    norm: float
    rate: float


class TrainerNotes(msgspec.Struct, frozen=True):
    """State of a Trainer beside the model. Folders are named by their step only, never by a path."""

    global_step: Count = 0
    epoch: float = 0.0
    log_history: Annotated[list[dict[str, Any]], Meta(max_length=1 << 22)] = []
    best_metric: float | None = None
    best_global_step: Count | None = None
    total_flos: float = 0.0
    input_tokens: Count = 0
    trained_tokens: float = 0.0
    loss_unlogged: float = 0.0  # of the steps since the last log
    loss_logged: float = 0.0
    last_logged: Count = 0
    is_stopping: bool = False
    callbacks: Annotated[dict[Name, list[dict[str, Any]]], Meta(max_length=256)] = {}
    pending: Annotated[list[CommittedBatch], Meta(max_length=1 << 16)] = []


def encode_notes(notes: TrainerNotes) -> bytes:
    """Return the notes as bytes. NaN is kept."""
    return msgspec.msgpack.encode(notes, enc_hook=plain)


def decode_notes(content: bytes) -> TrainerNotes:
    """Decode another worker's notes. Raise ProtocolError if they cannot be read."""
    return decode(_notes, content, "another worker's notes of its Trainer cannot be read")


def check_attribute(name: str, value: Any, own: Any) -> Any:
    """Return another worker's value of a callback's attribute. Raise ProtocolError if it has another type.

    A number may replace None, as a best metric does, and None anything. Text is accepted only if it is equal
    here, because it could be the path of a file that the callback writes.
    """
    if value is None or value == own or (_has_type_of(own, value) and not _has_text(value)):
        return value
    raise ProtocolError(
        f"another worker's notes of its Trainer have {name} as {type(value).__name__}, and this worker has "
        f"{type(own).__name__}",
        hint="Leave it out of the attributes in the callback's state(), or store a number.",
    )


def _has_type_of(own: Any, value: Any) -> bool:
    if own is None or (isinstance(own, int | float) and not isinstance(own, bool)):
        return isinstance(value, int | float)
    return type(value) is type(own)


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_text(part) for part in value.values())
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str | bytes)


def plain(value: Any) -> Any:
    """Return a number of numpy or torch as a number; anything else by its text."""
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else str(value)
    except (ValueError, RuntimeError):  # an array of several numbers
        return str(value)


_notes = msgspec.msgpack.Decoder(TrainerNotes)
