"""Connections that another process opens for this one: the requests, and the side that asks.

A process in a sandbox has no network. A broker outside (`dial_broker`) decides which connections it may have,
opens them and passes their sockets.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, TransportError
from barnraise.transport.ipc.fd_passing import IpcChannel

if sys.platform != "win32":
    from barnraise.transport.ipc.local_socket import dial_unix

BROKER_NAME = "dial.sock"
BROKER_VARIABLE = "BARNRAISE_BROKER"  # environment variable with the path of the broker's socket
_ASK_S = 5.0
_TARGET_BYTES = 16


class DialRequest(msgspec.Struct, frozen=True, tag="dial", forbid_unknown_fields=True):
    """Request for a connection. ``worker``: of another machine; the broker then sends the preface."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    worker: Annotated[bytes, Meta(min_length=_TARGET_BYTES, max_length=_TARGET_BYTES)] | None = None
    plaintext: bool = False


class DialDone(msgspec.Struct, frozen=True, tag="done"):
    """The connection that was asked for, with its socket."""

    address: str


class DialRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The reason why there is no connection."""

    reason: str


DialReply = DialDone | DialRefused

_UNREADABLE = "a message of the broker cannot be read"
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[DialRequest] = msgspec.msgpack.Decoder(DialRequest)
_replies: msgspec.msgpack.Decoder[DialReply] = msgspec.msgpack.Decoder(DialReply)


def encode_dial(message: DialRequest | DialReply) -> bytes:
    return _encoder.encode(message)


def decode_dial(data: bytes) -> DialRequest:
    return decode(_requests, data, _UNREADABLE)


def open_connection(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a host: through the broker in a sandbox, directly elsewhere.

    Raise OSError if the host cannot be reached, TransportError if the broker refuses.
    """
    broker = os.environ.get(BROKER_VARIABLE)
    if not broker:
        return socket.create_connection((host, port), timeout_s)
    return open_by_broker(Path(broker), host, port, timeout_s)


def open_by_broker(path: Path, host: str, port: int, timeout_s: float) -> socket.socket:
    """Let the broker connect to a host; raise TransportError if it refuses or does not answer."""
    channel = ask_broker(path, DialRequest(host, port))
    try:
        channel.settimeout(timeout_s)
        connection = take_connection(channel)
    finally:
        channel.close()
    if connection is None:
        raise TransportError(f"the broker did not answer for {host}:{port}")
    connection.settimeout(timeout_s)
    return connection


def ask_broker(path: Path, request: DialRequest) -> IpcChannel:
    """Send a request to the broker; raise TransportError if the broker is gone.

    The caller closes the channel after `take_connection`.
    """
    if sys.platform == "win32":
        raise TransportError("there is no broker on Windows")
    else:
        try:
            channel = IpcChannel(dial_unix(path, _ASK_S), takes_sockets=True)
        except OSError as error:
            raise TransportError(f"the broker at {path} does not answer: {error.strerror}") from error
        try:
            channel.send(encode_dial(request))
        except OSError as error:
            channel.close()
            raise TransportError(f"the broker at {path} has stopped: {error.strerror}") from error
        return channel


def take_connection(channel: IpcChannel) -> socket.socket | None:
    """Return the connection that was asked for; None on a non-blocking channel without an answer yet.

    Raise TransportError with the broker's reason if there is no connection.
    """
    try:
        delivery = channel.receive()
    except TimeoutError as error:
        raise TransportError("the broker did not answer in time") from error
    if delivery is None:
        if channel.closed:
            raise TransportError("the broker closed the connection without an answer")
        return None
    reply = decode(_replies, delivery.message, _UNREADABLE)
    if isinstance(reply, DialRefused) or delivery.socket is None:
        if delivery.socket is not None:
            delivery.socket.close()
        if isinstance(reply, DialRefused):
            raise TransportError(reply.reason)
        raise ProtocolError("the broker sent no socket")
    return delivery.socket
