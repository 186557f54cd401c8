"""Server side of pairing: keeps the open code and pre-shared keys, and serves machines that join with them.

`cluster.join` is the client side; the protocol itself is in `barnraise.pairing`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable

from barnraise.agent.cluster.pairing_frames import STEP_S, receive_message, send_message
from barnraise.core.errors import BarnraiseError, PairingError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import Role, TrustLog
from barnraise.pairing import (
    Offerer,
    PairingAborted,
    PairingConfirmed,
    PairingOffer,
    PairingPeer,
    PairingProven,
    Psk,
    new_code,
    psk_preface_key,
)
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.preface import (
    PAIRING_KEY,
    Preface,
    encode_answer,
    negotiate,
    refuse_route,
    refuse_version,
)
from barnraise.transport.log_throttle import ThrottledLog

_HELLO_S = 2.0
_DECIDE_S = 40.0
_MAX_PAIRINGS = 8

_log = logging.getLogger(__name__)

# Has the cluster admit a machine; returns the new trust log and the addresses of all machines.
Admit = Callable[[PairingProven], Awaitable[tuple[TrustLog, list[PairingPeer]]]]


class PairingServer:
    """At most one open pairing code, any number of pre-shared keys, and the pairings in progress."""

    def __init__(self, key: NodeKey, name: Callable[[], str], admit: Admit) -> None:
        self._key = key
        self._name = name
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        # Called once for a code that was used up by a failed attempt, with the last address and the reason.
        self.on_burned: Callable[[str, str], None] = lambda address, why: None
        self.offer: PairingOffer | None = None
        self._burned: PairingOffer | None = None
        self.joined: NodeId | None = None  # the machine that used the newest code
        self._psks: list[PairingOffer] = []
        self._tasks: dict[asyncio.Task[None], Offerer] = {}
        self._active: set[Offerer] = set()  # those whose peer has sent a message
        self._refusals = ThrottledLog(_log, "no pairing with")

    def open_code(self, role: Role) -> PairingOffer:
        """Open a new code and withdraw the code that is open now."""
        if self.offer is not None:
            self.offer.withdraw()
        self.offer = PairingOffer(new_code(), role, key=self._key, name=self._name(), now=self._loop.time())
        self.joined = None
        return self.offer

    def use_psk(self, psk: Psk) -> None:
        """Admit every machine that has this pre-shared key, until the agent stops."""
        self._psks.append(
            PairingOffer(psk, psk.role, key=self._key, name=self._name(), now=self._loop.time())
        )

    @property
    def tags(self) -> frozenset[str]:
        """Return the discovery tags of all open offers."""
        return frozenset(offer.tag.hex() for offer in self._open())

    def key_for(self, target: bytes) -> bytes | None:
        """Return the preface key of the offer with this tag, or None if there is no such offer."""
        for offer in self._open():
            if offer.tag == target:
                return psk_preface_key(offer.secret) if isinstance(offer.secret, Psk) else PAIRING_KEY
        return None

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        """Start to pair with a machine that has connected, or return why it is refused."""
        if negotiate(preface.version_min, preface.version_max) is None:
            return ConnectionRefusal("no protocol version in common", refuse_version())
        if len(self._tasks) >= _MAX_PAIRINGS and not self._evict_silent():
            return ConnectionRefusal("too many pairings at once", refuse_route())
        for offer in self._open():
            if offer.tag == preface.target:
                offerer = offer.take(self._loop.time())
                if isinstance(offerer, Offerer):
                    task = self._loop.create_task(self._serve(connection, preface, address, offerer))
                    self._tasks[task] = offerer
                    task.add_done_callback(self._forget)
                    return None
        return ConnectionRefusal("no such offer is open", refuse_route())

    def close(self) -> None:
        """Cancel all pairings in progress."""
        for task in list(self._tasks):
            task.cancel()

    def _evict_silent(self) -> bool:
        """Cancel the oldest pairing whose peer has sent nothing; return False if there is none."""
        silent = next((task for task, offerer in self._tasks.items() if offerer not in self._active), None)
        if silent is None:
            return False
        self._forget(silent)
        silent.cancel()
        return True

    def _forget(self, task: asyncio.Task[None]) -> None:
        offerer = self._tasks.pop(task, None)
        if offerer is not None:
            self._active.discard(offerer)

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
                await self._exchange(connection, offerer)
            except PairingError as error:
                offerer.lost()  # an answered code cannot be used again, for any failure
                self._refusals.about(address, error.message)
            except (OSError, TimeoutError):
                self._refusals.about(address, offerer.lost().message)
            except asyncio.CancelledError:
                offerer.lost()
                raise
            finally:
                self._report_burned(address)

    def _report_burned(self, address: str) -> None:
        offer, now = self.offer, self._loop.time()
        if offer is not None and offer is not self._burned and offer.state(now) == "burned":
            self._burned = offer
            self.on_burned(address, offer.sentence(now))

    async def _exchange(self, connection: socket.socket, offerer: Offerer) -> None:
        timeout_s = _HELLO_S  # a silent peer must not block others
        while True:
            step = offerer.receive(await receive_message(connection, offerer.limit, timeout_s))
            timeout_s = STEP_S
            self._active.add(offerer)
            if step.send is not None:
                await send_message(connection, step.send)
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
            await send_message(connection, offerer.refuse("the cluster did not decide in time"))
            raise PairingError(f"cannot admit {proven.name}: the cluster did not decide in time") from error
        except BarnraiseError as error:
            await send_message(connection, offerer.refuse(error.message))
            raise PairingError(f"cannot admit {proven.name}: {error.message}", hint=error.hint) from error
        self.joined = proven.node
        await send_message(connection, answer)
