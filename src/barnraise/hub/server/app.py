"""HTTP routes of a hub: verify the sender, handle the request, sign the response.

The signature covers the headers, so it is checked before any body is read. Each route limits the size of its
body. Only a few large bodies are in memory at once; other senders wait (see `upload_slots`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from barnraise.core.errors import HubError, HubRefused, ProtocolError
from barnraise.core.flow.rate_limit import RateLimit
from barnraise.hub.object_store.redirects import STORE_HEADER
from barnraise.hub.protocol.admission import AdmissionStatement, admission_request, exact_key
from barnraise.hub.protocol.chain import sign_step
from barnraise.hub.protocol.clock import SignatureClock
from barnraise.hub.protocol.invites import check_addresses
from barnraise.hub.protocol.messages import (
    MOST_MESSAGE_BYTES,
    PIECE_BYTES,
    JoinRequest,
    LeaseRequest,
    Problem,
    RegionOffer,
    RegionOrders,
    SeatGrant,
    SeatRequest,
    UpdateDeclaration,
    decode_message,
    encode_message,
)
from barnraise.hub.protocol.replay_guard import NonceCache
from barnraise.hub.protocol.signatures import (
    SignedMessage,
    request_signature,
    sign_response,
    verify_request,
)
from barnraise.hub.region.placement import Regions, add_offer, open_regions, take_seat
from barnraise.hub.server.bodies import ArrivedBody, BodyFiles, read_body, too_long
from barnraise.hub.server.connection_limits import source_of
from barnraise.hub.server.health import HealthWarning
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.membership import SEAT_S, ended_seats
from barnraise.hub.server.unsigned_allowance import UnsignedAllowance, UnsignedLimits
from barnraise.hub.server.upload_slots import UploadSlots
from barnraise.hub.server.uploads import UploadService
from barnraise.hub.web.metrics import HubMetrics
from barnraise.hub.web.openapi import openapi_document
from barnraise.hub.web.status_page import POLICY, render
from barnraise.identity.keys import NodeKey

if TYPE_CHECKING:
    from barnraise.hub.object_store.uploader import BucketUploader

logger = logging.getLogger(__name__)
_LONGEST_WAIT_S = 60.0
_SHOWN_S = 60.0  # that the disk failed
_SMALL = 64 << 10
_KEPT_S = 1.0  # the page and the figures
_REQUESTS_PER_S, _REQUESTS_AT_ONCE = 50.0, 500.0  # of a member, and of all strangers together
_STRANGERS_PER_S, _STRANGERS_AT_ONCE = 10.0, 100.0  # from one place
_JOINS_PER_S, _JOINS_AT_ONCE = 5.0, 1000.0
_JOIN_PATH, _JOIN_BYTES = "/v1/members", 4 << 10
_SIGNED_STEPS = 4096  # that are kept
_UPLOAD = re.compile("[0-9a-f]{32}")
_IMMUTABLE = "public, max-age=31536000, immutable"


class VerifiedRequest(NamedTuple):
    """A request whose signature and body were verified.

    ``node``: the sender, empty if the request is unsigned.
    """

    node: str
    arrived: ArrivedBody = ArrivedBody(0, b"")

    @property
    def body(self) -> bytes:
        """Return a body that is in memory."""
        return self.arrived.data


Handler = Callable[[Request, VerifiedRequest], Awaitable[msgspec.Struct | msgspec.Raw]]


class HubApp:
    """HTTP request handlers of one hub."""

    def __init__(
        self,
        hub: Hub,
        intake: UploadService,
        key: NodeKey,
        stock: BucketUploader | None = None,
        limits: UnsignedLimits = UnsignedLimits(),  # noqa: B008  # it is immutable
    ) -> None:
        self._hub, self._uploads, self._key, self._bucket = hub, intake, key, stock
        self._metrics = HubMetrics(hub, stock)
        self._measured = _CachedText(self._metrics.text, hub.now)
        self._rendered = _CachedText(lambda: render(hub), hub.now)
        hub.on_commit = self._metrics.note_version
        self._time = SignatureClock(hub.clock, hub.now, hub.signed.time)
        self._nonces = NonceCache(self._time())
        self._slots = UploadSlots()
        self._files = BodyFiles(hub.directory)
        self._sign_step = functools.lru_cache(maxsize=_SIGNED_STEPS)(functools.partial(sign_step, key))
        self._requests = RateLimit(_REQUESTS_PER_S, _REQUESTS_AT_ONCE)
        self._strangers = RateLimit(_STRANGERS_PER_S, _STRANGERS_AT_ONCE)
        self._unsigned = UnsignedAllowance(limits.bytes_s, hub.now)
        self._is_forwarded = limits.forwarded
        self._joins = RateLimit(_JOINS_PER_S, _JOINS_AT_ONCE)
        self._regions: Regions = {}
        self._described: tuple[tuple[object, ...], msgspec.Raw] | None = None

    def routes(self) -> list[Route]:
        """Return the routes: public ones, and those for members unless the hub is a mirror."""

        def route(
            path: str, method: str, handler: Handler, max_bytes: int, *, is_open: bool = False
        ) -> Route:
            async def serve(request: Request) -> Response:
                began = self._hub.now()
                answer = await self._serve(request, handler, max_bytes, is_open)
                if "wait=" not in request.url.query:
                    size = int(request.headers.get("content-length", "0")) if answer.status_code == 200 else 0
                    name = f"{method} {path}"
                    self._metrics.note_answer(name, answer.status_code, self._hub.now() - began, size)
                return answer

            return Route(path, serve, methods=[method])

        for_anybody = [
            route("/v1/run", "GET", self._run, 0, is_open=True),
            route("/v1/head", "GET", self._head, 0, is_open=True),
            self._open_route("/v1/blobs/{name}", self._blob),
            self._open_route("/", self._page),
            self._open_route("/v1/openapi.json", self._openapi),
            self._open_route("/metrics", self._figures),
        ]
        if self._hub.is_mirror:
            return for_anybody
        return [
            *for_anybody,
            route(_JOIN_PATH, "POST", self._join, _JOIN_BYTES),
            route("/v1/regions", "POST", self._offer, _SMALL),
            route("/v1/seats", "POST", self._seat, _SMALL),
            route("/v1/members/{node}/pardon", "POST", self._pardon, 0),
            route("/v1/members/{node}/expel", "POST", self._expel, 0),
            route("/v1/replica", "GET", self._replica, 0),
            route("/v1/leave", "POST", self._leave, 0),
            route("/v1/leases", "POST", self._lease, _SMALL),
            route("/v1/uploads", "POST", self._declare, MOST_MESSAGE_BYTES),
            route("/v1/uploads/{upload}", "GET", self._progress, 0),
            route("/v1/uploads/{upload}", "PATCH", self._append, PIECE_BYTES),
        ]

    def _open_route(self, path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        """Return a route that needs no signature; only a member's signature lifts the limits."""

        async def serve(request: Request) -> Response:
            if self._is_of_member(request):
                return await handler(request)
            try:
                self._take_unsigned(request)
            except HubRefused as error:
                return error_response(self._key, request.headers, error, self._time())
            return self._unsigned.slowed(await handler(request), self._source(request))

        return Route(path, serve, methods=["GET"])

    def _is_of_member(self, request: Request) -> bool:
        """Tell whether a member or an invite signed a request that needs no signature, within its rate."""
        if "signature" not in request.headers:
            return False
        try:
            signed = self._signature(request)
            node = str(signed.node)
            is_member = self._is_member(node)
            if not is_member and not self._hub.has_invite(node):
                return False
            self._check_new(signed, is_member=is_member)
            self._limit(self._requests, node)
        except HubRefused:
            return False
        return True

    def _is_member(self, node: str) -> bool:
        """Tell whether a node takes part; a quarantined one counts as unknown."""
        member = self._hub.members.get(node)
        return node == str(self._hub.id) or (member is not None and not member.quarantine)

    def _take_unsigned(self, request: Request) -> None:
        """Count a request without a member's signature. Raise HubRefused (429) if there are too many."""
        wait_s = self._unsigned.take_request(self._source(request))
        if wait_s > 0:
            raise _too_many(wait_s)

    def _source(self, request: Request) -> str:
        """Return the source that a request counts for; empty for this machine, and for a proxy on it."""
        place = source_of(request.client.host) if request.client else ""
        if place or not self._is_forwarded:
            return place
        # A proxy appends the address that it sees, so the last one is the only one to believe.
        named = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
        return source_of(named)[:64] if named else ""

    async def _serve(self, request: Request, handler: Handler, max_bytes: int, is_open: bool) -> Response:
        """Run a handler and turn any outcome into a response; sign it if the request was signed."""
        try:
            async with contextlib.AsyncExitStack() as held:
                verified = await self._verify(request, max_bytes, is_open, held)
                status, body = 200, encode_message(await handler(request, verified))
                if not self._is_member(verified.node) and not self._hub.has_invite(verified.node):
                    answer = signed_response(self._key, request.headers, status, body, self._time())
                    return self._unsigned.slowed(answer, self._source(request))
        except HubRefused as error:
            if error.kind == "disk":
                trouble = HealthWarning(error.message, error.hint, self._hub.now() + _SHOWN_S)
                self._hub.health.warn("full", trouble)
            status, body = error.status, encode_message(problem_of(error, self._time()))
        except ProtocolError as error:
            problem = Problem(kind="message", message=error.message[:2000], hint=error.hint[:2000])
            status, body = 422, encode_message(problem)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:  # the response must be signed after any error
            logger.exception("%s %s failed", request.method, request.url.path)
            problem = Problem(
                kind="busy", message="the hub could not handle the request", hint=_LATER, retry_s=5.0
            )
            status, body = 503, encode_message(problem)
        return signed_response(self._key, request.headers, status, body, self._time())

    async def _verify(
        self, request: Request, max_bytes: int, is_open: bool, held: contextlib.AsyncExitStack
    ) -> VerifiedRequest:
        """Check signature, replay and rate limits, then read the body. Raise HubRefused if a check fails."""
        if is_open and "signature" not in request.headers:
            self._take_unsigned(request)
            return VerifiedRequest("")
        signed = self._signature(request)
        node = str(signed.node)
        is_member = node in self._hub.members or node == str(self._hub.id)
        if not is_member and request.url.path == _JOIN_PATH:
            return await self._verify_join(request, signed, held)
        is_invited = not is_member and self._hub.has_invite(node)  # it looks at the run before it joins
        if not is_member:  # before an unknown sender can use memory
            if not is_invited:
                self._limit_stranger(request)
            max_bytes = min(max_bytes, _SMALL)
        self._check_new(signed, is_member=is_member)
        if is_member or is_invited:  # after the replay check: a replay must not use up the rate limit
            self._limit(self._requests, node)
        if node != self._hub.founding.owner:  # only the owner sends a layout
            max_bytes = min(max_bytes, PIECE_BYTES)
        return VerifiedRequest(node, await self._body(request, signed, max_bytes, held))

    async def _verify_join(
        self, request: Request, signed: SignedMessage, held: contextlib.AsyncExitStack
    ) -> VerifiedRequest:
        """Read a new member's request. One with a usable invite is counted apart from all other strangers.

        Raise HubRefused if a check fails.
        """
        node, arrived = str(signed.node), await self._body(request, signed, _JOIN_BYTES, held)
        is_invited = self._is_invited(node, arrived.data)
        if not is_invited:
            self._limit_stranger(request)
        self._check_new(signed, is_member=False)
        if is_invited:  # after the replay check: a replay must not use up the limit
            self._limit(self._joins, "all")
        return VerifiedRequest(node, arrived)

    def _is_invited(self, node: str, body: bytes) -> bool:
        try:
            self._hub.admission(node, decode_message(JoinRequest, body))
        except (HubRefused, ProtocolError):
            return False
        return True

    def _limit_stranger(self, request: Request) -> None:
        """Raise HubRefused (429) if strangers, from one source or in total, sent too many requests."""
        place = self._source(request)
        if place:  # a limit per source leaves capacity for other sources
            self._limit(self._strangers, place)
        self._limit(self._requests, "strangers")

    def _signature(self, request: Request) -> SignedMessage:
        path = request.scope["raw_path"].decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        return verify_request(request.method, path, query, request.headers, self._hub.id)

    def _check_new(self, signed: SignedMessage, *, is_member: bool) -> None:
        """Remember the nonce of a request. Raise HubRefused if it is a replay, or too old or too new."""
        members = len(self._hub.members)
        self._nonces.accept(signed, self._time(), self._hub.now(), members=members, is_member=is_member)
        self._hub.signed.note(signed.created)

    def _limit(self, allowance: RateLimit, name: str) -> None:
        """Raise HubRefused (429) if this source has used up its rate limit."""
        wait_s = allowance.take(name, self._hub.now())
        if wait_s > 0:
            raise _too_many(wait_s)

    async def _body(
        self, request: Request, signed: SignedMessage, max_bytes: int, held: contextlib.AsyncExitStack
    ) -> ArrivedBody:
        """Read the body and compare it with the signed digest.

        Raise HubRefused (413) if it is too long. A large body holds an upload slot until its response is
        sent; a large piece of an upload is in a file until then.
        """
        length = request.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 15 or int(length) > max_bytes:
            raise too_long(max_bytes)
        arrived = ArrivedBody.in_memory(b"")
        is_large = max_bytes > _SMALL and (int(length) > _SMALL or "transfer-encoding" in request.headers)
        if is_large:
            await self._take_slot(request, str(signed.node), held)
        if max_bytes:
            async with self._slots.reading(has_slot=is_large):
                if is_large and "upload" in request.path_params:
                    arrived = await held.enter_async_context(self._files.receive(request, max_bytes))
                else:
                    arrived = await read_body(request, max_bytes)
        if arrived.digest != signed.digest:
            raise HubRefused(401, "digest", "the body is not the one that was signed", hint="Send it again.")
        return arrived

    async def _take_slot(self, request: Request, node: str, held: contextlib.AsyncExitStack) -> None:
        """Take an upload slot for a large body. Raise HubRefused if the sender cannot upload."""
        self._hub.member(node)
        if "upload" in request.path_params:
            self._uploads.note_piece(node, _upload_name(request))
        await held.enter_async_context(self._slots.slot(node))

    # The routes.

    async def _run(self, request: Request, verified: VerifiedRequest) -> msgspec.Raw:
        """Return the description, encoded once for each version: a layout may have 100,000 entries."""
        run = self._hub.description()
        changing = (run.version, run.finished, run.store, run.layout is None, run.course)
        if self._described is None or self._described[0] != changing:
            self._described = changing, msgspec.Raw(encode_message(run))
        return self._described[1]

    async def _head(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        after = _number(request, "after", 1 << 40)
        wait = _number(request, "wait", _LONGEST_WAIT_S) or 0.0
        head = await self._hub.head(None if after is None else int(after), wait)
        if self._hub.is_region or self._hub.is_mirror:  # these pass on the signatures of the run's hub
            return head
        return msgspec.structs.replace(head, steps=tuple(map(self._sign_step, head.steps)))

    async def _join(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        message = decode_message(JoinRequest, verified.body)
        joined = await self._hub.join(verified.node, message)
        if self._hub.members[verified.node].quarantine or joined.role not in ("friend", "stranger"):
            return joined
        regions = open_regions(self._standing_regions(), self._hub.now())
        return msgspec.structs.replace(joined, regions=regions)

    def _standing_regions(self) -> Regions:
        members = self._hub.members
        return {node: capacity for node, capacity in self._regions.items() if not members[node].quarantine}

    async def _offer(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        if self._hub.member(verified.node).role != "region":
            raise HubRefused(403, "role", "this member was not invited as a region", hint=_REGION)
        offer = decode_message(RegionOffer, verified.body)
        try:
            check_addresses(offer.addresses)
        except HubError as error:
            raise HubRefused(422, "message", error.message, hint=error.hint) from error
        self._regions = add_offer(self._regions, verified.node, offer, self._hub.now())
        ended = ended_seats(self._hub.members.values(), verified.node)
        return RegionOrders(ended=ended, time=int(self._hub.clock()))

    async def _seat(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        """Give a member a seat at one region, and the proof with which it joins there."""
        message = decode_message(SeatRequest, verified.body)
        self._hub.member(verified.node)
        region, id_there = exact_key(message.region), exact_key(message.member)
        regions = take_seat(self._standing_regions(), message.region, self._hub.now())
        if regions is None:
            raise HubRefused(409, "seats", "this region has no seat left", hint="Try another region.")
        self._regions = {**self._regions, **regions}
        member = await self._hub.give_seat(verified.node, message.region, message.member)
        statement = AdmissionStatement(
            hub=region.raw,
            member=id_there.raw,
            invite=exact_key(member.invite).raw,
            role=member.role,
            run=self._hub.founding.name,
            expires=int(self._hub.clock()) + SEAT_S,
        )
        return SeatGrant(request=admission_request(self._key, statement, message.name))

    async def _pardon(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        self._check_owner(verified)
        await self._hub.pardon(str(request.path_params["node"]))
        return self._hub.description()

    async def _expel(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        self._check_owner(verified)
        return await self._hub.expel(str(request.path_params["node"]))

    def _check_owner(self, verified: VerifiedRequest) -> None:
        # The hub's key is accepted, too: a region or a mirror that took over has no other owner at hand.
        """Raise HubRefused (403) unless the run's owner or the holder of the hub's key asks."""
        if verified.node not in (self._hub.founding.owner, str(self._hub.id)):
            raise HubRefused(403, "role", "only the owner may do this", hint="Ask the owner of the hub.")

    async def _replica(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        after = _number(request, "after", 1 << 40)
        return self._hub.replica(verified.node, None if after is None else int(after))

    async def _leave(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        await self._hub.leave(verified.node)
        return self._hub.description()

    async def _lease(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        return await self._hub.lease(verified.node, decode_message(LeaseRequest, verified.body))

    async def _declare(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        return await self._uploads.declare(verified.node, decode_message(UpdateDeclaration, verified.body))

    async def _progress(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        return self._uploads.progress(verified.node, _upload_name(request))

    async def _append(self, request: Request, verified: VerifiedRequest) -> msgspec.Struct:
        offset = _number(request, "offset", 1 << 44)
        if offset is None:
            raise HubRefused(
                422, "message", "the offset of the piece is missing", hint="PATCH .../{id}?offset=N"
            )
        return await self._uploads.append(verified.node, _upload_name(request), int(offset), verified.arrived)

    async def _blob(self, request: Request) -> Response:
        """Serve a blob, or redirect to the object store if the client accepts that.

        Unsigned: its name is its hash, so any cache may keep it.
        """
        name = str(request.path_params["name"])
        is_name = re.fullmatch("[0-9a-f]{64}", name) is not None
        link = await self._link(request, name) if is_name else None  # first: it may take some seconds
        if not is_name or not self._hub.blobs.has(name):
            problem = Problem(
                kind="blob", message="the hub does not have this blob", hint="Request the head again."
            )
            return Response(encode_message(problem), 404, {"content-type": "application/json"})
        headers = {"etag": f'"{name}"', "cache-control": _IMMUTABLE}
        if request.headers.get("if-none-match", "") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if self._bucket is not None:
            headers["vary"] = STORE_HEADER
        if link is not None:
            elsewhere = {"location": link, "cache-control": "no-store", "vary": STORE_HEADER}
            return Response(status_code=307, headers=elsewhere)
        return _BlobResponse(
            self._hub.blobs.path(name), headers=headers, media_type="application/octet-stream"
        )

    async def _link(self, request: Request, name: str) -> str | None:
        """Return a link into the object store if the client accepts redirects there; None otherwise."""
        if self._bucket is None or request.headers.get(STORE_HEADER) != self._bucket.origin:
            return None
        return await self._bucket.link(name)

    async def _page(self, request: Request) -> Response:
        headers = {"content-security-policy": POLICY, "cache-control": "public, max-age=5"}
        return HTMLResponse(self._rendered(), headers=headers)

    async def _openapi(self, request: Request) -> Response:
        return Response(_openapi_text(), media_type="application/json")

    async def _figures(self, request: Request) -> Response:
        return Response(self._measured(), media_type="text/plain; version=0.0.4")


class _BlobResponse(FileResponse):
    """File response in small parts, because those for slow readers wait in memory."""

    chunk_size = 32 << 10


@functools.cache
def _openapi_text() -> bytes:
    return msgspec.json.encode(openapi_document())


class _CachedText:
    """Text that is rendered at most once a second, for any number of requests."""

    def __init__(self, make: Callable[[], str | bytes], now: Callable[[], float]) -> None:
        self._make, self._now = make, now
        self._made: tuple[float, str | bytes] | None = None

    def __call__(self) -> str | bytes:
        now = self._now()
        if self._made is None or now - self._made[0] >= _KEPT_S:
            self._made = now, self._make()
        return self._made[1]


def make_app(reception: HubApp) -> Starlette:
    """Build the ASGI application; unknown routes get a JSON problem."""

    def plainly(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        problem = Problem(kind="route", message="there is no such route", hint=_SEE)
        return Response(encode_message(problem), status, {"content-type": "application/json"})

    return Starlette(routes=reception.routes(), exception_handlers={HTTPException: plainly})


def signed_response(
    key: NodeKey, request_headers: Mapping[str, str], status: int, body: bytes, time: float
) -> Response:
    """Make a JSON response; sign it if the request was signed."""
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    signature = request_signature(request_headers)
    if signature is not None:
        headers |= sign_response(key, status, body, signature, time)
    return Response(body, status, headers)


def error_response(
    key: NodeKey, request_headers: Mapping[str, str], error: HubRefused, time: float
) -> Response:
    """Make the response that reports a rejection."""
    return signed_response(key, request_headers, error.status, encode_message(problem_of(error, time)), time)


def problem_of(error: HubRefused, time: float) -> Problem:
    """Return the body that describes a rejection; ``time`` is the hub's clock."""
    return Problem(
        kind=error.kind,
        message=error.message[:2000],
        hint=error.hint[:2000],
        time=time,
        retry_s=error.retry_s,
        offset=error.offset,
        quarantined=error.kind == "quarantine",
    )


def _too_many(wait_s: float) -> HubRefused:
    return HubRefused(429, "rate", "this machine sent too many requests", hint=_LATER, retry_s=wait_s)


def _number(request: Request, name: str, max_value: float) -> float | None:
    """Return a non-negative number of the query; None if it is missing.

    Raise HubRefused (422) if it is invalid or given twice.
    """
    given = request.query_params.getlist(name)
    if not given:
        return None
    try:
        value = float(given[0]) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", given[0]) else math.nan
    except ValueError:
        value = math.nan
    if len(given) > 1 or not 0 <= value <= max_value:
        raise HubRefused(422, "message", f"{name} must be one number from 0 to {max_value:g}", hint=_SEE)
    return value


def _upload_name(request: Request) -> str:
    """Return the upload id in the path. Raise HubRefused (404) if it is malformed."""
    name = str(request.path_params["upload"])
    if not _UPLOAD.fullmatch(name):
        raise HubRefused(404, "upload", "there is no such upload", hint="Declare it: POST /v1/uploads.")
    return name


_LATER = "Try again later."
_REGION = "Ask the owner for one that is: `barnraise invite --region`."
_SEE = "See docs/hub.md."
