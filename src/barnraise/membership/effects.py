"""What a member wants done: in the order given, the saving before the sending."""

from __future__ import annotations

from typing import NamedTuple

from barnraise.membership.messages import Message
from barnraise.membership.paxos import AcceptorState


class SaveState(NamedTuple):
    """Put this on disk, synced, before doing anything that follows.

    ``entries`` follow the first ``log_from`` of the kept trust log, and what it had beyond those is dropped;
    None leaves the log as it is.
    """

    record: AcceptorState
    log_from: int | None = None
    entries: tuple[bytes, ...] = ()


class SendMessage(NamedTuple):
    """To a peer, if there is a link; nothing is kept for later."""

    to: bytes
    message: Message


class ViewChanged(NamedTuple):
    """A new view or trust log is in force."""

    why: str


class LogNote(NamedTuple):
    """For the log and the display."""

    text: str


Effect = SaveState | SendMessage | ViewChanged | LogNote
