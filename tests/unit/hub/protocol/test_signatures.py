"""HTTP Message Signatures in our form, against the reference library and against manipulation."""

from __future__ import annotations

import contextlib
import datetime
from types import SimpleNamespace

import pytest
from http_message_signatures import HTTPMessageVerifier, MappingKeyResolver
from http_message_signatures.algorithms import ED25519
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import HubError, HubRefused
from barnraise.hub.protocol.replay_guard import NonceCache
from barnraise.hub.protocol.signatures import (
    WINDOW_S,
    content_digest,
    request_signature,
    sign_request,
    sign_response,
    verify_request,
    verify_response,
)
from barnraise.identity import NodeKey

MEMBER, HUB, NOW = NodeKey.generate(), NodeKey.generate(), 1_800_000_000.0


def _request(body: bytes = b"hello", query: str = "after=3&wait=5") -> dict[str, str]:
    return sign_request(MEMBER, "POST", "/v1/leases", query, body, HUB.id, NOW)


def test_request_and_response_are_verified() -> None:
    headers = _request()
    signed = verify_request("POST", "/v1/leases", "after=3&wait=5", headers, HUB.id)
    assert (signed.node, signed.created) == (MEMBER.id, int(NOW))
    answer = sign_response(HUB, 200, b"fine", request_signature(headers) or "", NOW + 7)
    assert verify_response(HUB.id, 200, answer, b"fine", headers) == NOW + 7


def test_reference_library_verifies_our_signatures() -> None:
    class Verifier(HTTPMessageVerifier):
        max_clock_skew = datetime.timedelta(days=10_000)

    keys = {str(MEMBER.id): MEMBER.signer.public_key(), str(HUB.id): HUB.signer.public_key()}
    resolver = MappingKeyResolver(public_keys=keys, private_keys={})
    verifier = Verifier(signature_algorithm=ED25519, key_resolver=resolver)
    headers = _request()
    request = SimpleNamespace(
        method="POST", url="https://any.example/v1/leases?after=3&wait=5", headers=headers
    )
    (verified,) = verifier.verify(request, max_age=None, body=b"hello")
    assert verified.parameters["keyid"] == str(MEMBER.id)
    answer = sign_response(HUB, 409, b"no", request_signature(headers) or "", NOW)
    response = SimpleNamespace(status_code=409, headers=answer, request=request)
    (verified,) = verifier.verify(response, max_age=None, body=b"no")
    assert verified.parameters["keyid"] == str(HUB.id)


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("PUT", "/v1/leases", "after=3&wait=5"),
        ("POST", "/v1/head", "after=3&wait=5"),
        ("POST", "/v1/leases", ""),
    ],
)
def test_signature_of_another_request_is_refused(method: str, path: str, query: str) -> None:
    with pytest.raises(HubRefused) as caught:
        verify_request(method, path, query, _request(), HUB.id)
    assert (caught.value.status, caught.value.kind) == (401, "signature")


def test_request_for_another_hub_is_refused() -> None:
    with pytest.raises(HubRefused, match="another hub"):
        verify_request("POST", "/v1/leases", "after=3&wait=5", _request(), NodeKey.generate().id)


def test_digest_of_another_body_is_refused() -> None:
    headers = _request() | {"content-digest": content_digest(b"other")}
    with pytest.raises(HubRefused, match="does not belong"):
        verify_request("POST", "/v1/leases", "after=3&wait=5", headers, HUB.id)


def test_foreign_or_changed_responses_are_refused() -> None:
    headers = _request()
    signature = request_signature(headers) or ""
    good = sign_response(HUB, 200, b"fine", signature, NOW)
    impostor = sign_response(NodeKey.generate(), 200, b"fine", signature, NOW)
    for answer, status, body, request in (
        (impostor, 200, b"fine", headers),
        (good, 201, b"fine", headers),
        (good, 200, b"evil", headers),
        (good, 200, b"fine", _request()),
        ({}, 200, b"fine", headers),
    ):
        with pytest.raises(HubError):
            verify_response(HUB.id, status, answer, body, request)


def test_replay_is_refused_and_small_clock_skew_accepted() -> None:
    nonces = NonceCache()
    signed = verify_request("POST", "/v1/leases", "after=3&wait=5", _request(), HUB.id)
    nonces.accept(signed, NOW + WINDOW_S - 1, now=0.0)
    with pytest.raises(HubRefused, match="before"):
        nonces.accept(signed, NOW - 5, now=WINDOW_S)
    with pytest.raises(HubRefused, match="clock"):
        nonces.accept(signed._replace(nonce="another"), NOW + WINDOW_S + 2, now=0.0)
    assert len(nonces._seen) == 1
    nonces.accept(signed._replace(nonce="late", created=int(NOW) + 999), NOW + 999, now=3 * WINDOW_S)
    assert len(nonces._seen) == 1, "the window has passed"


def test_restarted_hub_rejects_earlier_signatures() -> None:
    signed = verify_request("POST", "/v1/leases", "after=3&wait=5", _request(), HUB.id)
    with pytest.raises(HubRefused, match="clock"):
        NonceCache(began=NOW + 1).accept(signed, NOW + 2, 0.0)
    NonceCache(began=NOW + 0.5).accept(signed, NOW + 2, 0.0)


def test_nonce_cache_is_bounded() -> None:
    nonces = NonceCache(capacity=4)
    signed = verify_request("POST", "/v1/leases", "after=3&wait=5", _request(), HUB.id)
    for number in range(2):
        nonces.accept(signed._replace(nonce=f"{number}"), NOW, 0.0)
    with pytest.raises(HubRefused) as caught:
        nonces.accept(signed._replace(nonce="another"), NOW, 0.0)
    assert caught.value.status == 429


def test_members_at_full_rate_leave_space_for_others() -> None:
    """Eight of ten members and all strangers send as much as they can; the other two ask as usual."""
    nonces, members = NonceCache(capacity=2200), 10
    signed = verify_request("POST", "/v1/leases", "after=3&wait=5", _request(), HUB.id)
    keys = [NodeKey.generate().id for _ in range(members + 1)]

    def sent(place: int, count: int, name: str) -> int:
        accepted = 0
        for number in range(count):
            request = signed._replace(node=keys[place], nonce=f"{name} {number}")
            with contextlib.suppress(HubRefused):
                nonces.accept(request, NOW, 0.0, members=members, is_member=place < members)
                accepted += 1
        return accepted

    assert sent(0, 1500, "first") == 1100, "half of all, while there is space"
    for place in (*range(1, 8), members):
        assert sent(place, 1500, "flood") == 100, "a share of the other half"
    assert [sent(place, 100, "usual") for place in (8, 9)] == [100, 100]
    assert len(nonces._seen) == 2100 == 1100 + 7 * 100 + 100 + 2 * 100


def test_request_of_new_member_cannot_be_replayed() -> None:
    """The request was accepted before its sender became a member, and comes again afterwards."""
    nonces = NonceCache()
    signed = verify_request("POST", "/v1/leases", "after=3&wait=5", _request(), HUB.id)
    nonces.accept(signed, NOW, 0.0, members=4)
    with pytest.raises(HubRefused, match="before"):
        nonces.accept(signed, NOW, 1.0, members=5, is_member=True)


@given(st.dictionaries(st.sampled_from(["signature", "signature-input", "content-digest"]), st.text()))
def test_invalid_headers_are_refused_with_reason(headers: dict[str, str]) -> None:
    with pytest.raises(HubRefused):
        verify_request("GET", "/", "", headers | {"barnraise-hub": str(HUB.id)}, HUB.id)
