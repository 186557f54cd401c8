"""Two sides of a pairing, connected by lists of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from barnraise.identity import NodeKey, Role, TrustLog
from barnraise.pairing import (
    Joiner,
    Offerer,
    PairingCode,
    PairingOffer,
    PairingPeer,
    PairingProven,
    PeerIntroduction,
    Psk,
)

CODE = PairingCode(7, ("crossover", "clockwork", "zebra"))
WRONG = PairingCode(7, ("crossover", "clockwork", "anchor"))
PC = PeerIntroduction("pc", "Windows 11", ("192.168.1.20", "fd00::20"), 52416)


@dataclass
class OwnerNode:
    """Owner with its cluster."""

    key: NodeKey = field(default_factory=NodeKey.generate)
    log: TrustLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = TrustLog.found(self.key, "mac")

    def offer(self, secret: PairingCode | Psk = CODE, role: Role = "owner", now: float = 0.0) -> PairingOffer:
        return PairingOffer(secret, role, key=self.key, name="mac", now=now)

    def taken(self, secret: PairingCode | Psk = CODE, role: Role = "owner") -> Offerer:
        return taken(self.offer(secret, role))

    def grant(self, offerer: Offerer, proven: PairingProven) -> bytes:
        """Grant the role, as an agent does after its cluster has decided."""
        entry = self.log.admit(self.key, proven.node, proven.role, proven.name)
        peers = [PairingPeer.of(self.key.id, ["192.168.1.10"], 52416)]
        data = offerer.grant(self.log, entry, peers)
        self.log = self.log.extended(entry)
        return data


def taken(offer: PairingOffer, now: float = 0.0) -> Offerer:
    offerer = offer.take(now)
    assert isinstance(offerer, Offerer), offerer
    return offerer


def joiner(secret: PairingCode | Psk = CODE, key: NodeKey | None = None, role: Role | None = None) -> Joiner:
    return Joiner(secret, key or NodeKey.generate(), PC, role=role)


def sent(data: bytes | None) -> bytes:
    assert data is not None
    return data


def proven(data: object) -> PairingProven:
    assert isinstance(data, PairingProven)
    return data


def to_proof(end: Joiner, offerer: Offerer) -> PairingProven:
    """Run both sides up to the decision."""
    hello = sent(end.begin().send)
    answer = sent(offerer.receive(hello).send)
    proof = sent(end.receive(answer).send)
    return proven(offerer.receive(proof).done)
