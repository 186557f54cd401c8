"""OpenAPI description of the hub's routes, made from the message types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from barnraise.hub.protocol.messages import (
    PROTOCOL,
    ExpelResponse,
    HubProgress,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseRequest,
    Problem,
    RegionOffer,
    RegionOrders,
    RunDescription,
    SeatGrant,
    SeatRequest,
    UpdateDeclaration,
    VersionHead,
)
from barnraise.hub.storage.log import LogReplica

_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_NAMES: Mapping[str, Mapping[str, Any]] = {
    "name": _SHA256,
    "upload": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "node": {"type": "string", "pattern": "^[0-9A-Z-]{69}$"},
}
_NUMBER = {"type": "number", "minimum": 0}


class ApiOperation(NamedTuple):
    """One HTTP operation of the API.

    ``is_bytes``: the request body is bytes, or the response if it has no type.
    """

    method: str
    path: str
    says: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    is_bytes: bool = False  # the body, or the answer if it has no type
    query: Sequence[str] = ()


OPERATIONS = (
    ApiOperation("get", "/v1/run", "Description of the run.", RunDescription),
    ApiOperation(
        "get", "/v1/head", "The blobs from a version to the newest.", VersionHead, query=("after", "wait")
    ),
    ApiOperation("get", "/v1/blobs/{name}", "A blob, whole or a range of it.", None, is_bytes=True),
    ApiOperation("post", "/v1/members", "Join with the proof of an invite.", JoinResponse, JoinRequest),
    ApiOperation("post", "/v1/regions", "As a region, offer seats.", RegionOrders, RegionOffer),
    ApiOperation("post", "/v1/seats", "Take a seat at a region.", SeatGrant, SeatRequest),
    ApiOperation("post", "/v1/members/{node}/pardon", "Let a member out of quarantine.", RunDescription),
    ApiOperation("post", "/v1/members/{node}/expel", "Expel a member.", ExpelResponse),
    ApiOperation("get", "/v1/replica", "Copy of the log for a mirror.", LogReplica, query=("after",)),
    ApiOperation("post", "/v1/leave", "Give the lease back.", RunDescription),
    ApiOperation("post", "/v1/leases", "Lease samples to train on.", Lease, LeaseRequest),
    ApiOperation("post", "/v1/uploads", "Declare an upload.", HubProgress, UpdateDeclaration),
    ApiOperation("get", "/v1/uploads/{upload}", "Progress of an upload.", HubProgress),
    ApiOperation(
        "patch",
        "/v1/uploads/{upload}",
        "Upload the next piece.",
        HubProgress,
        is_bytes=True,
        query=("offset",),
    ),
)
_ELSEWHERE = "The blob is in the object store that the request's `barnraise-store` header names."
_STATUSES = {
    "401": "The signature is missing, wrong, too old or was used before.",
    "403": "This machine may not do this.",
    "404": "There is no object of this name.",
    "408": "The body took too long to arrive.",
    "409": "The request is too late or too early; the problem says what to do.",
    "413": "The body is too long.",
    "422": "The content cannot be used.",
    "429": "Too many requests.",
    "503": "The hub cannot do it now.",
}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of the hub's routes."""
    types = [
        message_type
        for operation in OPERATIONS
        for message_type in (operation.answer, operation.body)
        if message_type is not None
    ]
    _, schemas = msgspec.json.schema_components(
        [*dict.fromkeys(types), Problem], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Barnraise hub", "version": str(PROTOCOL)},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(operation: ApiOperation) -> dict[str, Any]:
    names = [name for name in _NAMES if f"{{{name}}}" in operation.path]
    places = [{"name": name, "in": "path", "required": True, "schema": _NAMES[name]} for name in names]
    places += [
        {"name": name, "in": "query", "required": False, "schema": _NUMBER} for name in operation.query
    ]
    document: dict[str, Any] = {
        "summary": operation.says,
        "parameters": places,
        "responses": {"200": {"description": operation.says, "content": _content(operation.answer)}},
    }
    if operation.is_bytes and operation.answer is None:
        document["responses"]["307"] = {"description": _ELSEWHERE}
    problems = {"content": _content(Problem)}
    document["responses"] |= {status: {"description": text} | problems for status, text in _STATUSES.items()}
    if operation.body is not None or (operation.is_bytes and operation.answer is not None):
        document["requestBody"] = {"required": True, "content": _content(operation.body)}
    return document


def _content(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    if kind is None:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
