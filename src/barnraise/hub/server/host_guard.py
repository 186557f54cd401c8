"""Guard against web pages: which requests a hub behind a proxy accepts, and what it tells browsers.

A hub without TLS listens to its own machine, for a proxy there. A web page that is open on that machine can
let its own name lead to that machine. Its requests then name the page's host. So only names of the hub are
accepted as ``Host``. A proxy may prove itself by a token instead. The rules are pure; `GuardedApp` applies
them.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from barnraise.core.errors import HubRefused
from barnraise.core.host_header import host_name, is_loopback
from barnraise.core.sanitize import printable
from barnraise.hub.protocol.signatures import PROXY_HEADER

# Of every answer: browsers neither guess its type, nor give it to pages of other origins, nor tell of it.
BROWSER_HEADERS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
_AGAIN_S = 1.0  # between two looks for new addresses
_SHOWN = 80  # characters of a host
Respond = Callable[[Mapping[str, str], HubRefused], Response]


class ProxyRule(NamedTuple):
    """Rule of a hub without TLS. ``hosts``: the names in its addresses; ``token``: empty for none."""

    hosts: frozenset[str]
    token: str = ""


def refusal_of(headers: Headers, rule: ProxyRule) -> HubRefused | None:
    """Return why a request is rejected; None if it may come from the hub's proxy or its own machine."""
    if rule.token:
        given = headers.get(PROXY_HEADER, "")
        if hmac.compare_digest(given.encode("latin-1", "replace"), rule.token.encode()):
            return None
        return HubRefused(403, "proxy", f"the header {PROXY_HEADER} is missing or wrong", hint=_TOKEN_HINT)
    named = headers.getlist("host")
    host = host_name(named[0]) if len(named) == 1 else ""
    if host and (host in rule.hosts or is_loopback(host)):
        return None
    shown = printable(named[0][:_SHOWN]) if named else "no name"
    return HubRefused(421, "host", f"this hub is not known as {shown}", hint=_HOST_HINT)


def hosts_of(addresses: Iterable[str]) -> frozenset[str]:
    """Return the host names in a hub's addresses."""
    names = (host_name(urlsplit(address).netloc) for address in addresses)
    return frozenset(name for name in names if name)


class KnownHosts:
    """Host names of a hub, read again now and then: an invite may name a new address while the hub runs."""

    def __init__(
        self, addresses: Callable[[], Iterable[str]], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._addresses, self._now = addresses, now
        self._known, self._read_at = hosts_of(addresses()), now()

    def __call__(self, host: str) -> frozenset[str]:
        """Return the names; read them again first if this host is not among them."""
        if host not in self._known and self._now() - self._read_at >= _AGAIN_S:
            self._known, self._read_at = hosts_of(self._addresses()), self._now()
        return self._known


class GuardedApp:
    """ASGI application that adds the headers for browsers. With ``hosts``, it also applies the rule for
    proxies.
    """

    def __init__(
        self, app: ASGIApp, respond: Respond, hosts: KnownHosts | None = None, token: str = ""
    ) -> None:
        self._app, self._respond = app, respond
        self._hosts, self._token = hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in BROWSER_HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        app = self._app if refusal is None else self._respond(Headers(scope=scope), refusal)
        await app(scope, receive, send_guarded)

    def _refusal(self, headers: Headers) -> HubRefused | None:
        if self._hosts is None:
            return None
        return refusal_of(headers, ProxyRule(self._hosts(host_name(headers.get("host", ""))), self._token))


_HOST_HINT = (
    "Let the proxy send its public name as Host and start the hub with that name: `--address https://NAME`. "
    "Or let it send 127.0.0.1."
)
_TOKEN_HINT = f"Let the proxy add {PROXY_HEADER} with the value of the setting hosting.proxy_token."
