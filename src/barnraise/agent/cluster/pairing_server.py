"""Moves the bytes of a pairing: serves machines that come with a code, and goes to one with a code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable

from barnraise.core.errors import BarnraiseError, PairingError
from barnraise.identity import NodeKey
from barnraise.identity.trust import Role, TrustLog
from barnraise.pairing import (
    Joiner,
    Offerer,
    PairingAborted,
    PairingCode,
    PairingConfirmed,
    PairingJoined,
    PairingOffer,
    PairingPeer,
    PairingProven,
    Psk,
    new_code,
    psk_preface_key,
)
from barnraise.transport.addresses import show_address
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.preface import (
    ANSWER_BYTES,
    PAIRING_KEY,
    ROUTE_PAIRING,
    Preface,
    PrefaceAnswer,
    encode,
    encode_answer,
    negotiate,
    parse_answer,
    refuse_route,
    refuse_version,
)
from barnraise.transport.log_throttle import ThrottledLog

_HELLO_S = 2.0
_STEP_S = 10.0
_DECIDE_S = 40.0
_GRANT_S = _DECIDE_S + 10.0
_CONNECT_S = 5.0
_KNOCKS = 4
_KNOCK_AGAIN_S = 0.7
_MOST_AT_ONCE = 8
_LENGTH = struct.Struct("<I")

_log = logging.getLogger(__name__)

# Has the cluster admit a machine; returns the log that does, and where its machines are.
Admit = Callable[[PairingProven], Awaitable[tuple[TrustLog, list[PairingPeer]]]]


class PairingServer:
    """At most one open code, and any pre-shared keys."""

    def __init__(self, key: NodeKey, name: Callable[[], str], admit: Admit) -> None:
        self._key = key
        self._name = name
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self.offer: PairingOffer | None = None
        self.guest_name = ""
        self._psks: list[PairingOffer] = []
        self._tasks: dict[asyncio.Task[None], Offerer] = {}
        self._spoken: set[Offerer] = set()
        self._complaints = ThrottledLog(_log, "no pairing with")

    def open_code(self, role: Role) -> PairingOffer:
        """A new code; an open one before it is withdrawn."""
        if self.offer is not None:
            self.offer.withdraw()
        self.offer = PairingOffer(new_code(), role, key=self._key, name=self._name(), now=self._loop.time())
        self.guest_name = ""
        return self.offer

    def use_psk(self, psk: Psk) -> None:
        """Admit whoever has it, until the agent ends."""
        self._psks.append(
            PairingOffer(psk, psk.role, key=self._key, name=self._name(), now=self._loop.time())
        )

    @property
    def tags(self) -> frozenset[str]:
        """What to advertise."""
        return frozenset(offer.tag.hex() for offer in self._open())

    def key_for(self, target: bytes) -> bytes | None:
        """The secret of the pairing route to this offer; None if there is no such offer."""
        for offer in self._open():
            if offer.tag == target:
                return psk_preface_key(offer.secret) if isinstance(offer.secret, Psk) else PAIRING_KEY
        return None

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        """A machine has come for an offer."""
        if negotiate(preface.version_min, preface.version_max) is None:
            return ConnectionRefusal("no protocol version in common", refuse_version())
        if len(self._tasks) >= _MOST_AT_ONCE and not self._make_room():
            return ConnectionRefusal("too many pairings at once", refuse_route())
        for offer in self._open():
            if offer.tag == preface.target:
                offerer = offer.take(self._loop.time())
                if isinstance(offerer, Offerer):
                    task = self._loop.create_task(self._serve(connection, preface, address, offerer))
                    self._tasks[task] = offerer
                    task.add_done_callback(self._left)
                    return None
        return ConnectionRefusal("no such offer is open", refuse_route())

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _make_room(self) -> bool:
        """The one that has waited longest without a word goes: it may be nobody, and the next may be true."""
        silent = next((task for task, offerer in self._tasks.items() if offerer not in self._spoken), None)
        if silent is None:
            return False
        self._left(silent)
        silent.cancel()
        return True

    def _left(self, task: asyncio.Task[None]) -> None:
        offerer = self._tasks.pop(task, None)
        if offerer is not None:
            self._spoken.discard(offerer)

    def _open(self) -> Iterable[PairingOffer]:
        now = self._loop.time()
        if self.offer is not None and self.offer.open_at(now):
            yield self.offer
        yield from self._psks

    async def _serve(
        self, connection: socket.socket, preface: Preface, address: str, offerer: Offerer
    ) -> None:
        with connection:
            try:
                version = negotiate(preface.version_min, preface.version_max)
                assert version is not None
                await self._loop.sock_sendall(connection, encode_answer(version))
                await self._talk(connection, offerer)
            except PairingError as error:
                offerer.lost()  # whatever was wrong, a code that was answered is spent
                self._complaints.about(address, error.message)
            except (OSError, TimeoutError):
                self._complaints.about(address, offerer.lost().message)
            except asyncio.CancelledError:
                offerer.lost()
                raise

    async def _talk(self, connection: socket.socket, offerer: Offerer) -> None:
        patience_s = _HELLO_S  # somebody who says nothing must not keep others from the desk
        while True:
            step = offerer.receive(await _receive(connection, offerer.limit, patience_s))
            patience_s = _STEP_S
            self._spoken.add(offerer)
            if step.send is not None:
                await _send(connection, step.send)
            match step.done:
                case PairingProven() as proven:
                    await self._decide(connection, offerer, proven)
                case PairingConfirmed():
                    return
                case PairingAborted():
                    raise PairingError(step.done.reason)
                case _:
                    pass

    async def _decide(self, connection: socket.socket, offerer: Offerer, proven: PairingProven) -> None:
        try:
            log, peers = await asyncio.wait_for(self._admit(proven), _DECIDE_S)
            answer = offerer.grant(log, None, peers)
        except TimeoutError as error:
            await _send(connection, offerer.refuse("the cluster did not decide in time"))
            raise PairingError(f"{proven.name} was not let in: the cluster did not decide in time") from error
        except BarnraiseError as error:
            await _send(connection, offerer.refuse(error.message))
            raise PairingError(f"{proven.name} was not let in: {error.message}", hint=error.hint) from error
        self.guest_name = proven.name
        await _send(connection, answer)


async def join_by(joiner: Joiner, secret: PairingCode | Psk, address: str, port: int) -> PairingJoined:
    """Go to the machine that offers, with the one guess that the code allows; PairingError if it fails."""
    where = show_address(address, port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for tries_left in reversed(range(_KNOCKS)):
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            try:
                answer = await _knock(connection, secret, address, port)
            except ConnectionResetError as error:
                # The guess is not spent yet: a crowd may have taken our place in the queue.
                if tries_left:
                    await asyncio.sleep(_KNOCK_AGAIN_S)
                    continue
                raise _unanswered(where, error) from error
            except (OSError, TimeoutError) as error:
                raise _unanswered(where, error) from error
            if answer.refusal is not None:
                raise PairingError(f"{where} does not take the code: {answer.refusal}")
            return await _exchange(connection, joiner)
    raise AssertionError("the last try has returned or raised")


async def _knock(
    connection: socket.socket, secret: PairingCode | Psk, address: str, port: int
) -> PrefaceAnswer:
    loop = asyncio.get_running_loop()
    key = psk_preface_key(secret) if isinstance(secret, Psk) else PAIRING_KEY
    async with asyncio.timeout(_CONNECT_S):
        await loop.sock_connect(connection, (address, port))
        knock = Preface(secret.tag, os.urandom(16), ROUTE_PAIRING)
        await loop.sock_sendall(connection, encode(knock, key))
        return parse_answer(await _receive_exactly(connection, ANSWER_BYTES))


def _unanswered(where: str, error: OSError) -> PairingError:
    return PairingError(
        f"{where} does not answer the code: {_words(error)}",
        hint="Look whether the code is still open there, and whether its firewall lets the port in.",
    )


async def _exchange(connection: socket.socket, joiner: Joiner) -> PairingJoined:
    step = joiner.begin()
    try:
        while True:
            if step.send is not None:
                await _send(connection, step.send)
            if isinstance(step.done, PairingJoined):
                with contextlib.suppress(OSError, TimeoutError):  # stay until it has our last word
                    await asyncio.wait_for(_receive_exactly(connection, 1), 1.0)
                return step.done
            step = joiner.receive(await _receive(connection, joiner.limit, _GRANT_S))
    except (OSError, TimeoutError) as error:
        raise joiner.lost() from error


async def _send(connection: socket.socket, message: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_STEP_S):
        await loop.sock_sendall(connection, _LENGTH.pack(len(message)) + message)


async def _receive(connection: socket.socket, limit: int, patience_s: float) -> bytes:
    async with asyncio.timeout(patience_s):
        (length,) = _LENGTH.unpack(await _receive_exactly(connection, _LENGTH.size))
        if length > limit:
            raise PairingError(f"a pairing message claims {length} bytes, at most {limit} fit here")
        return await _receive_exactly(connection, length)


async def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        data = await loop.sock_recv(connection, min(count - len(received), 1 << 16))
        if not data:
            raise ConnectionResetError("the other machine closed the connection")
        received += data
    return bytes(received)


def _words(error: OSError) -> str:
    return error.strerror or str(error) or "no answer in time"
