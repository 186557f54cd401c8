"""The hub's routes in OpenAPI, made from the messages' own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from barnraise.hub.protocol.messages import (
    PROTOCOL,
    RegionOffer,
    HubProgress,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseRequest,
    Problem,
    RunDescription,
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
    method: str
    path: str
    says: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    is_bytes: bool = False  # the body, or the answer if it has no type
    query: Sequence[str] = ()


OPERATIONS = (
    ApiOperation("get", "/v1/run", "What the run is.", RunDescription),
    ApiOperation(
        "get", "/v1/head", "The blobs from a version to the newest.", VersionHead, query=("after", "wait")
    ),
    ApiOperation("get", "/v1/blobs/{name}", "A blob, whole or a range of it.", None, is_bytes=True),
    ApiOperation("post", "/v1/members", "Join with an invite's token.", JoinResponse, JoinRequest),
    ApiOperation(
        "post", "/v1/regions", "As a region, take in who joins from now on.", RunDescription, RegionOffer
    ),
    ApiOperation("post", "/v1/members/{node}/pardon", "Let a member out of quarantine.", RunDescription),
    ApiOperation("post", "/v1/members/{node}/expel", "Send a member away.", RunDescription),
    ApiOperation("get", "/v1/replica", "What a mirror takes over.", LogReplica, query=("after",)),
    ApiOperation("post", "/v1/leave", "Give the lease back.", RunDescription),
    ApiOperation("post", "/v1/leases", "Take samples to train on.", Lease, LeaseRequest),
    ApiOperation("post", "/v1/uploads", "Say what will be uploaded.", HubProgress, UpdateDeclaration),
    ApiOperation("get", "/v1/uploads/{upload}", "How much has arrived.", HubProgress),
    ApiOperation(
        "patch", "/v1/uploads/{upload}", "The next piece.", HubProgress, is_bytes=True, query=("offset",)
    ),
)
_ELSEWHERE = "It is in the object store that the request's `barnraise-store` names."
_STATUSES = {
    "401": "The signature is missing, wrong, too old or was used before.",
    "403": "This machine may not do this.",
    "404": "There is nothing of this name.",
    "408": "The body took too long to arrive.",
    "409": "It is over or not yet possible; the problem says what to do.",
    "413": "Too long.",
    "422": "The content cannot be used.",
    "429": "Too often.",
    "503": "The hub cannot do it now.",
}


def describe() -> dict[str, Any]:
    types = [one for operation in OPERATIONS for one in (operation.answer, operation.body) if one is not None]
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


def _operation(one: ApiOperation) -> dict[str, Any]:
    names = [name for name in _NAMES if f"{{{name}}}" in one.path]
    places = [{"name": name, "in": "path", "required": True, "schema": _NAMES[name]} for name in names]
    places += [{"name": name, "in": "query", "required": False, "schema": _NUMBER} for name in one.query]
    found: dict[str, Any] = {
        "summary": one.says,
        "parameters": places,
        "responses": {"200": {"description": one.says, "content": _content(one.answer)}},
    }
    if one.is_bytes and one.answer is None:
        found["responses"]["307"] = {"description": _ELSEWHERE}
    problems = {"content": _content(Problem)}
    found["responses"] |= {status: {"description": text} | problems for status, text in _STATUSES.items()}
    if one.body is not None or (one.is_bytes and one.answer is not None):
        found["requestBody"] = {"required": True, "content": _content(one.body)}
    return found


def _content(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    if kind is None:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
