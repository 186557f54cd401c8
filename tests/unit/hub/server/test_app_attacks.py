"""Attacks on a real hub: each is refused with its own kind, and training continues."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from barnraise.hub.protocol.messages import HubProgress, VersionHead
from barnraise.hub.protocol.signatures import sign_request
from barnraise.identity import NodeKey
from tests.unit.hub.attacked_hub import AttackedHub
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, Refused, declared, encoded, plainly


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedHub]:
    made = AttackedHub(tmp_path_factory.mktemp("scene"))
    try:
        yield made
    finally:
        made.hub.kill()
        for friend in made.friends:
            friend.close()


def _push_fp32(friend: Friend, update: torch.Tensor) -> HubProgress:
    lease = friend.lease()
    data = encoded(update, "fp32", lease.version)
    return friend.send(declared(lease, data), data)


def _bad(scene: AttackedHub, name: str) -> Friend:
    return scene.member(name)


@pytest.fixture(autouse=True)
def _fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.hub.hub_process.TERMS", msgspec.structs.replace(TERMS, codec="fp32"))


def test_invite_used_twice_is_refused(scene: AttackedHub) -> None:
    invite = scene.hub.invite(uses=1)
    first, thief = (Friend(scene.hub.address, invite.hub_id) for _ in range(2))
    scene.friends += [first, thief]
    first.join(invite)
    first.join(invite)
    with pytest.raises(Refused, match="invite-used"):
        thief.join(invite)
    with pytest.raises(Refused, match="403 member"):
        thief.lease()


def test_replayed_request_is_refused(scene: AttackedHub) -> None:
    for change, expected in (({}, "replay"), ({"signature": "barnraise=:" + "A" * 86 + "==:"}, "signature")):
        headers = sign_request(scene.ann.key, "GET", "/v1/run", "", b"", scene.ann.hub, time.time())
        assert plainly(f"{scene.hub.address}/v1/run", headers=headers).status_code == 200
        answer = plainly(f"{scene.hub.address}/v1/run", headers=headers | change)
        assert (answer.status_code, answer.json()["kind"]) == (401, expected)


def test_request_with_wrong_clock_gets_hub_time(scene: AttackedHub) -> None:
    headers = sign_request(scene.ann.key, "GET", "/v1/run", "", b"", scene.ann.hub, time.time() - 5000)
    answer = plainly(f"{scene.hub.address}/v1/run", headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (401, "clock")
    assert abs(answer.json()["time"] - time.time()) < 30
    assert "signature" in answer.headers, "so that only the hub can set a member's clock"


def test_unsigned_body_is_refused(scene: AttackedHub) -> None:
    headers = sign_request(scene.ann.key, "POST", "/v1/leases", "", b"{}", scene.ann.hub, time.time())
    answer = plainly(
        f"{scene.hub.address}/v1/leases", method="POST", headers=headers, content=b'{"version":0}'
    )
    assert (answer.status_code, answer.json()["kind"]) == (401, "digest")


def test_member_cannot_read_or_write_upload_of_another(scene: AttackedHub) -> None:
    eve = _bad(scene, "eve")
    scene.ann.pull(scene.folder, wait=0)
    lease = scene.ann.lease()
    data = encoded(torch.randn(LAYOUT.numel) * 0.01, "fp32", lease.version)
    progress = scene.ann.ask("POST", "/v1/uploads", HubProgress, declared(lease, data))
    for method in ("GET", "PATCH"):
        with pytest.raises(Refused, match="404 upload"):
            eve.ask(method, f"/v1/uploads/{progress.id}", HubProgress, query="offset=0" * (method == "PATCH"))
    with pytest.raises(Refused, match="403 forged"):
        eve.send(declared(lease, data), data)
    assert scene.ann.send(declared(lease, data), data).accepted
    scene.ann.pull(scene.folder)


def test_lost_and_repeated_pieces_are_resumed(scene: AttackedHub) -> None:
    scene.ann.pull(scene.folder, wait=0)
    lease = scene.ann.lease()
    data = encoded(torch.randn(LAYOUT.numel) * 0.01, "fp32", lease.version)
    declaration = declared(lease, data)
    progress = scene.ann.ask("POST", "/v1/uploads", HubProgress, declaration)
    path = f"/v1/uploads/{progress.id}"
    for offset, expected in ((0, 5000), (0, 5000), (2500, 7500)):
        piece = data[offset : offset + 5000]
        progress = scene.ann.ask("PATCH", path, HubProgress, piece, query=f"offset={offset}")
        assert progress.offset == expected
    with pytest.raises(Refused) as caught:
        scene.ann.ask("PATCH", path, HubProgress, data[9000:], query="offset=9000")
    assert (caught.value.problem.kind, caught.value.problem.offset) == ("offset", 7500)
    assert scene.ann.ask("GET", path, HubProgress).offset == 7500
    assert scene.ann.send(declaration, data, piece=4000).accepted, "the declaration finds what is there"
    assert scene.ann.send(declaration, data).accepted, "and says so again after a lost answer"
    scene.ann.pull(scene.folder)


def test_bad_updates_are_refused_then_sender_is_quarantined(scene: AttackedHub) -> None:
    for _ in range(4):
        scene.round()
    eve = _bad(scene, "mallory")
    eve.pull(scene.folder, wait=0)
    lease = eve.lease()
    good = encoded(torch.randn(LAYOUT.numel) * 0.01, "fp32", lease.version)
    poison = good[:-4] + b"\x00\x00\xc0\x7f"
    with pytest.raises(Refused, match="422 not-finite"):
        eve.send(declared(lease, poison), poison)
    lease, junk = eve.lease(), b"junk" * 100
    with pytest.raises(Refused, match="422 schema"):
        eve.send(declared(lease, junk), junk)
    lease = eve.lease()
    with pytest.raises(Refused, match="413 size"):
        eve.send(declared(lease, good, size=len(good) * 2), good)
    with pytest.raises(Refused, match="403 quarantine"):
        eve.lease()
    for word in ("pardon", "expel"):
        with pytest.raises(Refused, match="only the owner"):
            eve.ask("POST", f"/v1/members/{eve.key.id}/{word}", HubProgress)
    scene.round()


def test_malformed_and_copied_updates_are_refused(scene: AttackedHub) -> None:
    eve = _bad(scene, "trudy")
    lease = eve.lease()
    junk = b"junk" * 100
    with pytest.raises(Refused, match="422 schema"):
        eve.send(declared(lease, junk), junk)
    with pytest.raises(Refused, match="422 digest"):
        eve.send(declared(eve.lease(), junk), b"x" + junk[1:])
    update = torch.randn(LAYOUT.numel) * 0.01
    scene.ann.pull(scene.folder, wait=0)
    scene.ann.push(scene.ann.lease(), update)
    scene.ann.pull(scene.folder)
    eve.pull(scene.folder, wait=0)
    with pytest.raises(Refused, match="422 copy"):
        _push_fp32(eve, update)


def test_large_update_is_clipped(scene: AttackedHub) -> None:
    bob = scene.member("bob")
    progress = _push_fp32(bob, torch.randn(LAYOUT.numel) * 0.05)
    assert 0.3 < progress.clipped < 0.9
    bob.pull(scene.folder)


def test_update_of_old_version_is_refused(scene: AttackedHub) -> None:
    slow = scene.member("slow")
    lease = slow.lease(rate=1e6)
    for _ in range(2):
        scene.round()
    with pytest.raises(Refused, match=r"409 (stale|lease-over)"):
        slow.push(lease, torch.randn(LAYOUT.numel) * 0.01)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/blobs/..%2f..%2fhub.key",
        "/v1/blobs/../../hub.key",
        "/v1/blobs/" + "A" * 64,
        "/v1/blobs/" + "0" * 64 + "%00",
        "/v1/uploads/..%2fx",
        "/hub.key",
        "//v1/run/",
        "/v1/run%2f..%2f",
    ],
)
def test_path_traversal_is_refused(scene: AttackedHub, path: str) -> None:
    """The paths are sent unchanged; an HTTP library would normalize them."""
    with socket.create_connection(("127.0.0.1", scene.hub.port), timeout=10) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while piece := line.recv(4096):
            answer += piece
    assert answer.split()[1] in (b"404", b"401", b"405", b"307"), answer
    assert b"PRIVATE" not in answer


def test_header_manipulation_is_refused(scene: AttackedHub) -> None:
    url = f"{scene.hub.address}/v1/leases"
    good = sign_request(scene.ann.key, "POST", "/v1/leases", "", b"", scene.ann.hub, time.time())
    stranger = NodeKey.generate()
    forged = good | {
        "signature-input": good["signature-input"].replace(str(scene.ann.key.id), str(stranger.id))
    }
    twice = [*good.items(), ("signature", good["signature"])]
    assert plainly(url, method="POST", headers=forged).status_code == 401
    assert plainly(url, method="POST", headers=twice).status_code in (401, 422)
    assert plainly(url, method="POST").status_code == 401
    large = sign_request(scene.ann.key, "POST", "/v1/leases", "", b"x" * 100_000, scene.ann.hub, time.time())
    assert plainly(url, method="POST", headers=large, content=b"x" * 100_000).status_code == 413


def test_blobs_are_cacheable_and_support_ranges(scene: AttackedHub) -> None:
    head = scene.ann.ask("GET", "/v1/head", VersionHead)
    url = f"{scene.hub.address}/v1/blobs/{head.steps[0].sha256}"
    full_response = plainly(url)
    assert full_response.headers["etag"] == f'"{head.steps[0].sha256}"'
    assert "immutable" in full_response.headers["cache-control"]
    part = plainly(url, headers={"range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, full_response.content[100:200])
    assert plainly(url, headers={"if-none-match": full_response.headers["etag"]}).status_code == 304


def test_page_shows_contributors_and_refusals(scene: AttackedHub) -> None:
    eve = scene.member("oscar")
    junk = b"junk" * 100
    with pytest.raises(Refused, match="422 schema"):
        eve.send(declared(eve.lease(), junk), junk)
    scene.round()
    page = plainly(scene.hub.address)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for word in ("fireside", "ann", "oscar", "schema", "polyline", "weighted mean"):
        assert word in page.text
    assert "<script" not in page.text
    figures = plainly(f"{scene.hub.address}/metrics").text
    assert "barnraise_hub_version " in figures
    assert 'route="POST /v1/leases"' in figures


def test_openapi_document_names_all_routes(scene: AttackedHub) -> None:
    """Each documented route answers anything with a status that its description has."""
    described = plainly(f"{scene.hub.address}/v1/openapi.json").json()
    assert described["openapi"].startswith("3.")
    for path, methods in described["paths"].items():
        for method in methods:
            url = scene.hub.address + path.replace("{", "").replace("}", "")
            answer = plainly(url, method=method.upper(), content=b"" if method == "get" else b"{}")
            assert answer.status_code in (200, 401, 404), (method, path, answer.text)
