"""How a member says that a hub was not reached, and what answered in its place."""

from __future__ import annotations

import httpx

from barnraise.core.errors import HandshakeError, HubAway
from barnraise.core.sanitize import printable
from barnraise.hub.protocol.pinning import NEW_INVITE

# What stands between says so with these, and without the hub's signature.
_PROXYS_WORDS = {
    413: "a proxy there takes no body of this size (nginx: client_max_body_size 2m)",
    502: "a proxy there does not reach the hub behind it",
    504: "a proxy there does not wait for the hub's answer (nginx: proxy_read_timeout 90s)",
}


def not_the_hubs(address: str, status: int, why: str) -> str:
    words = _PROXYS_WORDS.get(status)
    return f"{address} answered {status}: {words}" if words else f"{address} answered {status}, and {why}"


def unreached(url: httpx.URL, error: httpx.HTTPError | HandshakeError) -> HubAway:
    where = f"{url.host}:{url.port}" if url.port else url.host
    if isinstance(error, HandshakeError):
        return HubAway(f"{where} is not the hub: {error.message}", answered=True)
    if isinstance(error, httpx.TimeoutException):
        return HubAway(f"{where} does not answer in time")
    why = printable(str(error)) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in why:
        words = f"{where} has neither the hub's key nor a certificate that is valid for its name ({why})"
        return HubAway(words, hint=NEW_INVITE, answered=True)
    return HubAway(f"{where} cannot be reached: {why}")
