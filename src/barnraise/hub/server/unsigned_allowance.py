"""Allowance for clients that are no members: requests and bytes, per source and in total.

Anyone may read a hub, so anyone could keep a home's uplink full. Members sign their requests and are not
limited here. The bytes of all others together stay below a rate; their answers come more slowly then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from barnraise.core.flow.rate_limit import RateLimit

_REQUESTS_PER_S, _REQUESTS_AT_ONCE = 50.0, 500.0  # of all
_OF_ONE_PER_S, _OF_ONE_AT_ONCE = 10.0, 100.0  # from one source
_PIECE = 32 << 10  # bytes that are sent at once
_BURST = 1 << 20  # bytes, before the rate counts
_ANSWERS, _ANSWERS_OF_ONE = 64, 16  # that are being sent
_FULL_S = 5.0  # until another attempt, if there are too many answers
_SHARE = 0.5  # of the rate, for one source


class UnsignedLimits(NamedTuple):
    """Limits of a hub for clients that are no members.

    ``bytes_s``: 0 for no limit. ``forwarded``: believe the address that a proxy on this machine names.
    """

    bytes_s: float = 0.25e6
    forwarded: bool = False


class UnsignedAllowance:
    """Counts of requests and bytes of clients that are no members. For one event loop."""

    def __init__(self, bytes_s: float, now: Callable[[], float]) -> None:
        self._now = now
        self._requests = RateLimit(
            _OF_ONE_PER_S, _OF_ONE_AT_ONCE, in_total=_REQUESTS_PER_S, total_burst=_REQUESTS_AT_ONCE
        )
        self._bytes: RateLimit | None = None
        if bytes_s:
            self._bytes = RateLimit(
                _SHARE * bytes_s, _SHARE * _BURST, in_total=bytes_s, total_burst=float(_BURST)
            )
        self._answers = Counter[str]()

    def take_request(self, source: str) -> float:
        """Count a request and return 0.0, or return the seconds to wait. An empty source counts in total."""
        if self._answers.total() >= _ANSWERS or (source and self._answers[source] >= _ANSWERS_OF_ONE):
            return _FULL_S
        return self._requests.take(source or None, self._now())

    def slowed(self, response: Response, source: str) -> Response:
        """Return a response that is sent at the rate that is left."""
        return response if self._bytes is None else _SlowedResponse(response, self, source)

    async def wait_for(self, source: str, count: int) -> None:
        """Wait until this number of bytes may be sent to this source."""
        assert self._bytes is not None
        while (wait_s := self._bytes.take(source or None, self._now(), count)) > 0:
            await asyncio.sleep(wait_s)

    def begin(self, source: str) -> None:
        """Count an answer that is being sent."""
        self._answers[source] += 1

    def end(self, source: str) -> None:
        """Forget an answer that was sent, or broken off."""
        self._answers[source] -= 1
        if not self._answers[source]:
            del self._answers[source]


class _SlowedResponse(Response):
    """Response whose body is sent in pieces, each when the allowance permits it."""

    def __init__(self, response: Response, allowance: UnsignedAllowance, source: str) -> None:
        self._response, self._allowance, self._source = response, allowance, source
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_slowed(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            body, is_last = message.get("body", b""), not message.get("more_body", False)
            for first in range(0, len(body), _PIECE):
                part = body[first : first + _PIECE]
                await self._allowance.wait_for(self._source, len(part))
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if is_last:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        leaving = asyncio.create_task(_until_gone(receive))
        sending = asyncio.create_task(self._response(scope, receive, send_slowed))
        self._allowance.begin(self._source)
        try:
            await asyncio.wait((leaving, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # raises what it raised
        finally:
            self._allowance.end(self._source)
            leaving.cancel()
            sending.cancel()


async def _until_gone(receive: Receive) -> None:
    """Return when the client has disconnected. The server would go on with the answer otherwise."""
    while (await receive())["type"] != "http.disconnect":
        pass
