"""Notes of a Trainer: the part of its state that checkpoints contain and joining workers receive.

They describe the Trainer at the last commit. ``pending`` holds commits whose logging, evaluation and saving
are still to be done. A worker that gets the notes does that first, like the others.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode

Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Name = Annotated[str, Meta(max_length=200)]


class CommittedBatch(msgspec.Struct, frozen=True):
    """Numbers of one committed step. ``rate``: the learning rate that it was made with."""

    step: Count
    weight: float
    sums: Annotated[list[float], Meta(max_length=64)]
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
    return msgspec.msgpack.encode(notes, enc_hook=_plain)


def decode_notes(content: bytes) -> TrainerNotes:
    """Decode another worker's notes. Raise ProtocolError if they cannot be read."""
    return decode(_notes, content, "another worker's notes of its Trainer cannot be read")


def _plain(value: Any) -> Any:
    """Return a number of numpy or torch as a number; anything else by its text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


_notes = msgspec.msgpack.Decoder(TrainerNotes)
