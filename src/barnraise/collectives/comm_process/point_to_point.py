"""Point-to-point messages of one group: offers, matching by source and tag, credits. No I/O.

Small messages are sent with their offer and wait at the receiver, within a credit. Large messages wait at
the sender until the receiver has memory for them. So a message without a matching receive never blocks a
link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from barnraise.collectives.messages import Failure, ReceiveFrom, SendTo
from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import EAGER_BYTES, MAX_PAYLOAD, FrameHeader, FrameKind

EAGER_CREDIT = 32  # small messages a sender may have waiting at one receiver
MAX_OFFERS = 65536
_SIZE_BYTES = 8
_NO_PARTNER = "found no partner in time"
_UNDER_WAY = "did not end in time, its bytes are on the way"
_NO_MESSAGE = "received no message in time; the group continues"

Control = Callable[[int, FrameHeader, bytes], None]  # peer, header, payload
Bulk = Callable[[int, FrameHeader, memoryview, "OutgoingMessage"], None]


@dataclass(slots=True)
class OutgoingMessage:
    """A send in progress, done when ``frames_left`` is zero."""

    command: SendTo
    memory: memoryview
    deadline: float
    frames_left: int = 0
    started: bool = False


@dataclass(slots=True)
class IncomingMessage:
    """A posted receive, later bound to an offer."""

    command: ReceiveFrom
    memory: memoryview
    deadline: float
    fails_alone: bool
    source: int = -1
    left: int = 0

    def has_expired_alone(self, now: float) -> bool:
        return self.fails_alone and now >= self.deadline


@dataclass(slots=True)
class MessageOffer:
    """A message that a peer offers or, with ``data``, has sent."""

    source: int
    identifier: int
    tag: int
    dtype: int
    size: int
    data: bytes | None


@dataclass(slots=True)
class PointToPoint:
    """State of all point-to-point traffic of one group."""

    group: int
    control: Control
    bulk: Bulk
    finish: Callable[[int, int], None]  # operation, source
    mismatch: Callable[[str], None]
    posted: list[IncomingMessage] = field(default_factory=list)
    offers: list[MessageOffer] = field(default_factory=list)
    sending: dict[int, OutgoingMessage] = field(default_factory=dict)
    receiving: dict[tuple[int, int], IncomingMessage] = field(default_factory=dict)
    eager_out: dict[int, int] = field(default_factory=dict)  # by receiver: messages that wait there
    eager_in: dict[int, int] = field(default_factory=dict)  # by sender: messages that wait here
    next_identifier: int = 0

    def send(self, command: SendTo, memory: memoryview, deadline: float) -> None:
        identifier = self.next_identifier
        self.next_identifier += 1
        out = OutgoingMessage(command, memory, deadline)
        self.sending[identifier] = out
        header = FrameHeader(
            FrameKind.OFFER, group=self.group, sequence=identifier, first=command.tag, second=command.dtype
        )
        if command.size <= EAGER_BYTES and self.eager_out.get(command.peer, 0) < EAGER_CREDIT:
            self.eager_out[command.peer] = self.eager_out.get(command.peer, 0) + 1
            out.frames_left, out.started = 1, True
            self.bulk(command.peer, header._replace(kind=FrameKind.EAGER), memory, out)
        else:
            # in the same queue as eager messages, so that messages of one tag keep their order
            self.control(command.peer, header, command.size.to_bytes(_SIZE_BYTES, "little"))

    def receive(self, command: ReceiveFrom, memory: memoryview, deadline: float) -> None:
        incoming = IncomingMessage(command, memory, deadline, command.fails_alone)
        for position, offer in enumerate(self.offers):
            if _matches(incoming, offer):
                del self.offers[position]
                if offer.data is not None:
                    self.eager_in[offer.source] -= 1
                self._bind(incoming, offer)
                return
        self.posted.append(incoming)

    def sent(self, out: OutgoingMessage) -> None:
        out.frames_left -= 1
        if not out.frames_left:
            self.sending = {key: value for key, value in self.sending.items() if value is not out}
            self.finish(out.command.operation, -1)

    def target(self, peer: int, header: FrameHeader) -> memoryview | None:
        """Return the memory for the bytes of an OFFER, EAGER or PARCEL frame."""
        if header.kind is FrameKind.OFFER:
            if header.length != _SIZE_BYTES:
                raise ProtocolError("malformed offer")
            return memoryview(bytearray(_SIZE_BYTES))
        if header.kind is FrameKind.EAGER:
            if header.length > EAGER_BYTES:
                raise ProtocolError("an eager message is too large")
            return memoryview(bytearray(header.length))
        incoming = self.receiving.get((peer, header.sequence))
        if incoming is None:
            return None
        start = header.second * MAX_PAYLOAD
        if start + header.length > incoming.command.size:
            raise ProtocolError("a point-to-point message is longer than was offered")
        return incoming.memory[start : start + header.length]

    def frame(self, peer: int, header: FrameHeader, payload: memoryview) -> None:
        if header.kind is FrameKind.EAGER:
            self._on_offer(
                MessageOffer(
                    peer, header.sequence, header.first, header.second, header.length, bytes(payload)
                )
            )
        elif header.kind is FrameKind.OFFER:
            if header.length != _SIZE_BYTES:
                raise ProtocolError("malformed offer")
            size = int.from_bytes(payload, "little")
            self._on_offer(MessageOffer(peer, header.sequence, header.first, header.second, size, None))
        elif header.kind is FrameKind.TAKEN:
            self.eager_out[peer] = max(0, self.eager_out.get(peer, 0) - 1)
        elif header.kind is FrameKind.ACCEPT:
            self._on_accept(peer, header.sequence)
        elif header.kind is FrameKind.PARCEL:
            self._payload_received(peer, header)

    def expire(self, operation: int, now: float) -> None:
        """Time an unfinished operation out now. A receive without a message then fails alone."""
        for item in self._unfinished():
            if item.command.operation == operation:
                item.deadline = now
                if isinstance(item, IncomingMessage):
                    item.fails_alone = True

    def take_expired(self, now: float) -> list[tuple[int, Failure]]:
        """Remove the receives that fail alone and have timed out. Return each operation and its failure.

        A receive whose message is on the way is not among them: its memory may be written to.
        """
        expired = [item for item in self.posted if item.has_expired_alone(now)]
        self.posted = [item for item in self.posted if not item.has_expired_alone(now)]
        return [(item.command.operation, _timeout_failure(item, _NO_MESSAGE)) for item in expired]

    def find_timeout(self, now: float) -> Failure | None:
        """Return the failure of the first message whose deadline has passed, or None."""
        for item in self._unfinished():
            if now >= item.deadline:
                has_partner = item.source >= 0 if isinstance(item, IncomingMessage) else item.started
                return _timeout_failure(item, _UNDER_WAY if has_partner else _NO_PARTNER)
        return None

    def pending(self) -> list[int]:
        """Return the operations that are not complete."""
        return [item.command.operation for item in self._unfinished()]

    def _unfinished(self) -> list[OutgoingMessage | IncomingMessage]:
        return [*self.sending.values(), *self.posted, *self.receiving.values()]

    def is_stranded(self, rank: int, *, alone: bool) -> bool:
        """Return True if an operation waits for a rank that has left.

        ``alone``: all other ranks have left.
        """
        return any(out.command.peer == rank and not out.started for out in self.sending.values()) or any(
            incoming.command.peer == rank or (alone and incoming.command.peer < 0) for incoming in self.posted
        )

    def _on_offer(self, offer: MessageOffer) -> None:
        for position, incoming in enumerate(self.posted):
            if _matches(incoming, offer):
                del self.posted[position]
                self._bind(incoming, offer)
                return
        waiting = self.eager_in.get(offer.source, 0)
        if len(self.offers) >= MAX_OFFERS or (offer.data is not None and waiting >= EAGER_CREDIT):
            raise ProtocolError("too many messages wait for a matching receive")
        self.offers.append(offer)
        if offer.data is not None:
            self.eager_in[offer.source] = waiting + 1

    def _bind(self, incoming: IncomingMessage, offer: MessageOffer) -> None:
        command = incoming.command
        if offer.size != command.size or offer.dtype != command.dtype:
            self.posted.append(incoming)
            self.mismatch(
                f"rank {offer.source} sent {offer.size} bytes (dtype {offer.dtype}) under tag {offer.tag}, "
                f"this rank receives {command.size} bytes (dtype {command.dtype})"
            )
            return
        incoming.source = offer.source
        if offer.data is not None:
            incoming.memory[: offer.size] = offer.data
            self.control(
                offer.source, FrameHeader(FrameKind.TAKEN, group=self.group, sequence=offer.identifier), b""
            )
            self.finish(command.operation, offer.source)
            return
        incoming.left = offer.size
        self.control(
            offer.source, FrameHeader(FrameKind.ACCEPT, group=self.group, sequence=offer.identifier), b""
        )
        if offer.size:
            self.receiving[(offer.source, offer.identifier)] = incoming
        else:
            self.finish(command.operation, offer.source)

    def _on_accept(self, peer: int, identifier: int) -> None:
        out = self.sending.get(identifier)
        if out is None or out.command.peer != peer or out.started:
            raise ProtocolError("a message was accepted that was not offered")
        out.started = True
        offsets = deque(range(0, out.command.size, MAX_PAYLOAD))
        out.frames_left = max(1, len(offsets))
        for start in offsets:
            header = FrameHeader(
                FrameKind.PARCEL, group=self.group, sequence=identifier, second=start // MAX_PAYLOAD
            )
            self.bulk(peer, header, out.memory[start : start + MAX_PAYLOAD], out)
        if not offsets:
            self.sent(out)

    def _payload_received(self, peer: int, header: FrameHeader) -> None:
        incoming = self.receiving.get((peer, header.sequence))
        if incoming is None:
            return
        incoming.left -= header.length
        if incoming.left <= 0:
            del self.receiving[(peer, header.sequence)]
            self.finish(incoming.command.operation, peer)


def _timeout_failure(item: OutgoingMessage | IncomingMessage, what: str) -> Failure:
    other, tag = item.command.peer, item.command.tag
    name = f"rank {other}" if other >= 0 else "any rank"
    message = f"point-to-point with {name} (tag {tag}) {what}"
    return Failure("operation-timeout", message, late=(other,) if other >= 0 else ())


def _matches(incoming: IncomingMessage, offer: MessageOffer) -> bool:
    return incoming.command.tag == offer.tag and incoming.command.peer in (-1, offer.source)
