"""What agents say to each other about who is here."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.membership.paxos import (
    MOST_VOTERS,
    Count,
    Digest,
    PaxosAccept,
    PaxosAccepted,
    PaxosDecision,
    PaxosPrepare,
    PaxosPromise,
    PaxosReject,
    RawNode,
)
from barnraise.membership.view import IncarnationId, PresentMember

LogEntry = Annotated[bytes, Meta(max_length=4096)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """I am alive; this is what I hold and whom I miss. ``echo`` is the last serial I had from you."""

    me: PresentMember
    serial: Count
    echo: Count
    held_us: Count
    branch: Count
    number: Count
    view: Digest
    log_length: Annotated[int, Meta(ge=0, le=4096)]
    log_head: Digest
    leaving: bool = False
    suspects: Annotated[tuple[RawNode, ...], Meta(max_length=MOST_VOTERS)] = ()
    visitors: Annotated[tuple[PresentMember, ...], Meta(max_length=64)] = ()


class DecisionMessage(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """This was decided. ``log``: entries of the trust log from ``log_from`` on that you may lack."""

    decision: PaxosDecision
    log_from: Annotated[int, Meta(ge=0, le=4096)] = 0
    log: Annotated[tuple[LogEntry, ...], Meta(max_length=4096)] = ()


class CatchUpRequest(msgspec.Struct, frozen=True, array_like=True, tag="behind"):
    """I cannot follow: tell me the newest decision and the trust log from here on."""

    log_length: Annotated[int, Meta(ge=0, le=4096)]


class TrustProposal(msgspec.Struct, frozen=True, array_like=True, tag="wish"):
    """An owner's entry that wants a place in the trust log."""

    entry: LogEntry


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """I leave on purpose: let the next view be without me."""

    incarnation: IncarnationId


Message = (
    Heartbeat
    | DecisionMessage
    | CatchUpRequest
    | TrustProposal
    | Goodbye
    | PaxosPrepare
    | PaxosPromise
    | PaxosAccept
    | PaxosAccepted
    | PaxosReject
)
