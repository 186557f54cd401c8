"""Addresses, names and hardware of other machines, kept over a restart."""

from __future__ import annotations

import msgspec

from barnraise.agent.cluster.connections import PeerAddress
from barnraise.agent.protocol import PeerHello
from barnraise.identity import NodeId
from barnraise.membership.storage import MembershipStorage

_FACT = "places"
_SAVE_S = 2.0


class PeerInfo(msgspec.Struct, frozen=True, array_like=True):
    """Stored facts of one other machine."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    epoch: int = 1
    version: str = ""
    machine: bytes = b""
    paused: str = ""
    notifies: bool = False


class PeerStore:
    """Table of other machines; saved as one small record when it changed."""

    def __init__(self, storage: MembershipStorage) -> None:
        self._storage = storage
        self._dirty = False
        self._saved = float("-inf")
        saved = storage.fact(_FACT)
        self._known: dict[bytes, PeerInfo] = {}
        if saved is not None:
            try:
                self._known = msgspec.msgpack.decode(saved, type=dict[bytes, PeerInfo])
            except (msgspec.DecodeError, ValueError):
                pass  # not needed: discovery finds them again

    def __getitem__(self, node: NodeId) -> PeerInfo:
        return self._known.get(node.raw, PeerInfo())

    def nodes(self) -> list[NodeId]:
        """Return all machines of the table."""
        return [NodeId(raw) for raw in self._known]

    def address_of(self, node: NodeId) -> PeerAddress | None:
        """Return the stored addresses of a machine, or None."""
        known = self[node]
        return (
            PeerAddress(known.addresses, known.port, known.epoch) if known.addresses and known.port else None
        )

    def apply_hello(self, node: NodeId, hello: PeerHello, met_at: str) -> None:
        """Store what a machine says of itself; the address of its connection comes first."""
        addresses = tuple(dict.fromkeys((met_at, *hello.addresses)))[:8]
        info = PeerInfo(
            name=hello.name,
            addresses=addresses,
            port=hello.port,
            epoch=hello.epoch,
            version=hello.version,
            machine=hello.machine,
            paused=hello.paused,
            notifies=hello.notifies,
        )
        self._set(node, info)

    def add_hint(self, node: NodeId, addresses: tuple[str, ...], port: int, epoch: int) -> None:
        """Store addresses that another machine reported, unless some are known."""
        if self.address_of(node) is None and addresses:
            self._set(node, PeerInfo(addresses=addresses[:8], port=port, epoch=epoch))

    def keep_only(self, nodes: set[NodeId]) -> None:
        """Remove all machines but these."""
        if {NodeId(raw) for raw in self._known} - nodes:
            self._known = {raw: known for raw, known in self._known.items() if NodeId(raw) in nodes}
            self._save()

    def _set(self, node: NodeId, known: PeerInfo) -> None:
        if self._known.get(node.raw) != known:
            self._known[node.raw] = known
            self._dirty = True

    def flush(self, now: float) -> None:
        """Save changes, at most once every few seconds, because peers decide how often they change."""
        if self._dirty and now - self._saved > _SAVE_S:
            self._saved = now
            self._save()

    def _save(self) -> None:
        self._dirty = False
        self._storage.keep_fact(_FACT, msgspec.msgpack.encode(self._known))
