"""Messages between agents about membership and consensus."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import (
    MOST_VOTERS,
    Count,
    Digest,
    PaxosAccept,
    PaxosAccepted,
    PaxosPrepare,
    PaxosPromise,
    PaxosReject,
    RawNode,
)
from barnraise.membership.view import IncarnationId, PresentMember

LogEntry = Annotated[bytes, Meta(max_length=4096)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sign of life with the sender's state and suspects.

    ``echo``: last serial received from the addressee.
    """

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
    """Decisions of the chain, each with its certificate, oldest first.

    ``log``: trust log entries from ``log_from`` on, for a node that knows no decision yet.
    """

    links: Annotated[tuple[CertifiedDecision, ...], Meta(min_length=1, max_length=4096)]
    log_from: Annotated[int, Meta(ge=0, le=4096)] = 0
    log: Annotated[tuple[LogEntry, ...], Meta(max_length=4096)] = ()


class CatchUpRequest(msgspec.Struct, frozen=True, array_like=True, tag="behind"):
    """Request for newer decisions.

    ``have``: digests of own decisions, newest first, with growing gaps; empty if there is none yet.
    """

    log_length: Annotated[int, Meta(ge=0, le=4096)]
    have: Annotated[tuple[Digest, ...], Meta(max_length=16)] = ()


class TrustProposal(msgspec.Struct, frozen=True, array_like=True, tag="wish"):
    """Trust log entry that an owner proposes."""

    entry: LogEntry


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """Announcement that the sender leaves on purpose."""

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
