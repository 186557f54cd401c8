"""Emulated members of a hub, thousands in one process: real HTTP, real signatures, real payloads.

A leaf is a key, a connection and the version that it holds. It speaks HTTP/1.1 by a few lines of its own,
because at a thousand members an ordinary client would cost more than the hub. It trains nothing: it sends
noise, chunk by chunk drawn from a few that are encoded once, so that no two leaves send the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    HubProgress,
    JoinResponse,
    Lease,
    LeaseRequest,
    Problem,
    RunDescription,
    UpdateDeclaration,
    VectorEntry,
    VectorLayout,
    VersionHead,
    decode_message,
    encode_message,
)
from barnraise.hub.protocol.signatures import sign_request, verify_response
from barnraise.hub.protocol.vector_file import MAGIC, VectorForm
from barnraise.identity.keys import NodeKey
from benchmarks.hub.process import UNVERIFIED

T = TypeVar("T", bound=msgspec.Struct)

_VARIANTS = 8
_CLAIMED = 2.0  # samples per second: a lease that a real member would train for two minutes
_CALL_S = 300.0
_WAIT_S = 25.0
_LATER = ("no-base", "all-lent", "delivered", "busy", "rate")
_LOST = (OSError, EOFError, TimeoutError)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """A connection that is kept, and every byte that went through it (without what TLS adds)."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._tls = UNVERIFIED if parts.scheme == "https" else None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.sent = self.received = 0

    async def call(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        for attempt in (0, 1):  # a kept connection may have been closed by the other side
            fresh = self._streams is None
            try:
                return await asyncio.wait_for(self._call(method, target, headers, body), _CALL_S)
            except _LOST:
                self.close()
                if fresh or attempt:
                    raise
        raise AssertionError("unreachable")

    async def _call(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        reader, writer = self._streams
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._host}:{self._port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()
        writer.write(head)
        writer.write(body)
        await writer.drain()
        self.sent += len(head) + len(body)
        begin = await reader.readuntil(b"\r\n\r\n")
        first, *rest = begin.decode("latin-1").split("\r\n")
        response_headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in rest)
        }
        content = await reader.readexactly(int(response_headers.get("content-length", "0")))
        self.received += len(begin) + len(content)
        if response_headers.get("connection") == "close":
            self.close()
        return Answer(int(first.split()[1]), response_headers, content)

    def close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(OSError):
                self._streams[1].close()
            self._streams = None


