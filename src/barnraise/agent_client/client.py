"""A process's connection to the listener of its machine."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import TracebackType

from barnraise.core import errors
from barnraise.core.errors import AgentError, ListenerError, ProtocolError
from barnraise.transport.ipc.fd_passing import IpcChannel
from barnraise.transport.ipc.local_socket import dial_local
from barnraise.transport.ipc.messages import (
    LARGEST_BODY,
    DialTicket,
    IncomingConnection,
    ListenerReply,
    ListenerRequest,
    ListenerStanding,
    ListenerStatus,
    RegisterEndpoint,
    RegistrationRefused,
    Reply,
    Request,
    TrustUpdate,
    decode_reply,
    encode_message,
)


class ListenerClient:
    """Asks with a deadline first; after `register` it only receives, and never blocks."""

    def __init__(self, channel: IpcChannel, token: str, timeout: float = 5.0) -> None:
        self._channel = channel
        self._token = token
        self._timeout = timeout

    @classmethod
    def connect(cls, state_dir: Path, timeout: float = 5.0) -> ListenerClient:
        """Connect to the listener of a state directory. Raise ListenerError if none answers. ``timeout`` also
        limits each request.
        """
        connection, token = dial_local(state_dir, timeout)
        return cls(IpcChannel(connection, takes_sockets=True), token, timeout)

    def register(self, run: str, generation: int) -> DialTicket:
        """Enter as a worker. It stays registered until `close`, or until this process ends."""
        pid = os.getpid()
        reply = self._ask(RegisterEndpoint(run=run, generation=generation, pid=pid, token=self._token))
        if not isinstance(reply, DialTicket):
            raise ProtocolError(f"the listener answered {type(reply).__name__} instead of a ticket")
        self._channel.setblocking(False)
        return reply

    def standing(self) -> ListenerStanding:
        """Return the listener's state; only before `register`."""
        reply = self._ask(ListenerStatus(token=self._token))
        if not isinstance(reply, ListenerStanding):
            raise ProtocolError(f"the listener answered {type(reply).__name__} instead of its standing")
        return reply

    def ask(self, question: bytes, timeout: float) -> bytes:
        """Return the response of this machine's agent. Raise AgentError if there is no agent or it refuses.

        Call this only before `register`. After a timeout the connection is closed: a late response would
        confuse.
        """
        if len(question) > LARGEST_BODY:
            raise AgentError(
                f"a question of {len(question)} bytes is too long to ask", hint="Ask for less at once."
            )
        deadline = time.monotonic() + timeout
        try:
            self._channel.settimeout(timeout)
            self._channel.send(encode_message(ListenerRequest(question=question, token=self._token)))
            delivery = self._channel.receive(deadline)
        except TimeoutError as error:
            self.close()
            raise AgentError(
                f"the agent of this machine did not answer within {timeout:g} s",
                hint="Try again; if it stays silent, restart it: barnraise down, then barnraise up",
            ) from error
        except OSError as error:
            self.close()
            raise AgentError("the agent of this machine has stopped") from error
        if delivery is None:
            self.close()
            raise AgentError("the agent of this machine has stopped") from ConnectionResetError(
                "closed by it"
            )
        reply = _decode(delivery.message, delivery.socket)
        self._channel.settimeout(self._timeout)
        if isinstance(reply, RegistrationRefused):
            raise errors.by_code(reply.code, AgentError)(reply.message, hint=reply.hint)
        if not isinstance(reply, ListenerReply):
            self.close()
            raise ProtocolError(f"the agent answered {type(reply).__name__} instead of telling")
        return reply.answer

    def receive(self) -> tuple[IncomingConnection, socket.socket] | TrustUpdate | None:
        """Return a connection that was routed to this process, a change of trust, or None. Call until None
        whenever `fileno` is readable.

        Raise ListenerError once the listener is gone: existing links continue, new ones cannot arrive.
        """
        try:
            delivery = self._channel.receive()
        except OSError as error:
            raise _gone() from error
        if delivery is None:
            if self._channel.closed:
                raise _gone() from ConnectionResetError("closed by the listener")
            return None
        message = _decode(delivery.message, delivery.socket)
        if isinstance(message, TrustUpdate) and delivery.socket is None:
            return message
        if not isinstance(message, IncomingConnection) or delivery.socket is None:
            if delivery.socket is not None:
                delivery.socket.close()
            raise ProtocolError(f"the listener sent {type(message).__name__} unasked")
        delivery.socket.setblocking(False)
        return message, delivery.socket

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> ListenerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, question: Request) -> Reply:
        try:
            self._channel.send(encode_message(question))
            delivery = self._channel.receive()
        except TimeoutError as error:
            raise ListenerError("the listener does not answer in time", hint="Start it again.") from error
        except OSError as error:
            raise _gone() from error
        if delivery is None:
            raise _gone() from ConnectionResetError("closed by the listener")
        reply = _decode(delivery.message, delivery.socket)
        if isinstance(reply, RegistrationRefused):
            raise ListenerError(f"the listener refused: {reply.message}", hint=reply.hint)
        return reply


def _decode(message: bytes, attached: socket.socket | None) -> Reply:
    try:
        return decode_reply(message)
    except ProtocolError:
        if attached is not None:
            attached.close()
        raise


def _gone() -> ListenerError:
    return ListenerError("the listener of this machine has stopped", hint="Start the worker again.")
