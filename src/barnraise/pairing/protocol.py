"""Pairing protocol: two sans-IO state machines that take bytes and return bytes, without socket or clock.

    joiner                              offerer
    Hello    versions, SPAKE2   ->
                                <-      Answer   version, SPAKE2        (the code is used up from here on)
    Proof    node, signature    ->                                      (encrypted, like all that follows)
                                <-      Grant    node, role, log, signature; or Refusal
    Done     head of the log    ->

The joiner proves first, so that a false offerer learns nothing about the cluster. The offerer sees a wrong
code as a message that it cannot decrypt. Every PairingError ends the protocol; the connection is then closed
without a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from barnraise.core.errors import PairingError, TrustError
from barnraise.core.sanitize import printable
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.identity.trust import Role, SignedEntry, TrustLog, decode_entry, encode_entry
from barnraise.pairing import messages
from barnraise.pairing.channel import TAG_OVERHEAD, PairingChannel, Side, SpakeExchange
from barnraise.pairing.code import PairingCode
from barnraise.pairing.messages import (
    PairingAnswer,
    PairingDone,
    PairingGrant,
    PairingHello,
    PairingPeer,
    PairingProof,
    PairingRefusal,
    PairingUnable,
)
from barnraise.pairing.psk import Psk


@dataclass(frozen=True)
class PairingProven:
    """Offerer's event: the joiner knew the code.

    The caller lets the cluster decide, then grants or refuses.
    """

    node: NodeId
    name: str
    platform: str
    addresses: tuple[str, ...]
    port: int
    role: Role


@dataclass(frozen=True)
class PairingJoined:
    """Joiner's event: it is a member of the cluster."""

    log: TrustLog
    role: Role
    offerer: NodeId
    offerer_name: str
    peers: tuple[PairingPeer, ...]


@dataclass(frozen=True)
class PairingConfirmed:
    """Offerer's event: the joiner has stored the log."""

    node: NodeId


@dataclass(frozen=True)
class PairingAborted:
    """Offerer's event: no common version. Send the bytes and close; the code is not used up."""

    reason: str


@dataclass(frozen=True, repr=False)
class PairingStep:
    """Outcome of a received message: bytes to send, an event, both or neither."""

    send: bytes | None = None
    done: PairingProven | PairingJoined | PairingConfirmed | PairingAborted | None = None


@dataclass(frozen=True)
class PeerIntroduction:
    """Name and addresses that a machine sends about itself."""

    name: str
    platform: str
    addresses: tuple[str, ...]
    port: int


class CodeGuess(Protocol):
    """Interface by which the offerer's protocol reports the outcome of the one guess to its offer."""

    def claim(self) -> None:
        """Use up the guess; raise PairingError if there is none."""

    def check(self) -> None:
        """Raise PairingError if there is no guess left."""

    def spoil(self) -> None:
        """Note that the message was not a guess."""

    def burn(self, why: str) -> None: ...

    def use(self, name: str) -> None: ...


class _Side(ABC):
    """One side of the protocol. Every error ends it, and a message that is too long is an error."""

    def __init__(self) -> None:
        self._over = False

    @property
    @abstractmethod
    def limit(self) -> int:
        """Return the most bytes that the next message may have."""

    def receive(self, data: bytes) -> PairingStep:
        """Handle a message of the other side. Raise PairingError if it ends the protocol."""
        if self._over:
            raise PairingError("a message came after the end of the pairing")
        try:
            if len(data) > self.limit:
                raise PairingError(f"a pairing message has {len(data)} bytes, at most {self.limit} fit here")
            return self._handle(data)
        except PairingError as error:
            self._end(error.message)
            raise

    @abstractmethod
    def _handle(self, data: bytes) -> PairingStep:
        """Handle a message of allowed length."""

    def _end(self, why: str) -> None:
        self._over = True


