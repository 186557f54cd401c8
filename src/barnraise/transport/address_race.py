"""Address race (happy eyeballs): dial all addresses of a machine and keep the nearest one."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

from barnraise.core.errors import BarnraiseError, HandshakeError, TransportError
from barnraise.transport.control.connection import OnClosed, OnMessage
from barnraise.transport.control.dial import (
    ControlConnection,
    DialOptions,
    dial_unopened,
    was_refused,
)

MOST_ADDRESSES = 8
_SAME_SHARE = 0.2  # a change must be worth it: figures of a home network wander by this much
_SAME_S = 0.0002
_STAGGER_S = 0.05
_GRACE_S = 0.5  # what slower addresses get once one was measured
_PINGS = 3


class TriedAddress(NamedTuple):
    """Address and its outcome: a round trip, an error, or nothing yet."""

    address: str
    rtt_s: float | None = None
    error: str | None = None


class AddressChoice(NamedTuple):
    """Address to use, and the reason."""

    address: str
    reason: str


def dialable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses worth dialling, in the given order. Pure.

    The addresses come from other machines: anything that is not the address of one machine is left out.
    127.0.1.1 is always left out, because some systems' host names resolve to it. Loopback is used only if
    nothing else is offered.
    """
    usable: dict[str, bool] = {}
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if address.is_unspecified or address.is_multicast or str(address) == "127.0.1.1":
            continue
        usable[str(address)] = address.is_loopback
    outside = [address for address, is_loopback in usable.items() if not is_loopback]
    return (outside or list(usable))[:MOST_ADDRESSES]


def choose(tried: list[TriedAddress], current: str | None = None) -> AddressChoice:
    """Return the address with the lowest round trip, or the current one if none is clearly nearer. Pure.

    Raise TransportError if none answered.
    """
    measured = [(attempt.rtt_s, attempt.address) for attempt in tried if attempt.rtt_s is not None]
    if not measured:
        problems = "; ".join(_problem(attempt) for attempt in tried) or "no address is known"
        raise TransportError(f"none of its addresses can be used: {problems}")
    rtt, address = min(measured, key=lambda entry: entry[0])
    kept = False
    for own, known in measured:
        if known == current and known != address and not _is_clearly_less(rtt, own):
            rtt, address, kept = own, known, True
    parts = [f"{address}: {_show(rtt)}" + (", in use" if address == current else "")]
    for attempt in tried:
        if attempt.address == address:
            continue
        if attempt.rtt_s is None:
            parts.append(_problem(attempt))
        elif kept and attempt.rtt_s < rtt:
            parts.append(f"{attempt.address} ({_show(attempt.rtt_s)}) is not enough faster to change")
        else:
            parts.append(f"{attempt.address} ({_show(attempt.rtt_s)}) is slower")
    return AddressChoice(address, "; ".join(parts))


async def dial_best(
    addresses: Iterable[str],
    port: int,
    options: DialOptions,
    *,
    on_message: OnMessage,
    on_closed: OnClosed,
    current: str | None = None,
) -> tuple[ControlConnection, AddressChoice]:
    """Dial the best of these addresses; the other side never sees the links that were not chosen.

    With ``current`` the link is new all the same, maybe over the address in use. Errors are those of
    `dial_unopened`. `was_refused` applies if an address was rejected and none answered in another way.
    """
    wanted = dialable(addresses)
    race = _Race(port, options)
    tasks = [
        asyncio.create_task(race.enter(address, place * _STAGGER_S)) for place, address in enumerate(wanted)
    ]
    try:
        await race.run(tasks)
        try:
            choice = choose(race.result(wanted), current)
        except TransportError as error:
            raise race.failure(error.message)  # noqa: B904  # it has a cause of its own
        link = race.links.pop(choice.address)
        link.begin(on_message, on_closed)
        return link, choice
    finally:
        for task in tasks:
            task.cancel()
        for other in race.links.values():
            other.close("another address was better")


class _Race:
    """Links to one agent over several addresses, until one is chosen."""

    def __init__(self, port: int, options: DialOptions) -> None:
        self._port = port
        self._options = options
        self._rtts: dict[str, float] = {}
        self._errors: dict[str, BarnraiseError] = {}
        self.links: dict[str, ControlConnection] = {}

    async def enter(self, address: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            link = self.links[address] = await dial_unopened(address, self._port, self._options)
            self._rtts[address] = min([await link.ping(self._options.timeout_s) for _ in range(_PINGS)])
        except BarnraiseError as error:
            self._errors[address] = error

    async def run(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until all are measured or have failed; after the first one, the rest get little time."""
        pending: set[asyncio.Task[None]] = set(tasks)
        while pending and not self._rtts:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE_S)

    def result(self, addresses: list[str]) -> list[TriedAddress]:
        return [
            TriedAddress(address, self._rtts.get(address), self._problem(address)) for address in addresses
        ]

    def failure(self, message: str) -> TransportError:
        """Return the most informative error. A rejection counts only if no address answered."""
        for error in self._errors.values():
            if isinstance(error, HandshakeError):
                return HandshakeError(message, hint=error.hint)
        failure = TransportError(message)
        for error in self._errors.values():
            if was_refused(error):
                failure = TransportError(message, hint=error.hint)
                failure.__cause__ = error.__cause__
        return failure

    def _problem(self, address: str) -> str | None:
        error = self._errors.get(address)
        return None if error is None else error.message


def _is_clearly_less(rtt_s: float, than_s: float) -> bool:
    gain = than_s - rtt_s
    return gain >= _SAME_S and gain >= _SAME_SHARE * than_s


def _problem(attempt: TriedAddress) -> str:
    if attempt.error is None:
        return f"{attempt.address} does not answer"
    # Errors of a dial name the address themselves.
    return attempt.error if attempt.address in attempt.error else f"{attempt.address}: {attempt.error}"


def _show(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
