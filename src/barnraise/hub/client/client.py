"""HTTP client of a member: signed requests, verified responses, and retries that report what they wait for.

A response counts only if the hub's key signed it for this request. Anything else (a proxy's error page, a
captive portal, silence) means that the hub cannot be reached. Blobs are not signed, because their name is
their hash. So any server may deliver them, for example the object store that the hub redirects to
(`object_store.downloader`).
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from barnraise import __version__
from barnraise.core.errors import HandshakeError, HubAway, HubError, HubRefused, ProtocolError
from barnraise.core.flow.retry import SAY_AFTER_S, ReportedBackoff
from barnraise.core.flow.uplink_limiter import UplinkLimiter
from barnraise.core.installation import upgrade_hint
from barnraise.core.sanitize import printable
from barnraise.core.units import format_size
from barnraise.hub.client.deadline import RequestDeadline, enforce_rate
from barnraise.hub.client.downloads import AS_SENT, encoding_of, partial_size, receive, resume_headers
from barnraise.hub.client.name_resolution import Target, has_broker, led_target
from barnraise.hub.object_store.downloader import BucketDownloader, StoreLink
from barnraise.hub.protocol.chain import check_chain
from barnraise.hub.protocol.clock import JUMP_S, ClockJumps, describe_skew
from barnraise.hub.protocol.messages import (
    MOST_MESSAGE_BYTES,
    PIECE_BYTES,
    Problem,
    VersionHead,
    decode_message,
    encode_message,
)
from barnraise.hub.protocol.signatures import PROXY_HEADER, sign_request, verify_response
from barnraise.hub.protocol.tls import NEW_INVITE, context_for
from barnraise.hub.storage.blobs import hash_file
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.transport.addresses import Where, network_of

log = logging.getLogger("barnraise.hub")
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request would drown all others

T = TypeVar("T", bound=msgspec.Struct)

CONNECT_S = 10.0
ANSWER_S = 30.0
_SLOWEST_BYTES_S = 1 << 10  # of a blob: a hub at home may serve a hundred members at once
_SLOWEST_SENT_BYTES_S = 8 << 10  # of a piece: what is slower is sent in smaller ones
_READ_BYTES = 1 << 16
_BUSY = (429, 503)
_NOT_WHAT_WAS_SIGNED = 401
# What stands between says so with these, and without the hub's signature.
_PROXY_ERRORS = {
    413: "a proxy there rejects bodies of this size (nginx: client_max_body_size 2m)",
    502: "a proxy there cannot reach the hub",
    504: "a proxy there times out before the hub answers (nginx: proxy_read_timeout 90s)",
}


class HubClient:
    """HTTP client of one member. For one thread.

    ``pinned``: the hub's own key is the only one that TLS accepts. ``led_from``: the network of the hub that
    named these addresses, if that was not a person. ``root``: the run's hub, which signs what a region sends.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hub: NodeId,
        key: NodeKey,
        *,
        pinned: bool = True,
        say: Callable[[str], None] = log.warning,
        pace: UplinkLimiter | None = None,
        store: str | None = None,
        proxy_token: str | None = None,
        led_from: Where | None = None,
        root: NodeId | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], float] = time.time,
        answer_s: float = ANSWER_S,
    ) -> None:
        if not addresses:
            raise HubError("the hub has no address", hint="Ask for a new invite: `barnraise invite`.")
        self._addresses = [address.rstrip("/") for address in addresses]
        self._hub, self._key, self._pinned = hub, key, pinned
        self._pace = pace or UplinkLimiter(0.0)
        self._sleep, self._wall = sleep, wall
        self._offset = 0.0  # of the hub's clock from ours, once it had to tell
        self._jumps = ClockJumps(wall(), time.monotonic())
        self._answer_s, self._connect_s = answer_s, min(CONNECT_S, answer_s)
        self.ahead_s: float | None = None  # the hub's clock, by its last answer
        self.say = say
        self.sent_bytes = self.received_bytes = 0
        self._store = BucketDownloader(store, say)
        self._led_from = led_from
        self._root = None if root == hub else root
        self.network: Where = "nowhere"  # of the hub, by the address that answered last
        self._proxy_token = proxy_token  # for a hub without TLS on this machine
        self._transport = transport
        self._http_clients: dict[str, httpx.Client] = {}  # by address
        self._targets: dict[str, Target] = {}  # of these clients
        self._deadlines = defaultdict[str, RequestDeadline](RequestDeadline)  # of each line
        self.wait_for_policy: Callable[[], None] = lambda: None  # before anything large is sent or fetched

    @property
    def address(self) -> str:
        """Return the address that answered last."""
        return self._addresses[0]

    @property
    def piece_bytes(self) -> int:
        """Return the size of an upload piece: what the uplink cap permits in half a minute."""
        return self._pace.bytes_in(ANSWER_S) or PIECE_BYTES

    @property
    def store(self) -> str | None:
        """Return the accepted origin of the object store, or None."""
        return self._store.origin

    @property
    def proxy_token(self) -> str | None:
        """Return the token for a hub without TLS, if an address of this hub is on this machine."""
        return self._proxy_token if any(self._proof(httpx.URL(each)) for each in self._addresses) else None

    def accept_store(self, origin: str | None) -> None:
        """Accept this origin for blobs from now on, as the user of this machine agreed."""
        self._store.close()
        self._store = BucketDownloader(origin, self.say)

    def close(self) -> None:
        self._store.close()
        while self._http_clients:
            self._http_clients.popitem()[1].close()

    def _http_client(self, address: str) -> httpx.Client:
        """Return the HTTP client of an address; its TLS pins the hub's key or verifies a certificate."""
        if address not in self._http_clients:
            verify: ssl.SSLContext | bool = True
            url = httpx.URL(address)
            led_from = self._led_from if self._transport is None else None
            target = Target(url) if led_from is None else led_target(url, led_from)
            self._targets[address] = target
            if self._transport is None and url.scheme == "https":
                port, wait_s = url.port or 443, self._connect_s
                verify = context_for(
                    url.host, port, self._hub, wait_s, pinned=self._pinned, at=target.address
                )
            self._http_clients[address] = httpx.Client(
                verify=verify,
                transport=self._transport,
                timeout=httpx.Timeout(self._answer_s, connect=self._connect_s),
                headers={"user-agent": f"barnraise/{__version__}", **AS_SENT, **self._proof(url)},
                follow_redirects=False,
                trust_env=self._transport is None and (led_from is None or has_broker()),
            )
        return self._http_clients[address]

    def _proof(self, url: httpx.URL) -> dict[str, str]:
        """Return the header that a hub without TLS wants; empty for servers on other machines."""
        is_here = url.host == "localhost" or network_of(url.host) == "machine"
        if self._proxy_token is None or url.scheme != "http" or not is_here:
            return {}
        return {PROXY_HEADER: self._proxy_token}

    def _disconnect(self, address: str) -> None:
        """Close the connections to an address. The next attempt may reach another server."""
        line = self._http_clients.pop(address, None)
        if line is not None:
            line.close()

    def backoff(self, whom: str = "") -> ReportedBackoff:
        return ReportedBackoff(whom or f"the hub at {self.address}", self.say, self._sleep)

    # questions

    def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | bytes = b"",
        *,
        query: Mapping[str, str | int | float] | None = None,
        wait_s: float = 0.0,
    ) -> T:
        """Send a request once, to each address until one answers.

        Raise HubAway if none does, HubRefused with the hub's reason.
        """
        data = body if isinstance(body, bytes) else encode_message(body)
        away: HubAway | None = None
        for address in list(self._addresses):
            try:
                answer = self._send_signed(address, method, path, query or {}, data, self._answer_s + wait_s)
            except HubAway as error:
                away = away or error
                continue
            self._addresses.sort(key=lambda other: other != address)
            return _decode_response(kind, answer)
        assert away is not None
        raise away

    def ask_with_retries(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | bytes = b"",
        *,
        query: Mapping[str, str | int | float] | None = None,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> T:
        """Send a request until the hub answers, for at most ``patience_s``.

        A hub that crashed resumes where it was.
        """
        waiting = self.backoff()
        while True:
            try:
                answer = self.ask(method, path, kind, body, query=query, wait_s=wait_s)
            except HubAway as error:
                if patience_s is not None and waiting.waited_s > patience_s:
                    raise
                waiting.pause(error.message)
            except HubRefused as error:
                if error.status not in _BUSY or (patience_s is not None and waiting.waited_s > patience_s):
                    raise
                waiting.pause(error.message, error.retry_s)
            else:
                if waiting.waited_s > SAY_AFTER_S + wait_s:
                    log.info("the hub answers again after %.0f s", waiting.waited_s)
                return answer

    def head(self, after: int | None, wait_s: float = 0.0, *, patience_s: float | None = None) -> VersionHead:
        """Return the steps after a version.

        If there are none, the hub may wait ``wait_s`` before it answers.
        """
        query: dict[str, int | float] = {} if after is None else {"after": after}
        if wait_s:
            query["wait"] = wait_s
        head = self.ask_with_retries(
            "GET", "/v1/head", VersionHead, query=query, wait_s=wait_s, patience_s=patience_s
        )
        if self._root is not None:
            check_chain(head.steps, after, self._root)
        return head

    def _send_signed(
        self,
        address: str,
        method: str,
        path: str,
        query: Mapping[str, str | int | float],
        data: bytes,
        timeout_s: float,
    ) -> bytes:
        for attempt in range(2):
            url = httpx.URL(f"{address}{path}", params=dict(query) if query else None)
            headers = self._sign(address, method, url, data)
            status, response_headers, body = self._exchange(address, method, url, headers, data, timeout_s)
            try:
                self.ahead_s = (
                    verify_response(self._hub, status, response_headers, body, headers) - self._wall()
                )
            except HubError as error:
                raise HubAway(
                    _foreign_response(address, status, error.message),
                    hint="Check that the address is the hub's; ask for a new invite if its key changed.",
                    answered=status < 500,  # above it, what stands between says that the hub does not
                ) from error
            if status < 300:
                return body
            problem = decode_message(Problem, body)
            if attempt == 0 and problem.kind == "clock" and problem.time:
                self._adopt_hub_time(problem.time)
                continue
            if status == _NOT_WHAT_WAS_SIGNED and problem.kind != "clock":
                if attempt == 0:
                    continue
                raise HubAway(
                    f"what this machine sends is changed or repeated on its way through {address}: the hub "
                    f"says that {printable(problem.message)}",
                    hint="Use another way to the hub; its owner looks at the proxy or tunnel in front of it.",
                    answered=True,
                )
            raise HubRefused(
                status,
                problem.kind,
                printable(problem.message),
                hint=printable(problem.hint) or None,
                retry_s=problem.retry_s,
                offset=problem.offset,
            )
        raise AssertionError("unreachable")

    def _sign(self, address: str, method: str, url: httpx.URL, data: bytes = b"") -> dict[str, str]:
        url_path, _, query = url.raw_path.decode("ascii").partition("?")
        # A hub below a path of a proxy's is asked there, but signs what reaches it.
        signed_path = url_path.removeprefix(httpx.URL(address).path.rstrip("/"))
        now = self._wall() + self._offset
        return sign_request(self._key, method, signed_path, query, data, self._hub, now)

    def _adopt_hub_time(self, hub_time: float) -> None:
        """Sign with the hub's time from now on.

        The hub judges signatures, so it does not matter which clock is right.
        """
        wall = self._wall()
        jumped = self._jumps.check(wall, time.monotonic())
        before, self._offset = self._offset, hub_time - wall
        if abs(self._offset - before) >= JUMP_S:
            self.say(describe_skew(-self._offset, jumped))

    def _exchange(
        self,
        address: str,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        data: bytes,
        timeout_s: float,
    ) -> tuple[int, dict[str, str], bytes]:
        content = self._throttle(data) if data else None
        sizes = {"content-length": str(len(data))} if data else {}
        http_client, deadline = self._http_client(address), self._deadlines[address]
        target = self._targets[address]
        slowest = min(_SLOWEST_SENT_BYTES_S, self._pace.bytes_in(1.0) or _SLOWEST_SENT_BYTES_S)
        in_all_s = self._connect_s + timeout_s + len(data) / slowest
        try:
            with (
                deadline.within(in_all_s),
                http_client.stream(
                    method,
                    target.aimed(url),
                    headers={**headers, **sizes, **target.headers},
                    content=content,
                    timeout=httpx.Timeout(timeout_s, connect=self._connect_s),
                    extensions={"trace": deadline.trace, **target.extensions},
                ) as response,
            ):
                self.network = network_of(_peer_address(response))
                _check_encoding(response)
                received = bytearray()
                for part in response.iter_raw(_READ_BYTES):
                    received += part
                    if len(received) > MOST_MESSAGE_BYTES:
                        raise HubAway(f"{url.host} sends more than an answer may have")
                self.received_bytes += len(received)
                plain = {name.lower(): value for name, value in response.headers.items()}
                return response.status_code, plain, bytes(received)
        except (httpx.HTTPError, HandshakeError) as error:
            self._disconnect(address)
            raise _unreached(url, error) from error

    def _throttle(self, data: bytes) -> Iterator[bytes]:
        portion = self._pace.burst_bytes
        for first in range(0, len(data), portion):
            part = data[first : first + portion]
            delay = self._pace.delay(len(part), time.monotonic())
            if delay:
                self._sleep(delay)
            self.sent_bytes += len(part)
            yield part

    # blobs

    def fetch(
        self, sha256: str, target: Path, *, size: int | None = None, max_bytes: int | None = None
    ) -> None:
        """Download a blob to a file, of exactly ``size`` bytes or of at most ``max_bytes`` bytes.

        A partial download is resumed. Raise HubError if the content does not match the hash.
        """
        bound = size if size is not None else max_bytes
        assert bound is not None, "a download needs a limit"
        draft = target.with_name(f"{target.name}.part")
        try:
            self._fetch(sha256, draft, size, bound)
        except HubError:
            self._rotate_addresses()  # the next attempt uses another address
            raise
        draft.replace(target)

    def _fetch(self, sha256: str, draft: Path, size: int | None, bound: int) -> None:
        """Retry a download, from the hub and from the object store that it redirects to."""
        waiting = self.backoff()
        is_mixed = False  # some of the draft may be the store's
        while True:
            self.wait_for_policy()
            try:
                link = self._fetch_once(sha256, draft, size, bound)
            except HubAway as error:
                waiting.pause(error.message)
                self._rotate_addresses()
                continue
            if link is not None:
                is_mixed = True
                if self._store.download(link, sha256, draft, bound):
                    return
                continue  # with the hub itself, from where the store broke off
            if hash_file(draft) == sha256:
                return
            draft.unlink()
            if not is_mixed:
                raise HubError(f"{self.address} sent wrong content for the blob {sha256[:12]}", hint=_CHANGED)
            is_mixed = False
            self._store.suspend(f"it began the blob {sha256[:12]} with another content")

    def _rotate_addresses(self) -> None:
        self._addresses.append(self._addresses.pop(0))

    def fetch_bytes(self, sha256: str, max_bytes: int, folder: Path) -> bytes:
        """Download a small blob of unknown size and return its bytes."""
        target = folder / sha256
        self.fetch(sha256, target, max_bytes=max_bytes)
        data = target.read_bytes()
        target.unlink()
        return data

    def _fetch_once(self, sha256: str, draft: Path, size: int | None, bound: int) -> StoreLink | None:
        """Download from the hub into the partial file.

        Return a link if the hub redirects to the object store.
        """
        if size and partial_size(draft) == size:
            return None
        url = httpx.URL(f"{self.address}/v1/blobs/{sha256}")
        offered = self._store.request_headers()
        # Signed, because the hub limits what it sends to clients that are no members.
        headers = resume_headers(draft) | offered | self._sign(self.address, "GET", url)
        deadline = self._deadlines[self.address]
        try:
            with contextlib.ExitStack() as held:
                with deadline.within(self._connect_s + self._answer_s):
                    line, target = self._http_client(self.address), self._targets[self.address]
                    response = held.enter_context(
                        line.stream(
                            "GET",
                            target.aimed(url),
                            headers=headers | target.headers,
                            extensions={"trace": deadline.trace, **target.extensions},
                        )
                    )
                if response.status_code == 307 and offered:
                    return StoreLink(response.headers.get("location", ""), _peer_address(response))
                if response.status_code == 404:
                    raise HubError(
                        f"the hub does not have the blob {sha256[:12]} any more",
                        hint="Join again: `barnraise join --invite ...`.",
                    )
                if response.status_code == 416:  # nothing follows what is here: it is begun again
                    draft.unlink(missing_ok=True)
                if response.status_code not in (200, 206):
                    raise HubAway(f"{url.host} answered {response.status_code} to a question for a blob")
                _check_encoding(response)
                parts = enforce_rate(
                    response.iter_raw(),
                    _SLOWEST_BYTES_S,
                    self._answer_s,
                    lambda: HubAway(f"{url.host} sends a blob slower than {format_size(_SLOWEST_BYTES_S)}/s"),
                )
                total = receive(response, self._count_received(parts), draft, bound)
        except (httpx.HTTPError, HandshakeError) as error:
            self._disconnect(self.address)
            raise _unreached(url, error) from error
        if total is None:
            raise HubError(f"the blob {sha256[:12]} is larger than declared", hint="Try again.")
        if size is not None and total < size:
            raise HubAway(f"{url.host} broke off after {total} of {size} bytes")
        return None

    def _count_received(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        for part in parts:
            self.received_bytes += len(part)
            yield part


def _check_encoding(response: httpx.Response) -> None:
    """Raise HubAway if the answer is compressed: its size in memory would be the sender's choice."""
    if encoding := encoding_of(response):
        raise HubAway(
            f"{response.url.host} compresses its answers ({encoding}), and a hub never does",
            hint="The hub's owner turns off compression in the proxy or tunnel in front of it.",
            answered=True,
        )


def _foreign_response(address: str, status: int, why: str) -> str:
    """Describe a response that the hub did not sign; a proxy sent it."""
    words = _PROXY_ERRORS.get(status)
    return f"{address} answered {status}: {words}" if words else f"{address} answered {status}, and {why}"


def _unreached(url: httpx.URL, error: httpx.HTTPError | HandshakeError) -> HubAway:
    """Turn an HTTP or TLS failure into a HubAway error."""
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


def _decode_response(kind: type[T], body: bytes) -> T:
    try:
        return decode_message(kind, body)
    except ProtocolError as error:
        raise HubError(
            f"the hub's answer cannot be read: {error.message}",
            hint=f"Use the same version of Barnraise as the hub. {upgrade_hint()}",
        ) from error


def _peer_address(response: httpx.Response) -> str:
    """Return the address of the server that answered. Its name may resolve to another one by now."""
    stream = response.extensions.get("network_stream")
    try:
        address = stream.get_extra_info("server_addr") if stream is not None else None
    except OSError:  # it is gone already
        address = None
    return str(address[0]) if address else ""


_CHANGED = "Try again; if it repeats, something between here and the hub changes what it carries."