class Joiner(_Side):
    """Protocol of the machine that joins. One code, one connection, one guess: never retry with a code."""

    def __init__(
        self,
        secret: PairingCode | Psk,
        key: NodeKey,
        introduction: PeerIntroduction,
        *,
        role: Role | None = None,
    ) -> None:
        """Start a join with a code or a key.

        ``role``: the only role that the user agreed to, if any; a pre-shared key sets it.
        """
        super().__init__()
        self._secret = secret
        self._wanted = secret.role if isinstance(secret, Psk) else role
        self._key = key
        self._proof = PairingProof(
            node=key.id.raw,
            name=introduction.name,
            platform=introduction.platform,
            addresses=messages.dialable(introduction.addresses),
            port=introduction.port,
            signature=messages.NO_SIGNATURE,
        )
        # What the other side would not take is found here, before it costs the code.
        self._unsigned = messages.encode(self._proof, messages.PROOF_BYTES - TAG_OVERHEAD)
        self._exchange = SpakeExchange("joiner", secret.password, secret.tag)
        self._hello = b""
        self._channel: PairingChannel | None = None

    @property
    def limit(self) -> int:
        return messages.GRANT_BYTES if self._channel else messages.HELLO_BYTES

    @property
    def has_proved(self) -> bool:
        """Return True once the proof is made, from which a false offerer learns if its guess was right."""
        return self._channel is not None

    def begin(self) -> PairingStep:
        hello = PairingHello(versions=messages.VERSIONS, spake=self._exchange.message)
        self._hello = messages.encode(hello, messages.HELLO_BYTES)
        return PairingStep(send=self._hello)

    def _handle(self, data: bytes) -> PairingStep:
        return self._prove(data) if self._channel is None else self._finish(data, self._channel)

    def lost(self) -> PairingError:
        """Return the error for a connection that ended or timed out at this point."""
        self._over = True
        if self._channel is None:
            return PairingError(
                "the other machine did not answer the code",
                hint="Look whether the code is still open there; if not, run `barnraise pair` there again.",
            )
        if isinstance(self._secret, Psk):
            return PairingError(
                "the other machine ended the pairing: its pre-shared key differs, or it was stopped",
                hint="Compare the last eight characters of the key files on both machines.",
            )
        return PairingError(
            "the other machine ended the pairing: the code was wrong, or that machine was stopped",
            hint="The code is used up. Run `barnraise pair` there and type the new code here.",
        )

    def _prove(self, data: bytes) -> PairingStep:
        answer = messages.decode(data, PairingAnswer, PairingUnable, limit=messages.HELLO_BYTES)
        if isinstance(answer, PairingUnable):
            raise _no_version(answer.versions)
        if answer.version not in messages.VERSIONS:
            raise PairingError(f"the other machine chose version {answer.version}, which was not offered")
        key = self._exchange.finish(answer.spake)
        tag = self._secret.tag
        self._channel = channel = PairingChannel("joiner", key, tag=tag, hello=self._hello, answer=data)
        signature = self._key.sign(channel.to_sign("joiner", self._unsigned))
        proof = msgspec.structs.replace(self._proof, signature=signature)
        return PairingStep(send=channel.seal(messages.encode(proof, messages.PROOF_BYTES - TAG_OVERHEAD)))

    def _finish(self, data: bytes, channel: PairingChannel) -> PairingStep:
        plain = channel.open(data)
        if plain is None:
            raise PairingError(
                "the other machine's answer cannot be decrypted: it does not know the code",
                hint="Another machine may be answering. Run `barnraise pair` again and use `--at HOST`.",
            )
        grant = messages.decode(plain, PairingGrant, PairingRefusal, limit=messages.GRANT_BYTES)
        if isinstance(grant, PairingRefusal):
            raise PairingError(f"the other machine refused: {grant.reason}")
        _check_signature(channel, "offerer", grant, grant.node, self._key.id.raw)
        log = self._checked_log(grant)
        members = log.members
        self._over = True
        done = messages.encode(PairingDone(head=log.head), messages.DONE_BYTES - TAG_OVERHEAD)
        return PairingStep(
            send=channel.seal(done),
            done=PairingJoined(
                log=log,
                role=grant.role,
                offerer=NodeId(grant.node),
                offerer_name=grant.name,
                peers=tuple(peer for peer in grant.peers if peer.id in members),
            ),
        )

    def _checked_log(self, grant: PairingGrant) -> TrustLog:
        try:
            log = TrustLog.read(decode_entry(entry) for entry in grant.log)
        except TrustError as error:
            raise PairingError(f"the cluster's trust log is not valid: {error.message}") from error
        if log.role(NodeId(grant.node)) != "owner":
            raise PairingError("the other machine is not an owner of the cluster that it offers")
        if log.role(self._key.id) != grant.role:
            raise PairingError("the trust log does not admit this machine in the role that was granted")
        if self._wanted is not None and grant.role != self._wanted:
            raise PairingError(f"the other machine grants the role {grant.role}, not {self._wanted}")
        return log


