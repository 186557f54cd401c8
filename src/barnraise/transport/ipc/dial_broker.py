"""Broker that opens connections for processes without a network of their own.

It resolves names itself and dials only the addresses that it has judged. It never passes a socket to a place
that the rules do not name. Connections to other machines' listeners start with a preface for one worker, so
no other service of an agent can be reached through them. A machine says itself where its listener is, and may
lie. So the socket is passed only after a listener has answered the preface, and a failure says no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from barnraise.core.errors import BarnraiseError, ProtocolError, TransportError
from barnraise.transport.addresses import Where, network_of
from barnraise.transport.ipc.dial_request import (
    BROKER_NAME,
    DialDone,
    DialRefused,
    DialRequest,
    decode_dial,
    encode_dial,
)
from barnraise.transport.ipc.fd_passing import IpcChannel
from barnraise.transport.ipc.local_socket import is_same_user
from barnraise.transport.listener.preface import ANSWER_BYTES, parse_answer

if sys.platform != "win32":
    from barnraise.transport.ipc.local_socket import bind_unix

WEB_PORTS = frozenset({80, 443})
EVERYWHERE: frozenset[Where] = frozenset({"machine", "network", "internet"})
_MOST_REQUESTS = 64
_REQUEST_S = 10.0
_CONNECT_S = 10.0
_MOST_ADDRESSES = 4
_POLL_S = 0.01

_log = logging.getLogger(__name__)

Place = tuple[str, int]
Preface = Callable[[bytes, bool], bytes]


class DialRules(msgspec.Struct, frozen=True, kw_only=True):
    """Places that a process may reach.

    ``workers``: listeners of other machines, for their workers only. ``named``: places by name, with the
    networks that their addresses may be in. ``public_ports``: ports of any public address.
    """

    workers: frozenset[Place] = frozenset()
    named: Mapping[Place, frozenset[Where]] = {}
    public_ports: frozenset[int] = frozenset()


def choose_addresses(
    request: DialRequest, resolved: Sequence[str], rules: DialRules
) -> tuple[tuple[str, ...], str]:
    """Return the addresses that may be dialled, or none and the reason. Pure."""
    place = (request.host, request.port)
    where = f"{request.host}:{request.port}"
    if request.worker is not None:
        if place in rules.workers:
            return tuple(resolved[:_MOST_ADDRESSES]), ""
        return (), f"{where} is not a machine of this run"
    if place in rules.workers:
        return (), f"{where} is another machine's agent; only links between workers lead there"
    networks = rules.named.get(place)
    if networks is None and request.port in rules.public_ports:
        networks = frozenset[Where]({"internet"})
    if networks is None:
        ports = ", ".join(map(str, sorted(rules.public_ports)))
        return (), f"the sandbox does not permit {where}" + (
            f" (public addresses: ports {ports})" if ports else ""
        )
    allowed = tuple(address for address in resolved if network_of(address) in networks)[:_MOST_ADDRESSES]
    if resolved and not allowed:
        return (), f"{where} is in this machine's own network, which the sandbox does not permit"
    return allowed, "" if allowed else f"{request.host} has no address"


class DialBroker:
    """Broker at a socket file in ``directory``, between `start` and `close`.

    ``rules`` is called for each request. ``preface`` returns the first bytes for a worker.
    """

    def __init__(
        self, directory: Path, rules: Callable[[], DialRules], preface: Preface | None = None
    ) -> None:
        self.path = directory / BROKER_NAME
        self._rules = rules
        self._preface = preface
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Listen at the socket file; raise ListenerError if that fails."""
        self._loop = asyncio.get_running_loop()
        if sys.platform != "win32":
            self.path.unlink(missing_ok=True)
            self._socket = bind_unix(self.path)
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop to listen, and cancel the connections that are being opened."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                self.path.unlink()
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        if len(self._tasks) >= _MOST_REQUESTS or not is_same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(IpcChannel(connection)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, channel: IpcChannel) -> None:
        try:
            request = await asyncio.wait_for(self._receive(channel), _REQUEST_S)
            try:
                connection, address = await self._connect(request)
            except TransportError as error:
                channel.send(encode_dial(DialRefused(error.message)))
                return
            with connection:
                channel.send_socket(encode_dial(DialDone(address)), connection, 0)
        except (BarnraiseError, OSError) as error:  # a timeout is one, too
            _log.debug("a request to the broker failed: %s", error)
        finally:
            channel.close()

    async def _receive(self, channel: IpcChannel) -> DialRequest:
        while (delivery := channel.receive()) is None:
            if channel.closed:
                raise ConnectionResetError("closed by the process that asks")
            await self._readable(channel)
        return decode_dial(delivery.message)

    async def _connect(self, request: DialRequest) -> tuple[socket.socket, str]:
        """Return a connection and its address; raise TransportError if the rules or the network refuse."""
        where = f"{request.host}:{request.port}"
        addresses, reason = choose_addresses(request, await self._resolve(request), self._rules())
        for address in addresses:
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.wait_for(
                    self._loop.sock_connect(connection, (address, request.port)), _CONNECT_S
                )
                if request.worker is not None and self._preface is not None:
                    opening = self._preface(request.worker, request.plaintext)
                    await asyncio.wait_for(self._open_link(connection, opening), _CONNECT_S)
                return connection, address
            except (OSError, ProtocolError) as error:
                connection.close()
                if request.worker is not None:
                    reason = f"no listener of this run answers at {where}"
                else:
                    number = getattr(error, "errno", None)
                    cause = os.strerror(number) if number else "it does not answer in time"
                    reason = f"{where} cannot be reached: {cause}"
            except BaseException:
                connection.close()
                raise
        raise TransportError(reason)

    async def _open_link(self, connection: socket.socket, opening: bytes) -> None:
        """Send the preface, and wait for an answer that only a listener gives. The worker reads it again."""
        await self._loop.sock_sendall(connection, opening)
        answer = b""
        while len(answer) < ANSWER_BYTES:
            if answer:  # the rest of it is on the way, and what has arrived stays readable
                await asyncio.sleep(_POLL_S)
            await self._readable(connection)
            peeked = connection.recv(ANSWER_BYTES, socket.MSG_PEEK)
            if not peeked:
                raise ConnectionResetError("it closed the connection without an answer")
            answer = peeked
        parse_answer(answer)

    async def _readable(self, connection: socket.socket | IpcChannel) -> None:
        readable = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), readable.set_result, None)
        try:
            await readable
        finally:
            self._loop.remove_reader(connection.fileno())

    async def _resolve(self, request: DialRequest) -> list[str]:
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(request.host))]
        try:
            infos = await asyncio.wait_for(
                self._loop.getaddrinfo(request.host, request.port, type=socket.SOCK_STREAM), _CONNECT_S
            )
        except (OSError, UnicodeError) as error:
            raise TransportError(f"no address is known for {request.host}") from error
        return list(dict.fromkeys(str(info[4][0]) for info in infos))
