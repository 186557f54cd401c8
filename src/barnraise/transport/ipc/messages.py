"""Messages between processes of this machine and its listener. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.identity import WORKER_BYTES, WorkerCredentials

WorkerId = Annotated[bytes, Meta(min_length=WORKER_BYTES, max_length=WORKER_BYTES)]
RawNodeId = Annotated[bytes, Meta(min_length=32, max_length=32)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Generation = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RunName = Annotated[str, Meta(min_length=1, max_length=200)]
Version = Annotated[int, Meta(ge=1, le=65535)]
LARGEST_BODY = (1 << 20) - 1024  # of a question or an answer; with its envelope it fits into one message
Body = Annotated[bytes, Meta(max_length=LARGEST_BODY)]


class RegisterEndpoint(msgspec.Struct, frozen=True, tag="register", forbid_unknown_fields=True):
    """Registration of a worker, valid for as long as its connection is open."""

    run: RunName
    generation: Generation
    pid: Annotated[int, Meta(ge=1)]
    token: str = ""

    def __repr__(self) -> str:
        return f"Register(run={self.run!r}, generation={self.generation}, pid={self.pid})"


class ListenerStatus(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Request for the listener's status."""

    token: str = ""


class ListenerRequest(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True):
    """Request for the agent, which the listener passes on unread. Workers cannot send it."""

    question: Body
    token: str = ""

    def __repr__(self) -> str:
        return f"Ask({len(self.question)} bytes)"


class DialTicket(msgspec.Struct, frozen=True, tag="ticket"):
    """Everything that a worker needs to dial and to be dialled. None of it comes from a torch Store."""

    credentials: WorkerCredentials
    trusted: list[RawNodeId]
    secret: bytes
    run: str
    generation: Generation
    worker: WorkerId
    port: Port
    addresses: list[str]
    encryption: str
    listener_version: str

    def __repr__(self) -> str:
        return f"Ticket(run={self.run!r}, generation={self.generation}, worker={self.worker.hex()})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("run", self.run), ("worker", self.worker.hex())]


class ListenerStanding(msgspec.Struct, frozen=True, tag="standing"):
    """Response to a ListenerStatus request."""

    node: RawNodeId
    port: Port
    addresses: list[str]
    encryption: str
    workers: int
    pid: int
    listener_version: str
    agent: bool = False  # whether an agent serves it, so that questions are answered


class ListenerReply(msgspec.Struct, frozen=True, tag="told"):
    """Agent's response to ListenerRequest."""

    answer: Body


class IncomingConnection(msgspec.Struct, frozen=True, tag="incoming"):
    """Connection for this worker, with its socket. The worker answers the preface and does TLS."""

    worker: WorkerId
    peer_address: str
    version_min: Version
    version_max: Version
    plaintext: bool


class TrustUpdate(msgspec.Struct, frozen=True, tag="trust"):
    """Change of what a ticket said. The worker cuts its links to machines that are not trusted any more."""

    trusted: list[RawNodeId]
    secret: bytes

    def __repr__(self) -> str:
        return f"TrustUpdate({len(self.trusted)} machines)"


class RegistrationRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Rejection of a request. ``code``: code of the error behind it, if it was one of ours."""

    message: str
    hint: str
    code: str = ""


_UNREADABLE = "a local message cannot be read"
Request = RegisterEndpoint | ListenerStatus | ListenerRequest
Reply = DialTicket | ListenerStanding | ListenerReply | IncomingConnection | TrustUpdate | RegistrationRefused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode_message(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    return decode(_requests, data, _UNREADABLE)


def decode_reply(data: bytes) -> Reply:
    return decode(_replies, data, _UNREADABLE)