class Offerer(_Side):
    """Protocol of the machine that admits another; `PairingOffer.take` makes one for each connection."""

    def __init__(
        self, secret: PairingCode | Psk, role: Role, key: NodeKey, name: str, guess: CodeGuess
    ) -> None:
        super().__init__()
        self._secret = secret
        self._role: Role = role
        self._key = key
        self._name = name
        self._guess = guess
        self._channel: PairingChannel | None = None
        self._proven: PairingProven | None = None
        self._granted: bytes | None = None

    @property
    def limit(self) -> int:
        if self._channel is None:
            return messages.HELLO_BYTES
        return messages.PROOF_BYTES if self._proven is None else messages.DONE_BYTES

    def begin(self) -> PairingStep:
        """Return the bytes to send first: none, since the joiner starts."""
        return PairingStep()

    def _handle(self, data: bytes) -> PairingStep:
        if self._channel is None:
            return self._answer(data)
        if self._proven is None:
            return self._verify(data, self._channel)
        return self._confirm(data, self._channel, self._proven)

    def grant(self, log: TrustLog, entry: SignedEntry | None, peers: Iterable[PairingPeer]) -> bytes:
        """Return the answer to a proven joiner, after the cluster has decided.

        ``entry``: the admission, if it is next in ``log`` but not in it yet.
        """
        channel, proven = self._deciding()
        if entry is not None and entry.index == len(log):
            log = log.extended(entry)
        if log.role(self._key.id) != "owner":
            raise PairingError(
                "this machine is not an owner of the cluster any more and cannot admit machines"
            )
        role = log.role(proven.node)
        if role is None:
            raise PairingError("the cluster's trust log does not admit the machine that joins")
        if role != self._role:
            raise PairingError(
                f"{proven.name} is in this cluster already, as {role}; the code is for the role {self._role}",
                hint="A role cannot change: unpair the machine, run `barnraise leave` on it, pair it again.",
            )
        grant = PairingGrant(
            node=self._key.id.raw,
            name=self._name,
            role=role,
            log=tuple(map(encode_entry, log.entries)),
            peers=tuple(peers)[: messages.MOST_PEERS],
            signature=messages.NO_SIGNATURE,
        )
        limit = messages.GRANT_BYTES - TAG_OVERHEAD
        plain = messages.encode(grant, limit)
        signature = self._key.sign(channel.to_sign("offerer", plain, proven.node.raw))
        signed = messages.encode(msgspec.structs.replace(grant, signature=signature), limit)
        self._granted = log.head
        return channel.seal(signed)

    def refuse(self, reason: str) -> bytes:
        """Return the message that rejects a proven joiner; the code stays used up."""
        channel, _ = self._deciding()
        self._over = True
        shown = printable(reason, instead=" ")[: messages.LONGEST_TEXT]
        refusal = PairingRefusal(reason=shown)
        return channel.seal(messages.encode(refusal, messages.GRANT_BYTES - TAG_OVERHEAD))

    def lost(self) -> PairingError:
        """Return the error for a connection that ended or timed out at this point."""
        proven, granted = self._proven, self._granted
        self._end("the other machine left before it had proved that it knows the code")
        if proven is None:
            return PairingError("the other machine left before it had proved that it knows the code")
        if granted is None:
            return PairingError(f"{proven.name} left before the cluster had decided")
        return PairingError(
            f"{proven.name} is admitted, but did not confirm it",
            hint=f"If {proven.name} does not appear, pair it again: it keeps its role.",
        )

    def _answer(self, data: bytes) -> PairingStep:
        self._guess.check()
        try:
            hello = messages.decode(data, PairingHello, limit=messages.HELLO_BYTES)
            common = set(hello.versions) & set(messages.VERSIONS)
            if not common:
                self._over = True
                unable = messages.encode(PairingUnable(versions=messages.VERSIONS), messages.HELLO_BYTES)
                return PairingStep(send=unable, done=PairingAborted(_no_version(hello.versions).message))
            exchange = SpakeExchange("offerer", self._secret.password, self._secret.tag)
            key = exchange.finish(hello.spake)
        except PairingError:
            self._guess.spoil()
            raise
        answer = messages.encode(
            PairingAnswer(version=max(common), spake=exchange.message), messages.HELLO_BYTES
        )
        self._guess.claim()
        self._channel = PairingChannel("offerer", key, tag=self._secret.tag, hello=data, answer=answer)
        return PairingStep(send=answer)

    def _verify(self, data: bytes, channel: PairingChannel) -> PairingStep:
        plain = channel.open(data)
        if plain is None:
            if isinstance(self._secret, Psk):
                raise PairingError("a machine came with another pre-shared key")
            raise PairingError(
                "a machine tried a wrong code",
                hint="If that was a typing error, run `barnraise pair` again; if not, another machine tried.",
            )
        proof = messages.decode(plain, PairingProof, limit=messages.PROOF_BYTES)
        _check_signature(channel, "joiner", proof, proof.node)
        if proof.node == self._key.id.raw:
            raise PairingError(
                f"{proof.name} has the same node key as this machine",
                hint="Its disk was cloned. Run `barnraise leave` on one of the two: it gets a new id.",
            )
        self._guess.use(proof.name)
        self._proven = PairingProven(
            node=NodeId(proof.node),
            name=proof.name,
            platform=proof.platform,
            addresses=proof.addresses,
            port=proof.port,
            role=self._role,
        )
        return PairingStep(done=self._proven)

    def _confirm(self, data: bytes, channel: PairingChannel, proven: PairingProven) -> PairingStep:
        if self._granted is None:
            raise PairingError(f"{proven.name} sent a message before the answer")
        plain = channel.open(data)
        if plain is None:
            raise PairingError(f"the last message of {proven.name} cannot be decrypted")
        if messages.decode(plain, PairingDone, limit=messages.DONE_BYTES).head != self._granted:
            raise PairingError(f"{proven.name} confirms another trust log than it was sent")
        self._over = True
        return PairingStep(done=PairingConfirmed(proven.node))

    def _deciding(self) -> tuple[PairingChannel, PairingProven]:
        """Check that a proof has come and no grant was sent; anything else is a bug of ours."""
        assert self._channel is not None, "no message has come yet"
        assert self._proven is not None, "no proof has come yet"
        assert self._granted is None, "it was granted already"
        return self._channel, self._proven

    def _end(self, why: str) -> None:
        super()._end(why)
        if self._channel is not None and self._proven is None:
            self._guess.burn(why)


def _check_signature(
    channel: PairingChannel, by: Side, message: PairingProof | PairingGrant, signer: bytes, *more: bytes
) -> None:
    """Verify that the node key took part in this very exchange and signed these values."""
    unsigned = msgspec.structs.replace(message, signature=messages.NO_SIGNATURE)
    plain = messages.encode(unsigned, messages.GRANT_BYTES)
    try:
        public = Ed25519PublicKey.from_public_bytes(signer)
        public.verify(message.signature, channel.to_sign(by, plain, *more))
    except (InvalidSignature, ValueError) as error:
        raise PairingError("the other machine does not hold the node key that it names") from error


def _no_version(theirs: Iterable[int]) -> PairingError:
    return PairingError(
        f"there is no common pairing version: here {_listed(messages.VERSIONS)}, there {_listed(theirs)}",
        hint="Install a newer Barnraise on the older machine. The code is still good until it expires.",
    )


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(versions))))
