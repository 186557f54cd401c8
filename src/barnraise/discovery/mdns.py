"""Multicast DNS: announces this machine in the local network, and finds the others.

An advert holds a random name, this machine's addresses and port, and a tag.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable

import psutil
from zeroconf import BadTypeInNameException, Error, IPVersion, RecordUpdate, RecordUpdateListener, Zeroconf

# Exported, though not listed: what its own browser asks with, and what comes back.
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSQuestion  # type: ignore[attr-defined]  # isort: skip
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from barnraise.core.flow.events import Wakeup
from barnraise.core.flow.supervised_task import cancel_task
from barnraise.discovery.finder import OnSighting, Sighting, is_dialable, only_loopback
from barnraise.discovery.namespace import is_tag
from barnraise.transport.addresses import own_addresses

SERVICE = "_barnraise._tcp.local."
_GROUP = "224.0.0.251"
_TYPE_PTR = 12
_CLASS_IN = 1
_FLAGS_QUERY = 0
_POLL_S = 10.0
_QUERY_S = 60.0
# After a start or a refresh: one question to be answered to us alone, then one aloud, in case those answers
# do not reach us, then one more for machines that just started.
_FIRST_QUERIES = ((0.0, True), (1.0, False), (4.0, True))
_DEAF_AFTER_S = 6.0
_CLOSE_S = 3.0
_RESOLVE_MS = 1500
_MOST_RESOLVING = 8
_MOST_NAMES = 64
_MOST_ADDRESSES = 16

_log = logging.getLogger(__name__)


class MdnsFinder:
    """Advertises and browses on every usable interface, and follows interfaces that appear or vanish."""

    name = "mdns"
    finds_strangers = True

    def __init__(
        self, addresses: Callable[[], list[str]] = own_addresses, *, poll_s: float = _POLL_S
    ) -> None:
        self._addresses = addresses
        self._poll_s = poll_s
        self._on_sighting: OnSighting | None = None
        self._wakeup = Wakeup()
        self._task: asyncio.Task[None] | None = None
        self._side_tasks: set[asyncio.Future[object]] = set()
        # Random for each start, so that adverts of two days cannot be told to come from one machine.
        self._host = f"{secrets.token_hex(8)}.local."
        self._instances: dict[str, str] = {}
        self._tags: frozenset[str] = frozenset()
        self._port = 0
        self._watched: frozenset[str] = frozenset()
        self._zeroconf: AsyncZeroconf | None = None
        self._sockets: frozenset[tuple[str, str, int]] = frozenset()
        self._services: dict[str, AsyncServiceInfo] = {}
        self._loopback = False
        self._resolving: set[str] = set()
        self._queries: list[tuple[float, bool]] = []
        self._asked_at = float("-inf")
        self._advertised_at: float | None = None
        self._heard = False
        self._trouble: str | None = None

    async def start(self, on_sighting: OnSighting) -> None:
        self._on_sighting = on_sighting
        self._plan_queries()
        self._task = asyncio.create_task(self._keep(), name="discovery mdns")

    def advertise(self, tags: frozenset[str], port: int) -> None:
        self._tags, self._port = tags, port
        self._wakeup.wake()

    def watch(self, tags: frozenset[str]) -> None:
        added = tags - self._watched
        self._watched = tags
        if added and self._zeroconf is not None:
            # Answers from before the search for this tag are in the cache.
            cache = self._zeroconf.zeroconf.cache
            pointers = cache.async_all_by_details(SERVICE, _TYPE_PTR, _CLASS_IN)
            self._look_at({pointer.alias for pointer in pointers if isinstance(pointer, DNSPointer)})
            self.refresh()

    def refresh(self) -> None:
        self._plan_queries()
        self._wakeup.wake()

    def seen(self, tag: str) -> None:
        """Do nothing: mDNS has a slow pace of its own."""

    async def stop(self) -> None:
        await cancel_task(self._task)
        self._task = None
        await self._close()

    def health(self) -> str | None:
        if self._trouble is not None:
            return self._trouble
        advertised = self._advertised_at
        if advertised is not None and not self._heard and time.monotonic() - advertised > _DEAF_AFTER_S:
            return "no mDNS packet arrives, not even our own: a firewall here blocks UDP port 5353" + (
                " or Barnraise may not use the local network" if sys.platform == "darwin" else ""
            )
        return None

    async def _keep(self) -> None:
        while True:
            try:
                await self._tick()
                self._trouble = None
            except Exception as error:  # noqa: BLE001 - interfaces vanish in many ways; the loop outlives all
                self._trouble = _explain(error)
                _log.debug("mDNS does not work now: %s", error)
                await self._close()
            pause = self._poll_s
            if self._queries and self._zeroconf is not None:
                pause = min(pause, self._queries[0][0] - time.monotonic())
            await self._wakeup.sleep(pause)

    async def _tick(self) -> None:
        addresses = self._addresses()
        self._loopback = only_loopback(addresses)
        sockets = _multicast_places(addresses)
        if self._zeroconf is None or sockets != self._sockets:
            await self._close()
            self._open(sockets)
        assert self._zeroconf is not None
        await self._zeroconf.zeroconf.async_wait_for_start(timeout=_CLOSE_S)
        if not self._zeroconf.zeroconf.engine.senders:
            raise OSError("no interface of this machine accepts multicast")
        await self._advertise(self._zeroconf, addresses)
        now = time.monotonic()
        if self._queries and self._queries[0][0] <= now:
            _, alone = self._queries.pop(0)
            self._zeroconf.zeroconf.async_send(_question(alone))
            self._asked_at = now
        if not self._queries:
            self._queries = [(now + _QUERY_S, True)]

    def _open(self, sockets: frozenset[tuple[str, str, int]]) -> None:
        version = IPVersion.V6Only if all(":" in address for address, _, _ in sockets) else IPVersion.V4Only
        # One interface that refuses must not close the others.
        places = sorted(address for address, _, _ in sockets if _takes_multicast(address))
        if not places:
            raise OSError("no interface of this machine accepts multicast")
        self._zeroconf = AsyncZeroconf(interfaces=places, ip_version=version)
        self._sockets = sockets
        zeroconf = self._zeroconf.zeroconf
        zeroconf.async_add_listener(_Records(self._look_at), None)
        self._plan_queries()

    async def _advertise(self, zeroconf: AsyncZeroconf, addresses: list[str]) -> None:
        """Make the registered adverts equal to the wanted ones."""
        for tag in self._services.keys() - self._tags:
            info = self._services.pop(tag)
            # The name dies with the offer, so that a later one cannot be tied to it.
            self._instances.pop(tag, None)
            self._attend(await zeroconf.async_unregister_service(info))
        for tag in self._tags:
            info = self._info(tag, addresses)
            old = self._services.get(tag)
            if old is None:
                self._services[tag] = info
                # The random name needs no check against others, which would cost a second.
                self._attend(await zeroconf.async_register_service(info, cooperating_responders=True))
                self._advertised_at = self._advertised_at or time.monotonic()
            elif (old.port, sorted(old.parsed_addresses())) != (info.port, sorted(info.parsed_addresses())):
                self._services[tag] = info
                self._attend(await zeroconf.async_update_service(info))

    def _info(self, tag: str, addresses: list[str]) -> AsyncServiceInfo:
        name = self._instances.setdefault(tag, f"{secrets.token_hex(16)}.{SERVICE}")
        shown = list(dict.fromkeys(addresses))[:_MOST_ADDRESSES]
        return AsyncServiceInfo(
            SERVICE, name, self._port, properties={"t": tag}, server=self._host, parsed_addresses=shown
        )

    async def _close(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        self._services.clear()
        self._advertised_at, self._heard = None, False
        for task in list(self._side_tasks):
            task.cancel()
        if zeroconf is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await zeroconf.async_close()
            except Exception as error:  # noqa: BLE001 - sockets of an interface that is gone
                _log.debug("mDNS did not close cleanly: %s", error)

    def _plan_queries(self) -> None:
        # Several wishes in one second are one question.
        begin = max(time.monotonic(), self._asked_at + 1.0)
        self._queries = [(begin + after, alone) for after, alone in _FIRST_QUERIES]

    def _look_at(self, names: set[str]) -> None:
        """Report the machines behind these instances if their tags are searched."""
        zeroconf = self._zeroconf
        if zeroconf is None:
            return
        own = set(self._instances.values())
        self._heard = self._heard or bool(names)
        for name in sorted(names - own)[:_MOST_NAMES]:
            try:
                info = AsyncServiceInfo(SERVICE, name)
            except BadTypeInNameException:
                continue
            if info.load_from_cache(zeroconf.zeroconf):
                self._report(info)
            elif name not in self._resolving and len(self._resolving) < _MOST_RESOLVING:
                self._attend(asyncio.ensure_future(self._resolve(zeroconf.zeroconf, info)))

    async def _resolve(self, zeroconf: Zeroconf, info: AsyncServiceInfo) -> None:
        """Query the records that the advert left out."""
        self._resolving.add(info.name)
        try:
            if await info.async_request(zeroconf, _RESOLVE_MS):
                self._report(info)
        except (Error, OSError) as error:
            _log.debug("%s cannot be resolved: %s", info.name, error)
        finally:
            self._resolving.discard(info.name)

    def _report(self, info: AsyncServiceInfo) -> None:
        tag = (info.properties.get(b"t") or b"").decode("ascii", "replace")
        port = info.port
        if not is_tag(tag) or tag not in self._watched or not port or self._on_sighting is None:
            return
        for address in info.parsed_addresses()[:_MOST_ADDRESSES]:
            if is_dialable(address, loopback=self._loopback):
                self._on_sighting(Sighting(address, port, tag, self.name))

    def _attend(self, awaitable: Awaitable[object]) -> None:
        """Keep a reference to a background task until it is done."""
        task = asyncio.ensure_future(awaitable)
        self._side_tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[object]) -> None:
        self._side_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("mDNS could not announce: %s", task.exception())


class _Records(RecordUpdateListener):
    """Collector of instance names in received records, known or new."""

    def __init__(self, look_at: Callable[[set[str]], None]) -> None:
        super().__init__()
        self._look_at = look_at
        self._names: set[str] = set()

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        for update in records:
            record = update.new
            if record.is_expired(now):
                continue
            if isinstance(record, DNSPointer) and record.name.lower() == SERVICE:
                self._names.add(record.alias)
            elif record.name.lower().endswith(f".{SERVICE}"):
                self._names.add(record.name)
            elif isinstance(record, DNSAddress):
                services = zc.cache.async_entries_with_server(record.name)
                self._names.update(
                    service.name for service in services if service.name.endswith(f".{SERVICE}")
                )

    def async_update_records_complete(self) -> None:
        if self._names:
            names, self._names = self._names, set()
            self._look_at(names)


def _question(alone: bool) -> DNSOutgoing:
    """Build the query for all instances. ``alone``: ask for an answer by unicast."""
    question = DNSQuestion(SERVICE, _TYPE_PTR, _CLASS_IN)
    question.unicast = alone
    outgoing = DNSOutgoing(_FLAGS_QUERY)
    outgoing.add_question(question)
    return outgoing


def _multicast_places(addresses: list[str]) -> frozenset[tuple[str, str, int]]:
    """Return the (address, interface, index) triples to open sockets on; IPv6 only without IPv4.

    The index changes when an adapter is unplugged and returns with the same address. The kernel has then
    forgotten the group membership.
    """
    chosen = [address for address in addresses if ":" not in address] or addresses
    homes = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return frozenset((address, homes.get(address, ""), _number(homes.get(address, ""))) for address in chosen)


def _takes_multicast(address: str) -> bool:
    if ":" in address:
        return True  # joined by interface, which zeroconf looks up and forgives
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            group = socket.inet_aton(_GROUP) + socket.inet_aton(address)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    except OSError:
        return False
    return True


def _number(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        return 0  # Windows calls its interfaces by other names here


def _explain(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
    return f"multicast cannot be opened on UDP port 5353: {reason}"
