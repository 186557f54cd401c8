"""Finds the other machines of the cluster, and a machine that offers to pair."""

from __future__ import annotations

import asyncio
import logging

from barnraise.agent.context import AgentContext
from barnraise.core.errors import BarnraiseError
from barnraise.discovery import UNTAGGED, Discovery, Sighting, namespace_tag
from barnraise.discovery.broadcast import BroadcastFinder
from barnraise.discovery.mdns import MdnsFinder
from barnraise.discovery.remembered import KnownAddress, RememberedFinder
from barnraise.discovery.static import StaticFinder
from barnraise.identity import NodeId

_log = logging.getLogger(__name__)


class PeerDiscovery:
    """Advertises this machine, watches for others, and dials them."""

    def __init__(self, agent: AgentContext) -> None:
        self._agent = agent
        network = agent.settings.network
        self._remembered = RememberedFinder()
        self.discovery = Discovery(
            [
                MdnsFinder(agent.own_addresses),
                BroadcastFinder(network.discovery_port, addresses=agent.own_addresses),
                StaticFinder(network.peers, network.port),
                self._remembered,
            ],
            addresses=agent.own_addresses,
        )
        self._tags: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._dialling: set[tuple[str, int]] = set()
        self._found_at: dict[tuple[str, int], NodeId] = {}
        self._wanted: tuple[str, asyncio.Future[Sighting]] | None = None

    async def start(self) -> None:
        """Start all discovery methods and dial the known machines."""
        await self.discovery.start(self._sighted)
        self.update_tags()
        self.remember()
        self.dial_all()

    async def stop(self) -> None:
        """Stop all discovery methods."""
        await self.discovery.stop()

    def forget(self) -> None:
        """Forget the machines of the old cluster."""
        self._found_at.clear()

    def update_tags(self) -> None:
        """Advertise the cluster's tag and open offers; watch the tags that members may still show."""
        agent = self._agent
        epochs = {agent.peer_store[node].epoch for node in agent.log.members if node != agent.me}
        secrets = {agent.log.secret} | {agent.secret_for(None, epoch) for epoch in epochs}
        watched = frozenset(map(namespace_tag, secrets))
        if self._wanted is not None:
            watched |= {self._wanted[0]}
        tags = (agent.pairing.tags | {namespace_tag(agent.log.secret)}, watched)
        if tags != self._tags:
            self._tags = tags
            self.discovery.watch(tags[1])
            self.discovery.advertise(tags[0], agent.listener.port)

    async def look_for(self, tag: str, patience_s: float) -> Sighting | None:
        """Return a sighting of a machine that shows this tag, or None after the timeout."""
        seen: asyncio.Future[Sighting] = asyncio.get_running_loop().create_future()
        self._wanted = (tag, seen)
        self.update_tags()
        self.discovery.refresh()
        try:
            return await asyncio.wait_for(seen, patience_s)
        except TimeoutError:
            return None
        finally:
            self._wanted = None
            self.update_tags()

    def dial_all(self) -> None:
        """Dial every machine of the cluster that is not connected and has a known address."""
        agent = self._agent
        for node in agent.log.members:
            place = agent.peer_store.address_of(node)
            if node != agent.me and place is not None and agent.connections.get(node) is None:
                agent.connections.learn(node, place)
                agent.connections.dial(node)

    def remember(self) -> None:
        """Search for disconnected machines at their last addresses, with backoff."""
        agent = self._agent
        places = [(node, agent.peer_store.address_of(node)) for node in agent.log.members if node != agent.me]
        self._remembered.remember(
            KnownAddress(node.raw.hex(), place.addresses, place.port)
            for node, place in places
            if place is not None
        )
        self._remembered.present(frozenset(node.raw.hex() for node in agent.connections.linked()))

    def _sighted(self, sighting: Sighting) -> None:
        if self._wanted is not None and sighting.tag == self._wanted[0]:
            if not self._wanted[1].done():
                self._wanted[1].set_result(sighting)
            return
        if sighting.source == self._remembered.name:
            self.dial_all()
            return
        agent = self._agent
        secrets = {namespace_tag(secret): secret for secret in agent.log.secrets}
        secret = agent.log.secret if sighting.tag == UNTAGGED else secrets.get(sighting.tag)
        where = (sighting.address, sighting.port)
        node = self._found_at.get(where)
        is_known = node is not None and agent.connections.get(node) is not None
        if secret is not None and where not in self._dialling and not is_known:
            self._dialling.add(where)
            agent.spawn(self._dial_sighting(where, secret, named=sighting.tag == UNTAGGED))

    async def _dial_sighting(self, where: tuple[str, int], secret: bytes, *, named: bool) -> None:
        try:
            self._found_at[where] = await self._agent.connections.dial_unknown(*where, secret, named=named)
        except BarnraiseError as error:
            _log.debug("%s is not of this cluster: %s", where, error.message)
        finally:
            self._dialling.discard(where)