class Payloads:
    """Updates of one form that differ from leaf to leaf."""

    def __init__(self, form: VectorForm, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._chunks = [
            [
                form.encode(torch.randn(form.chunk_size(index), generator=generator).mul_(1e-2), index)
                for _ in range(_VARIANTS)
            ]
            for index in range(form.count)
        ]

    def draw(self, source: random.Random) -> bytes:
        return MAGIC + b"".join(source.choice(variants) for variants in self._chunks)


class Leaf:
    """One emulated member of a hub."""

    def __init__(self, invite: Invite, name: str, key: NodeKey | None = None) -> None:
        self.invite, self.name = invite, name
        self.key = key or NodeKey.generate()
        self.wire = Wire(invite.addresses[0])
        self.version: int | None = None
        self.lease: Lease | None = None
        self.pushes: list[float] = []
        self.pulls: list[float] = []

    async def ask(
        self, method: str, path: str, kind: type[T], body: msgspec.Struct | bytes = b"", query: str = ""
    ) -> T:
        """Send a signed request and return the verified response; raise HubRefused with the hub's reason."""
        data = body if isinstance(body, bytes) else encode_message(body)
        headers = sign_request(self.key, method, path, query, data, self.invite.hub_id, time.time())
        target = f"{path}?{query}" if query else path
        answer = await self.wire.call(method, target, headers, data)
        verify_response(self.invite.hub_id, answer.status, answer.headers, answer.body, headers)
        if answer.status >= 300:
            problem = decode_message(Problem, answer.body)
            raise HubRefused(
                answer.status, problem.kind, problem.message, hint=problem.hint, retry_s=problem.retry_s
            )
        return decode_message(kind, answer.body)

    async def join(self) -> RunDescription:
        """Join the hub, and retry when the hub's rate limit for new members says so."""
        request = self.invite.request(self.key.id, self.name)
        while True:
            try:
                return (await self.ask("POST", "/v1/members", JoinResponse, request)).description
            except HubRefused as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(error.retry_s + random.uniform(0.0, 5.0))

    async def take_lease(self) -> None:
        assert self.version is not None
        request = LeaseRequest(samples_per_s=_CLAIMED, version=self.version)
        self.lease = await self.ask("POST", "/v1/leases", Lease, request)

    async def upload(self, declaration: UpdateDeclaration, data: bytes) -> HubProgress:
        progress = await self.ask("POST", "/v1/uploads", HubProgress, declaration)
        while not progress.accepted:
            piece = data[progress.offset : progress.offset + progress.piece]
            where, query = f"/v1/uploads/{progress.id}", f"offset={progress.offset}"
            progress = await self.ask("PATCH", where, HubProgress, piece, query)
        return progress

    async def push(self, data: bytes) -> HubProgress:
        assert self.lease is not None
        begin, lease = time.monotonic(), self.lease
        declaration = UpdateDeclaration(
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            lease=lease.id,
            version=lease.version,
            samples=lease.samples,
            loss=1.0,
        )
        progress = await self.upload(declaration, data)
        self.lease = None
        self.pushes.append(time.monotonic() - begin)
        return progress

    async def pull(self) -> bool:
        """Wait for a newer version and fetch its blobs; return False if there is none yet."""
        query = f"wait={_WAIT_S:g}" if self.version is None else f"after={self.version}&wait={_WAIT_S:g}"
        head = await self.ask("GET", "/v1/head", VersionHead, query=query)
        begin = time.monotonic()
        for step in head.steps:
            path = f"/v1/blobs/{step.sha256}"
            headers = sign_request(self.key, "GET", path, "", b"", self.invite.hub_id, time.time())
            answer = await self.wire.call("GET", path, headers, b"")
            if answer.status != 200 or hashlib.sha256(answer.body).hexdigest() != step.sha256:
                raise ValueError(f"version {step.version} came as {answer.status} with another content")
        if not head.steps:
            return False
        self.version = head.version
        self.pulls.append(time.monotonic() - begin)
        return True


def layout_of(numel: int) -> VectorLayout:
    return VectorLayout((VectorEntry("w", (numel,), "float32"),))


async def create_run(owner: Leaf, numel: int, batch: int = 32) -> RunDescription:
    """Join as the owner and push the base."""
    description = await owner.join()
    layout, terms = layout_of(numel), description.terms
    form = VectorForm(numel, terms.chunk, terms.base_codec, 0)
    generator = torch.Generator().manual_seed(1)
    data = MAGIC + b"".join(
        form.encode(torch.randn(form.chunk_size(index), generator=generator), index)
        for index in range(form.count)
    )
    course = HubDataOrder(samples=1 << 40, batch=batch, epochs=1 << 10)
    sha256 = hashlib.sha256(data).hexdigest()
    declaration = UpdateDeclaration(kind="base", sha256=sha256, size=len(data), layout=layout, course=course)
    await owner.upload(declaration, data)
    return await owner.ask("GET", "/v1/run", RunDescription)


class Round(NamedTuple):
    """Times of the whole crowd in one round, in seconds, and the number of counted updates."""

    lease_s: float
    push_s: float
    commit_and_pull_s: float
    counted: int
    refused: dict[str, int]

    @property
    def seconds(self) -> float:
        return self.lease_s + self.push_s + self.commit_and_pull_s


async def play_round(
    leaves: Sequence[Leaf],
    description: RunDescription,
    numel: int,
    seed: int,
    mark: Callable[[], None] = lambda: None,
) -> Round:
    """Run one round without training: all members lease, then push at once, then pull the new version.

    ``mark`` is called before and after each of the three phases.
    """
    refused: dict[str, int] = {}
    mark()
    begin = time.monotonic()
    await asyncio.gather(*[_leased(leaf, refused) for leaf in leaves])
    leased = time.monotonic()
    mark()
    source = random.Random(seed)
    some = next(leaf.lease for leaf in leaves if leaf.lease is not None)
    form = VectorForm(numel, description.terms.chunk, description.terms.codec, some.version)
    payloads = Payloads(form, seed)
    mark()
    ready = time.monotonic()
    counted = await asyncio.gather(*[_pushed(leaf, payloads.draw(source), refused) for leaf in leaves])
    pushed = time.monotonic()
    mark()
    mark()
    await asyncio.gather(*[_pulled(leaf) for leaf in leaves])
    ended = time.monotonic()
    mark()
    return Round(leased - begin, pushed - ready, ended - pushed, sum(counted), refused)


async def _leased(leaf: Leaf, refused: dict[str, int]) -> None:
    deadline = time.monotonic() + _CALL_S
    while leaf.lease is None and time.monotonic() < deadline:
        try:
            await leaf.take_lease()
        except HubRefused as error:
            refused[error.kind] = refused.get(error.kind, 0) + 1
            if error.kind not in _LATER:
                return
            await asyncio.sleep(random.uniform(0.5, 1.5))  # a region asks its parent first


async def _pushed(leaf: Leaf, data: bytes, refused: dict[str, int]) -> bool:
    if leaf.lease is None:
        return False
    try:
        await leaf.push(data)
    except HubRefused as error:
        refused[error.kind] = refused.get(error.kind, 0) + 1
        leaf.lease = None
        return False
    return True


async def _pulled(leaf: Leaf) -> None:
    deadline = time.monotonic() + _CALL_S
    while not await leaf.pull():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no version after {leaf.version} in {_CALL_S:g} s")
