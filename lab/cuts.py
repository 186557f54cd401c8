"""Cuts between hosts: nftables rules that drop without a word, where the receiving side can tell."""

from dataclasses import dataclass, field

from lab.hosts import Host
from lab.namespaces import nft

# Before anything else in the receiver, by the sender's MAC: ARP, multicast and IPv6 included.
_BY_SENDER = [
    "add table netdev cut",
    "add set netdev cut pairs { type ether_addr; }",
    "add chain netdev cut arriving { type filter hook ingress device eth0 priority 0; }",
    "add rule netdev cut arriving ether saddr @pairs drop",
]
# In the router, which alone sees both the inner address and the outer one.
_BY_PAIR = [
    "add table ip cut",
    "add set ip cut pairs { type ipv4_addr . ipv4_addr; }",
    "add chain ip cut through { type filter hook forward priority filter - 1; }",
    "add rule ip cut through ip saddr . ip daddr @pairs drop",
]


@dataclass(frozen=True)
class _Drop:
    namespace: str
    family: str
    element: str


@dataclass
class Cuts:
    """The cuts in force, and the namespaces that already have the table for them."""

    drops: dict[tuple[Host, Host], _Drop] = field(default_factory=dict)
    prepared: set[tuple[str, str]] = field(default_factory=set)

    def add(self, src: Host, src_router: Host | None, dst: Host, dst_router: Host | None) -> None:
        if (src, dst) in self.drops:
            return
        drop = _drop(src, src_router, dst, dst_router)
        lines = [f"add element {drop.family} cut pairs {{ {drop.element} }}"]
        if (drop.namespace, drop.family) not in self.prepared:
            lines = (_BY_SENDER if drop.family == "netdev" else _BY_PAIR) + lines
        nft(drop.namespace, lines)
        self.prepared.add((drop.namespace, drop.family))
        self.drops[src, dst] = drop

    def remove(self, src: Host, dst: Host) -> None:
        drop = self.drops.pop((src, dst), None)
        # Two hosts behind one router look alike from behind another: one element for both.
        if drop is not None and drop not in self.drops.values():
            nft(drop.namespace, [f"delete element {drop.family} cut pairs {{ {drop.element} }}"])

    def clear(self) -> None:
        for src, dst in list(self.drops):
            self.remove(src, dst)


def _drop(src: Host, src_router: Host | None, dst: Host, dst_router: Host | None) -> _Drop:
    if src_router is dst_router:
        return _Drop(dst.namespace, "netdev", src.mac)
    if dst_router is None:
        assert src_router is not None
        return _Drop(src_router.namespace, "ip", f"{src.address} . {dst.address}")
    seen = src.address if src_router is None else src_router.address
    return _Drop(dst_router.namespace, "ip", f"{seen} . {dst.address}")
