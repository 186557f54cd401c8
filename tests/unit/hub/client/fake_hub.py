"""Fake hub in memory behind httpx: real signatures and vectors, one member, a line that fails on demand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import torch

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.messages import (
    HubProgress,
    Lease,
    LeaseRequest,
    Problem,
    RoundConfig,
    RunDescription,
    SampleSpan,
    UpdateDeclaration,
    VersionHead,
    VersionStep,
    decode_message,
    encode_message,
)
from barnraise.hub.protocol.signatures import request_signature, sign_response, verify_request
from barnraise.hub.protocol.vector_file import VectorForm, add_vector, encode_vector
from barnraise.identity.keys import NodeKey

Fault = Callable[[httpx.Request, Callable[[], httpx.Response]], httpx.Response]
CHUNK = 1 << 10


def lost_answer(request: httpx.Request, answer: Callable[[], httpx.Response]) -> httpx.Response:
    """Handle the request and lose the response."""
    answer()
    raise httpx.ReadError("the line broke", request=request)


def no_connection(request: httpx.Request, answer: Callable[[], httpx.Response]) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def proxys_page(request: httpx.Request, answer: Callable[[], httpx.Response]) -> httpx.Response:
    return httpx.Response(502, html="<h1>Bad Gateway</h1>")


def denied(request: httpx.Request, answer: Callable[[], httpx.Response]) -> httpx.Response:
    """Answer as a proxy that denies access."""
    return httpx.Response(404, html="<h1>Not Found</h1>")


def changed(request: httpx.Request, answer: Callable[[], httpx.Response]) -> httpx.Response:
    response = answer()
    return httpx.Response(response.status_code, content=b"?" + response.content[1:], headers=response.headers)


def longer(request: httpx.Request, answer: Callable[[], httpx.Response]) -> httpx.Response:
    response = answer()
    kept = {name: value for name, value in response.headers.items() if name != "content-length"}
    return httpx.Response(response.status_code, content=response.content + b"?", headers=kept)


def streamed(response: httpx.Response) -> httpx.Response:
    """Return the response unread, as from a network."""
    return httpx.Response(
        response.status_code, headers=response.headers, stream=httpx.ByteStream(response.content)
    )


class FakeHub:
    """Hub that applies half of each update at once.

    A lease has eight positions; the run ends after ``rounds``.
    """

    def __init__(self, room: Path, *, rounds: int = 3, clock_ahead_s: float = 0.0) -> None:
        self.key = NodeKey.generate()
        self.room, self.rounds, self.ahead = room, rounds, clock_ahead_s
        self.terms = RoundConfig(chunk=CHUNK, codec="int8", delta_codec="fp32")
        self.faults: list[Fault | None] = []
        self.refuse: list[tuple[int, Problem]] = []
        self.requests: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.steps: list[VersionStep] = []
        self.declared: UpdateDeclaration | None = None
        self.arrived = bytearray()
        self.layout = self.course = None
        self.updates: list[torch.Tensor] = []
        self.left = 0
        self.piece = 700
        self.signs = True

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    # the line

    def _handle(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(f"{request.method} {request.url.path}")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            return streamed(fault(request, lambda: self._answer(request)))
        return streamed(self._answer(request))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/v1/blobs/"):
            return self._blob(request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        clock = time.time() + self.ahead
        try:
            query = request.url.query.decode()
            signed = verify_request(request.method, request.url.path, query, headers, self.key.id)
            assert hashlib.sha256(request.content).digest() == signed.digest
            if abs(signed.created - clock) > 120:
                raise HubRefused(401, "clock", "your clock is wrong")
            if self.refuse and request.method in ("PATCH", "POST"):
                status, problem = self.refuse.pop(0)
                return self._signed(headers, status, problem)
            return self._signed(headers, 200, self._route(request))
        except HubRefused as error:
            problem = Problem(kind=error.kind, message=error.message, hint=error.hint, time=clock)
            return self._signed(headers, error.status, problem)

    def _signed(self, headers: dict[str, str], status: int, message: msgspec.Struct) -> httpx.Response:
        body = encode_message(message)
        signature = request_signature(headers) or ""
        signed = sign_response(self.key, status, body, signature, time.time()) if self.signs else {}
        return httpx.Response(status, content=body, headers=signed)

    # what a hub does

    def _route(self, request: httpx.Request) -> msgspec.Struct:
        match request.method, request.url.path:
            case "GET", "/v1/run":
                return self._described()
            case "POST", "/v1/leases":
                return self._lease(decode_message(LeaseRequest, request.content))
            case "GET", "/v1/head":
                return self._head(request.url.params.get("after"))
            case "POST", "/v1/uploads":
                declared = decode_message(UpdateDeclaration, request.content)
                if declared != self.declared:
                    self.declared, self.arrived = declared, bytearray()
                return self._progress()
            case "PATCH", path if path.startswith("/v1/uploads/"):
                if int(request.url.params["offset"]) == len(self.arrived):
                    self.arrived += request.content
                    self._take_whole()
                return self._progress()
            case "POST", "/v1/leave":
                self.left += 1
                return self._described()
        raise HubRefused(404, "path", f"there is no {request.url.path}")

    def _described(self) -> RunDescription:
        me = str(self.key.id)
        return RunDescription(
            protocol=1,
            hub=me,
            name="test",
            owner=me,
            terms=self.terms,
            layout=self.layout,
            course=self.course,
        )

    def _lease(self, request: LeaseRequest) -> Lease:
        number = len(self.updates)
        if number >= self.rounds:
            raise HubRefused(410, "finished", "the run is over")
        return Lease(
            id=f"{number:032x}",
            version=request.version,
            spans=(SampleSpan(0, 8 * number, 8 * number + 8),),
            steps=1,
            seconds=30,
            void_s=60,
            covered=8 * number,
            members=1,
        )

    def _head(self, after: str | None) -> VersionHead:
        steps = [step for step in self.steps if after is None or step.version > int(after)]
        return VersionHead(version=self.steps[-1].version, steps=tuple(steps), waits_for="another member")

    def _progress(self) -> HubProgress:
        assert self.declared is not None
        done = len(self.arrived) == self.declared.size
        return HubProgress(
            id="ab" * 16, offset=len(self.arrived), size=self.declared.size, piece=self.piece, accepted=done
        )

    def _take_whole(self) -> None:
        declared = self.declared
        assert declared is not None
        if len(self.arrived) != declared.size:
            return
        assert hashlib.sha256(self.arrived).hexdigest() == declared.sha256
        path = self.room / "arrived"
        path.write_bytes(self.arrived)
        if declared.kind == "base":
            self.layout, self.course = declared.layout, declared.course
            self._publish("base", 0, bytes(self.arrived), self.terms.base_codec)
            return
        assert self.layout is not None
        form = VectorForm(self.layout.numel, CHUNK, self.terms.codec, declared.version)
        change = torch.zeros(self.layout.numel)
        add_vector(path, form, change)
        self.updates.append(change)
        version = len(self.steps)
        with (self.room / "delta").open("wb") as file:
            encode_vector(file, -0.5 * change, VectorForm(self.layout.numel, CHUNK, "fp32", version))
        self._publish("delta", version, (self.room / "delta").read_bytes(), "fp32")

    def _publish(self, kind: str, version: int, data: bytes, codec: str) -> None:
        name = hashlib.sha256(data).hexdigest()
        self.blobs[name] = data
        self.steps.append(VersionStep(kind, version, name, len(data), codec))  # type: ignore[arg-type]

    def _blob(self, request: httpx.Request) -> httpx.Response:
        data = self.blobs.get(request.url.path.rpartition("/")[2])
        if data is None:
            return httpx.Response(404)
        first = request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        return httpx.Response(206 if int(first) else 200, content=data[int(first) :])
