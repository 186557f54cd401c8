"""Resolution of names that another machine gave, so that the address that was checked is the one dialled."""

from __future__ import annotations

import os
import socket
import urllib.request
from typing import NamedTuple

import httpx

from barnraise.core.errors import HubAway
from barnraise.hub.object_store.redirects import allowed_addresses
from barnraise.transport.addresses import Where
from barnraise.transport.ipc.dial_request import BROKER_VARIABLE


class Target(NamedTuple):
    """A server: its URL as it was given, and the address to connect to; None to resolve its name as usual."""

    url: httpx.URL
    address: str | None = None

    def aimed(self, url: httpx.URL) -> httpx.URL:
        """Return a URL of this server with the address instead of the name."""
        return url if self.address is None else url.copy_with(host=self.address)

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that names the server, if its URL does not any more."""
        return {} if self.address is None else {"host": self.url.netloc.decode("ascii")}

    @property
    def extensions(self) -> dict[str, str]:
        """Return the name that TLS verifies."""
        return {} if self.address is None else {"sni_hostname": self.url.host}


def has_proxy() -> bool:
    """Tell whether a proxy is configured.

    It would resolve names itself, so their addresses could not be checked. The proxy of a sandbox does not
    count: the broker behind it checks addresses by the same rules.
    """
    return not has_broker() and any(
        urllib.request.getproxies().get(name) for name in ("http", "https", "all")
    )


def has_broker() -> bool:
    """Tell whether this process is in a sandbox with a broker that opens its connections."""
    return bool(os.environ.get(BROKER_VARIABLE))


def resolved(url: httpx.URL) -> list[str]:
    """Return the addresses of a server. Raise OSError or UnicodeError if its name leads nowhere."""
    port = url.port or (443 if url.scheme == "https" else 80)
    infos = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def led_target(url: httpx.URL, led_from: Where) -> Target:
    """Return a server that a hub in the network ``led_from`` named, at an address that was checked.

    In a sandbox the broker checks the address. Raise HubAway if a hub there may not lead to it.
    """
    if has_broker():
        return Target(url)
    if has_proxy():
        raise HubAway(f"the address of {url.host} cannot be checked behind a proxy")
    try:
        allowed = allowed_addresses(resolved(url), led_from, url.scheme)
    except (OSError, UnicodeError) as error:
        raise HubAway(f"the name {url.host} leads nowhere") from error
    if not allowed:
        raise HubAway(f"{url.host} is at an address that a hub may not lead to (docs/hub.md)")
    return Target(url, allowed[0])
