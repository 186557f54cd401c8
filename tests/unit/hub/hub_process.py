"""Real hub process on loopback, and a minimal member."""

from __future__ import annotations

import hashlib
import io
import time
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import torch

from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    HubProgress,
    JoinResponse,
    Lease,
    LeaseRequest,
    Problem,
    RoundConfig,
    RunDescription,
    UpdateDeclaration,
    VectorEntry,
    VectorLayout,
    VersionHead,
    decode_message,
    encode_message,
)
from barnraise.hub.protocol.signatures import sign_request, verify_response
from barnraise.hub.protocol.vector_file import VectorForm, add_vector, encode_vector
from barnraise.identity import NodeId, NodeKey
from benchmarks.hub import process

T = TypeVar("T", bound=msgspec.Struct)
LAYOUT = VectorLayout((VectorEntry("weight", (40, 128), "float32"), VectorEntry("bias", (77,), "float32")))
TERMS = RoundConfig(chunk=2048, round_s=2.0, first_batches=2, base_every=3, grace=0.1)


class Refused(AssertionError):
    """Error response of the hub."""

    def __init__(self, status: int, problem: Problem) -> None:
        self.status, self.problem = status, problem
        super().__init__(f"{status} {problem.kind}: {problem.message}")


class HubProcess(process.HubProcess):
    """Hub process without TLS, for tests of the protocol."""

    def __init__(self, directory: Path, terms: RoundConfig | None = TERMS, **given: Any) -> None:
        super().__init__(directory, terms, name="fireside", plain=True, **given)


_HTTP = httpx.Client(verify=False, trust_env=False, timeout=60.0)  # certificates take long to read


def plainly(url: str, **given: Any) -> httpx.Response:
    """Send an unsigned request and return the response."""
    return _HTTP.request(given.pop("method", "GET"), url, **given)


class Friend:
    """Minimal member with one key."""

    def __init__(self, address: str, hub: NodeId, key: NodeKey | None = None) -> None:
        self.address, self.hub, self.key = address, hub, key or NodeKey.generate()
        self.http = httpx.Client(timeout=120.0, trust_env=False, verify=False)  # longer than it waits
        self.state = torch.zeros(LAYOUT.numel)
        self.version: int | None = None

    def ask(
        self, method: str, path: str, kind: type[T], body: msgspec.Struct | bytes = b"", query: str = ""
    ) -> T:
        data = body if isinstance(body, bytes) else encode_message(body)
        url = f"{self.address}{path}" + (f"?{query}" if query else "")
        at, problem = time.time(), None
        for _ in range(2):
            headers = sign_request(self.key, method, path, query, data, self.hub, at)
            answer = self.http.request(method, url, content=data, headers=headers)
            verify_response(self.hub, answer.status_code, answer.headers, answer.content, headers)
            if answer.status_code == 200:
                return decode_message(kind, answer.content)
            problem = decode_message(Problem, answer.content)
            if problem.kind != "clock" or not problem.time:
                break
            at = problem.time  # a hub that began again takes nothing that was signed in its last second
        assert problem is not None
        raise Refused(answer.status_code, problem)

    def close(self) -> None:
        self.http.close()

    def join(self, invite: Invite, name: str = "ann") -> JoinResponse:
        return self.ask("POST", "/v1/members", JoinResponse, invite.request(self.key.id, name))

    def describe(self) -> RunDescription:
        return self.ask("GET", "/v1/run", RunDescription)

    def pull(self, folder: Path, wait: float = 60.0) -> VersionHead:
        """Apply all steps to the newest version."""
        after = "" if self.version is None else f"after={self.version}&"
        head = self.ask("GET", "/v1/head", VersionHead, query=f"{after}wait={wait:g}")
        for step in head.steps:
            data = self.http.get(f"{self.address}/v1/blobs/{step.sha256}").raise_for_status().content
            assert hashlib.sha256(data).hexdigest() == step.sha256
            file = folder / f"{id(self)}-{step.version}"
            file.write_bytes(data)
            form = VectorForm(LAYOUT.numel, TERMS.chunk, step.codec, step.version)
            add_vector(file, form, self.state, is_base=step.kind == "base")
            self.version = step.version
        return head

    def lease(self, rate: float = 0.0) -> Lease:
        message = LeaseRequest(samples_per_s=rate, version=self.version or 0)
        return self.ask("POST", "/v1/leases", Lease, message)

    def push_base(self, flat: torch.Tensor, course: HubDataOrder) -> HubProgress:
        data = encoded(flat, "fp32", 0)
        return self.send(
            UpdateDeclaration(kind="base", sha256=_hash(data), size=len(data), layout=LAYOUT, course=course),
            data,
        )

    def push(self, lease: Lease, update: torch.Tensor, **changes: object) -> HubProgress:
        data = encoded(update, TERMS.codec, lease.version)
        return self.send(declared(lease, data, **changes), data)

    def send(self, declaration: UpdateDeclaration, data: bytes, piece: int = 1 << 20) -> HubProgress:
        progress = self.ask("POST", "/v1/uploads", HubProgress, declaration)
        while not progress.accepted:
            part = data[progress.offset : progress.offset + piece]
            path = f"/v1/uploads/{progress.id}"
            progress = self.ask("PATCH", path, HubProgress, part, query=f"offset={progress.offset}")
        return progress


def declared(lease: Lease, data: bytes, **changes: object) -> UpdateDeclaration:
    declaration = UpdateDeclaration(
        sha256=_hash(data),
        size=len(data),
        lease=lease.id,
        version=lease.version,
        samples=lease.samples,
        loss=1.5,
    )
    return msgspec.structs.replace(declaration, **changes)


def encoded(flat: torch.Tensor, codec: str, version: int) -> bytes:
    sink = io.BytesIO()
    encode_vector(sink, flat, VectorForm(flat.numel(), TERMS.chunk, codec, version))
    return sink.getvalue()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
