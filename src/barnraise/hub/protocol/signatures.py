"""HTTP Message Signatures (RFC 9421) over Ed25519, in the one form that hubs and members use.

A request signature covers method, path, query, the digest of the body (RFC 9530) and the hub's id. A response
signature covers the status, the digest and the request signature. Server names and addresses are not covered,
so a proxy or tunnel may stand between. Headers can be verified alone, so no body is read before its sender is
known.

There is no general parser before authentication; tests compare this form with a reference library.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from barnraise.core.errors import HubError, HubRefused, IdentityError
from barnraise.identity.keys import NodeKey, verify_signature
from barnraise.identity.node_id import NodeId

WINDOW_S = 120.0  # a signature is this old at most, and a nonce is remembered for twice as long
HUB_HEADER = "barnraise-hub"
PROXY_HEADER = "barnraise-proxy-token"  # by which a proxy on the hub's machine proves itself; not signed
_LABEL = "barnraise"
_REQUEST_PARTS = f'"@method" "@path" "@query" "content-digest" "{HUB_HEADER}"'
_RESPONSE_PARTS = f'"@status" "content-digest" "signature";req;key="{_LABEL}"'
_PARAMETERS = ';created=([0-9]{1,12});nonce="([A-Za-z0-9_-]{16,64})";keyid="([0-9A-Z-]{69})";alg="ed25519"'
_REQUEST_INPUT = re.compile(rf"{_LABEL}=(\({re.escape(_REQUEST_PARTS)}\){_PARAMETERS})")
_RESPONSE_INPUT = re.compile(rf"{_LABEL}=(\({re.escape(_RESPONSE_PARTS)}\){_PARAMETERS})")
_SIGNATURE = re.compile(rf"{_LABEL}=(:[A-Za-z0-9+/]{{86}}==:)")
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")


class SignedMessage(NamedTuple):
    """Content of a verified signature."""

    node: NodeId
    created: int
    nonce: str
    digest: bytes  # that the body must have
    signature: str  # as the response's signature covers it


def content_digest(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def sign_request(
    key: NodeKey, method: str, path: str, query: str, body: bytes, hub: NodeId, now: float
) -> dict[str, str]:
    """Return the headers to send. ``path`` and ``query`` are those of the request line."""
    headers = {"content-digest": content_digest(body), HUB_HEADER: str(hub)}
    parameters = _parameters(_REQUEST_PARTS, key, now)
    base = _request_base(method, path, query, headers["content-digest"], str(hub), parameters)
    return headers | _signed(key, parameters, base)


def verify_request(
    method: str, path: str, query: str, headers: Mapping[str, str], hub: NodeId
) -> SignedMessage:
    """Return the verified signature.

    Raise HubRefused (401) unless it is valid for this hub. Sender and time are not judged here.
    """
    if headers.get(HUB_HEADER) != str(hub):
        raise HubRefused(401, "wrong-hub", "the request is meant for another hub", hint=SAME_VERSION_HINT)
    fields, digest, signature = _read(_REQUEST_INPUT, headers)
    parameters, created, nonce, keyid = fields
    base = _request_base(method, path, query, headers["content-digest"], headers[HUB_HEADER], parameters)
    node = _node(keyid)
    if node is None or not verify_signature(node, base64.b64decode(signature[1:-1]), base):
        raise HubRefused(
            401, "signature", "the signature does not belong to the request", hint=SAME_VERSION_HINT
        )
    return SignedMessage(node, int(created), nonce, digest, signature)


def sign_response(key: NodeKey, status: int, body: bytes, request_sig: str, now: float) -> dict[str, str]:
    """Return the signature headers of a response. ``request_sig``: the request's signature."""
    digest = content_digest(body)
    parameters = _parameters(_RESPONSE_PARTS, key, now)
    return {"content-digest": digest} | _signed(
        key, parameters, _response_base(status, digest, request_sig, parameters)
    )


def verify_response(
    hub: NodeId, status: int, headers: Mapping[str, str], body: bytes, request_headers: Mapping[str, str]
) -> float:
    """Return the hub's time. Raise HubError unless this hub signed this response to this request."""
    try:
        fields, digest, signature = _read(_RESPONSE_INPUT, headers)
    except HubRefused as error:
        raise HubError(f"the hub did not sign the response: {error.message}", hint=_WRONG_KEY) from error
    parameters, created, _, keyid = fields
    request_sig = request_signature(request_headers)
    base = _response_base(status, headers["content-digest"], request_sig or "", parameters)
    if keyid != str(hub) or not verify_signature(hub, base64.b64decode(signature[1:-1]), base):
        raise HubError("the response is not signed with the key of the invite", hint=_WRONG_KEY)
    if hashlib.sha256(body).digest() != digest:
        raise HubError(
            "the response was changed in transit", hint="Try again, without the proxy if it repeats."
        )
    return float(created)


def request_signature(headers: Mapping[str, str]) -> str | None:
    """Return the request's signature, which a response must cover; it may be invalid.

    None if there is none.
    """
    match = _SIGNATURE.fullmatch(headers.get("signature", ""))
    return match[1] if match else None


def _read(form: re.Pattern[str], headers: Mapping[str, str]) -> tuple[tuple[str, ...], bytes, str]:
    given = form.fullmatch(headers.get("signature-input", ""))
    signature = _SIGNATURE.fullmatch(headers.get("signature", ""))
    digest = _DIGEST.fullmatch(headers.get("content-digest", ""))
    if given is None or signature is None or digest is None:
        raise HubRefused(
            401, "unsigned", "there is no signature in the required form", hint=SAME_VERSION_HINT
        )
    try:
        return given.groups(), base64.b64decode(digest[1], validate=True), signature[1]
    except binascii.Error as error:
        raise HubRefused(401, "unsigned", "the digest is not base64", hint=SAME_VERSION_HINT) from error


def _parameters(parts: str, key: NodeKey, now: float) -> str:
    nonce = secrets.token_urlsafe(18)
    return f'({parts});created={int(now)};nonce="{nonce}";keyid="{key.id}";alg="ed25519"'


def _request_base(method: str, path: str, query: str, digest: str, hub: str, parameters: str) -> bytes:
    return (
        f'"@method": {method}\n"@path": {path}\n"@query": ?{query}\n"content-digest": {digest}\n'
        f'"{HUB_HEADER}": {hub}\n"@signature-params": {parameters}'
    ).encode()


def _response_base(status: int, digest: str, request_sig: str, parameters: str) -> bytes:
    return (
        f'"@status": {status}\n"content-digest": {digest}\n"signature";req;key="{_LABEL}": {request_sig}\n'
        f'"@signature-params": {parameters}'
    ).encode()


def _signed(key: NodeKey, parameters: str, base: bytes) -> dict[str, str]:
    signature = base64.b64encode(key.sign(base)).decode()
    return {"signature-input": f"{_LABEL}={parameters}", "signature": f"{_LABEL}=:{signature}:"}


@functools.lru_cache(maxsize=4096)
def _node(text: str) -> NodeId | None:
    try:
        return NodeId.parse(text)
    except IdentityError:
        return None


SAME_VERSION_HINT = "Install the same Barnraise version as the hub's, then try again."
_WRONG_KEY = "Ask the sender of the invite for a new one; do not use this address."
