"""Effects that a membership node asks for, in order: saving comes before sending."""

from __future__ import annotations

from typing import NamedTuple

from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import AcceptorState
from barnraise.membership.messages import Message


class SaveState(NamedTuple):
    """Request to write this to disk, synced, before the effects that follow.

    ``entries`` replace the stored trust log after its first ``log_from`` entries. If ``log_from`` is None,
    the log stays as it is. ``links`` replace the stored decisions from the number of the first one on, and
    ``removed`` are added to the removed machines.
    """

    record: AcceptorState
    log_from: int | None = None
    entries: tuple[bytes, ...] = ()
    links: tuple[CertifiedDecision, ...] = ()
    removed: frozenset[bytes] = frozenset()


class SendMessage(NamedTuple):
    """Request to send a message if there is a link; it is not queued for later."""

    to: bytes
    message: Message


class ViewChanged(NamedTuple):
    """Notice that a new view or trust log is in force."""

    why: str


class LogNote(NamedTuple):
    """Text for the log and the display."""

    text: str


Effect = SaveState | SendMessage | ViewChanged | LogNote
