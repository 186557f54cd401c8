"""Answers of a hub over HTTP: signed if the question was."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.messages import Problem
from barnraise.hub.protocol.signatures import request_signature, sign_response
from barnraise.identity.keys import NodeKey


def signed_answer(key: NodeKey, asked: Mapping[str, str], status: int, body: bytes, time: float) -> Response:
    """``asked`` are the headers of the question."""
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    signature = request_signature(asked)
    if signature is not None:
        headers |= sign_response(key, status, body, signature, time)
    return Response(body, status, headers)


def problem_of(error: HubRefused, time: float) -> Problem:
    return Problem(
        kind=error.kind,
        message=error.message[:2000],
        hint=error.hint[:2000],
        time=time,
        retry_s=error.retry_s,
        offset=error.offset,
        quarantined=error.kind == "quarantine",
    )
