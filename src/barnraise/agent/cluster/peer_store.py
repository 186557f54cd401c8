"""What is worth knowing again after a restart: where the others were, and what they call themselves."""

from __future__ import annotations

import msgspec

from barnraise.agent.cluster.connections import PeerAddress
from barnraise.agent.protocol import PeerHello
from barnraise.identity import NodeId
from barnraise.membership.storage import MembershipStorage

_FACT = "places"
_SAVE_S = 2.0


class PeerInfo(msgspec.Struct, frozen=True, array_like=True):
    """One other machine."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    epoch: int = 1
    version: str = ""
    machine: bytes = b""


class PeerStore:
    """Kept on disk as one small fact, written only when something changed."""

    def __init__(self, storage: MembershipStorage) -> None:
        self._storage = storage
        self._dirty = False
        self._saved = float("-inf")
        kept = storage.fact(_FACT)
        self._known: dict[bytes, PeerInfo] = {}
        if kept is not None:
            try:
                self._known = msgspec.msgpack.decode(kept, type=dict[bytes, PeerInfo])
            except (msgspec.DecodeError, ValueError):
                pass  # comfort only: the others are found anew

    def __getitem__(self, node: NodeId) -> PeerInfo:
        return self._known.get(node.raw, PeerInfo())

    def nodes(self) -> list[NodeId]:
        return [NodeId(raw) for raw in self._known]

    def address_of(self, node: NodeId) -> PeerAddress | None:
        known = self[node]
        return (
            PeerAddress(known.addresses, known.port, known.epoch) if known.addresses and known.port else None
        )

    def apply_hello(self, node: NodeId, hello: PeerHello, met_at: str) -> None:
        """What it says of itself; the address at which we met comes first."""
        addresses = tuple(dict.fromkeys((met_at, *hello.addresses)))[:8]
        self._set(
            node,
            PeerInfo(hello.name, addresses, hello.port, hello.epoch, hello.version, hello.machine),
        )

    def add_hint(self, node: NodeId, addresses: tuple[str, ...], port: int, epoch: int) -> None:
        """What somebody else says of where it is."""
        if self.address_of(node) is None and addresses:
            self._set(node, PeerInfo(addresses=addresses[:8], port=port, epoch=epoch))

    def keep_only(self, nodes: set[NodeId]) -> None:
        if {NodeId(raw) for raw in self._known} - nodes:
            self._known = {raw: known for raw, known in self._known.items() if NodeId(raw) in nodes}
            self._save()

    def _set(self, node: NodeId, known: PeerInfo) -> None:
        if self._known.get(node.raw) != known:
            self._known[node.raw] = known
            self._dirty = True

    def flush(self, now: float) -> None:
        """Write what is new, but not more often than every few seconds: peers decide how often it changes."""
        if self._dirty and now - self._saved > _SAVE_S:
            self._saved = now
            self._save()

    def _save(self) -> None:
        self._dirty = False
        self._storage.keep_fact(_FACT, msgspec.msgpack.encode(self._known))
