"""Download of blobs from the object store that a hub redirects to. The store is neither trusted nor required.

The request is a plain GET: no signature, no id, no credentials. The response is limited in size and time, and
verified by its hash. After any failure the blob comes from the hub, and the store is not used for a while.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from barnraise import __version__
from barnraise.core.errors import StoreAway
from barnraise.core.sanitize import printable
from barnraise.core.units import format_duration
from barnraise.hub.client.deadline import enforce_rate
from barnraise.hub.client.downloads import AS_SENT, encoding_of, receive, resume_headers
from barnraise.hub.client.name_resolution import Target, has_broker, has_proxy, resolved
from barnraise.hub.object_store.redirects import STORE_HEADER, allowed_addresses, refusal_reason
from barnraise.hub.storage.blobs import hash_file
from barnraise.transport.addresses import Where, network_of

_CONNECT_S, _SILENCE_S = 5.0, 10.0
_AT_LEAST_S, _SLOWEST_BYTES_S = 30.0, 64 << 10  # what is slower comes from the hub
_LEFT_ALONE_S = 300.0
_MOST_ADDRESSES = 4  # of one name that are tried


class StoreLink(NamedTuple):
    """A redirect, and the address of the hub that gave it."""

    url: str
    hub: str


class BucketDownloader:
    """Client of one object store origin, or of none. For one thread."""

    def __init__(
        self,
        origin: str | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.origin = origin
        self._say, self._clock = say, clock
        self._line: httpx.Client | None = None
        self._until = -1.0  # left alone

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def request_headers(self) -> dict[str, str]:
        """Return the header that permits a redirect to the store; empty while the store is suspended."""
        if self.origin is None or self._clock() < self._until or has_proxy():
            return {}
        return {STORE_HEADER: self.origin}

    def download(self, link: StoreLink, sha256: str, draft: Path, bound: int) -> bool:
        """Download a blob and return True if it is complete. A part of it may remain if the store fails."""
        try:
            self._download(link, sha256, draft, bound)
        except StoreAway as error:
            self.suspend(error.message)
            return False
        if hash_file(draft) == sha256:
            return True
        draft.unlink()
        self.suspend(f"it has another content for the blob {sha256[:12]}")
        return False

    def suspend(self, why: str) -> None:
        """Report why, and do not use the store for a while."""
        self._until = self._clock() + _LEFT_ALONE_S
        self.close()
        rest = format_duration(_LEFT_ALONE_S)
        self._say(
            f"the store at {self.origin} is not used for {rest}: {printable(why)}; blobs come from the hub"
        )

    def _download(self, link: StoreLink, sha256: str, draft: Path, bound: int) -> None:
        assert self.origin is not None
        if why := refusal_reason(link.url, self.origin, sha256):
            raise StoreAway(why)
        url = httpx.URL(link.url)
        addresses = _addresses(url, network_of(link.hub))
        if not addresses:
            raise StoreAway("it is at an address that this hub may not lead to (docs/hub.md)")
        for place, address in enumerate(addresses):
            try:
                self._receive(url, address, draft, bound)
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if place == len(addresses) - 1:
                    raise StoreAway("it cannot be reached") from error
            except httpx.TimeoutException as error:
                raise StoreAway("it does not answer in time") from error
            except httpx.HTTPError as error:
                raise StoreAway(f"it broke off ({type(error).__name__})") from error

    def _receive(self, url: httpx.URL, address: str, draft: Path, bound: int) -> None:
        """Download from this address, because the name may resolve to another one the next time."""
        target = Target(url, address)
        headers = target.headers | resume_headers(draft)
        with self._client().stream(
            "GET", target.aimed(url), headers=headers, extensions=target.extensions
        ) as response:
            if response.status_code not in (200, 206):
                raise StoreAway(f"it answered {response.status_code}")
            if encoding := encoding_of(response):
                raise StoreAway(f"it compresses its answers ({encoding})")
            parts = enforce_rate(
                response.iter_raw(),
                _SLOWEST_BYTES_S,
                _AT_LEAST_S,
                lambda: StoreAway("it is too slow"),
                self._clock,
            )
            total = receive(response, parts, draft, bound)
        if total is None:
            raise StoreAway("it sends more than the blob has")

    def _client(self) -> httpx.Client:
        if self._line is None:
            self._line = httpx.Client(
                verify=ssl.create_default_context(),
                timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
                headers={"user-agent": f"barnraise/{__version__}", **AS_SENT},
                follow_redirects=False,
                trust_env=has_broker(),
            )
        return self._line


def _addresses(url: httpx.URL, hub: Where) -> tuple[str, ...]:
    if has_broker():
        return (url.host,)
    return allowed_addresses(_resolved(url), hub, url.scheme)[:_MOST_ADDRESSES]


def _resolved(url: httpx.URL) -> list[str]:
    try:
        return resolved(url)
    except (OSError, UnicodeError) as error:
        raise StoreAway("its name leads nowhere") from error
