"""TLS of agents: credentials, trusted nodes, and TLS over bytes in memory."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Iterable

from barnraise.core.errors import HandshakeError
from barnraise.identity import NodeId, WorkerCredentials, WorkerIdentity
from barnraise.transport.links import tls

AGENT_RUN = "@agent"  # the run that agents' certificates name; no worker gets one for it
MOST_HANDSHAKES = 64
MOST_HANDSHAKES_PER_SOURCE = 8
_PLAIN_CHUNK = 64 * 1024


class HandshakeLimits:
    """Limit of concurrent handshakes, per source and in total. Pure."""

    def __init__(self, *, total: int = MOST_HANDSHAKES, per_source: int = MOST_HANDSHAKES_PER_SOURCE) -> None:
        self._total = total
        self._per_source = per_source
        self._sources: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._sources.total()

    def enter(self, source: str) -> bool:
        """Return True if one more handshake of this source may start; then call `leave` at its end."""
        if len(self) >= self._total or self._sources[source] >= self._per_source:
            return False
        self._sources[source] += 1
        return True

    def leave(self, source: str) -> None:
        self._sources[source] -= 1
        if self._sources[source] <= 0:
            del self._sources[source]


class AgentTls:
    """TLS contexts of one incarnation of an agent.

    ``trusted`` is called at every handshake, and again at its end: a node that was revoked meanwhile is
    rejected.
    """

    def __init__(
        self,
        credentials: WorkerCredentials,
        trusted: Callable[[], Iterable[NodeId]],
        handshakes: HandshakeLimits | None = None,
    ) -> None:
        self.credentials = credentials
        self.handshakes = handshakes or HandshakeLimits()
        self._trusted = trusted
        self._known: frozenset[NodeId] = frozenset()
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None

    def session(self, *, server_side: bool) -> TlsSession:
        known = frozenset(self._trusted())
        if known != self._known:
            self._known, self._server, self._client = known, None, None
        # Sorted, so that the same trust makes the same context.
        if server_side:
            if self._server is None:
                self._server = tls.server_context(self.credentials, sorted(known))
            return TlsSession(self._server, server_side=True)
        if self._client is None:
            self._client = tls.client_context(self.credentials, sorted(known))
        return TlsSession(self._client, server_side=False)

    def peer(self, session: TlsSession, expect: NodeId | None = None) -> WorkerIdentity:
        """Return the agent at the other end of a finished handshake; raise HandshakeError if it is not
        trusted.
        """
        identity = tls.peer(session.object, run=AGENT_RUN, expect_node=expect)
        self.check(identity.node)
        return identity

    def check(self, node: NodeId) -> None:
        """Raise HandshakeError if the node is not trusted now."""
        if node not in self._trusted():
            raise HandshakeError(
                f"machine {node.short} is not trusted any more", hint="Pair the two machines again."
            )


class TlsSession:
    """TLS connection without a socket: network bytes in and out, plain bytes in and out."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # No server name, so that the network does not learn the target.
        self.object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)

    def feed(self, data: bytes) -> None:
        """Add bytes from the network."""
        self._incoming.write(data)

    def outgoing(self) -> bytes:
        """Return the bytes to send to the network."""
        return self._outgoing.read()

    def handshake(self) -> bool:
        """Advance the handshake; return True once our side has finished. Raise ssl.SSLError if it failed."""
        try:
            self.object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self) -> bytes | None:
        """Return plain bytes, None if there are none now, or b"" after the other side closed."""
        try:
            return self.object.read(_PLAIN_CHUNK)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            return b""

    def encrypt(self, data: bytes | memoryview) -> bytes:
        view = memoryview(data)
        while view:
            view = view[self.object.write(view) :]
        return self._outgoing.read()

    def close_notify(self) -> bytes:
        """Return the bytes that close our direction."""
        try:
            self.object.unwrap()
        except ssl.SSLError:  # it wants the other's goodbye too, or the connection is spoilt
            pass
        return self._outgoing.read()


def explain(error: ssl.SSLError) -> HandshakeError:
    """Return a failed handshake as a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeError(f"its key is not trusted here ({error.verify_message})", hint=_PAIR)
    reason = str(getattr(error, "reason", None) or error)
    if "ALERT_UNKNOWN_CA" in reason:
        return HandshakeError("it does not trust this machine's key", hint=_PAIR)
    return HandshakeError(f"it broke off the TLS handshake ({reason})")


_PAIR = "Pair the two machines, or wait until every machine knows the new one."
