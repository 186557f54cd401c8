"""A hub's blobs in an object store: a real S3 server that checks signatures, fails, corrupts data and
crashes."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from barnraise.core.errors import HubError, StoreAway
from barnraise.hub.client.client import HubClient
from barnraise.hub.object_store import downloader
from barnraise.hub.object_store.redirects import STORE_HEADER
from barnraise.hub.object_store.s3 import BucketUrl, S3Bucket, parse_bucket_url
from barnraise.hub.object_store.uploader import UploadPlan, is_worth_waiting, next_upload
from barnraise.hub.private_options import PrivateOptions
from barnraise.hub.protocol.invites import Invite, invite_text
from barnraise.hub.protocol.messages import HubDataOrder
from barnraise.hub.storage.log import HubLog
from barnraise.hub.storage.versions import shared_blobs
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import LAYOUT, Friend, HubProcess, plainly
from tests.unit.hub.s3_server import BUCKET, ENVIRONMENT, KEY_ID, SECRET, S3Process, until

COURSE = HubDataOrder(samples=100_000, batch=10, seed=7)
STORE = f"s3://{BUCKET}/some/folder"


@pytest.fixture(scope="module")
def s3_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    process = S3Process(tmp_path_factory.mktemp("s3"))
    yield process
    process.kill()


@pytest.fixture
def s3(s3_process: S3Process, monkeypatch: pytest.MonkeyPatch) -> S3Process:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    s3_process.reset()
    return s3_process


class HubWithStore:
    """Hub with an object store, and one member that makes the versions."""

    def __init__(self, folder: Path, s3: S3Process) -> None:
        self.folder, self.s3 = folder, s3
        self.hub = HubProcess(folder / "hub")
        self.start()
        self.invite: Invite = self.hub.invite(uses=3)
        owner = Friend(self.hub.address, self.invite.hub_id, self.hub.owner)
        owner.push_base(torch.randn(LAYOUT.numel), COURSE)
        owner.close()
        self.ann = Friend(self.hub.address, self.invite.hub_id)
        self.ann.join(self.invite)
        self.ann.pull(folder)
        self.messages: list[str] = []

    def start(self) -> None:
        self.hub.start("--store", STORE, "--store-endpoint", self.s3.endpoint)

    def close(self) -> None:
        self.ann.close()
        self.hub.kill()

    def train(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.ann.push(self.ann.lease(), torch.randn(LAYOUT.numel) * 0.1)
            self.ann.pull(self.folder)

    def client(self, store: str | None = None) -> HubClient:
        key = NodeKey.generate()
        origin = store or self.s3.endpoint
        return HubClient([self.hub.address], self.invite.hub_id, key, say=self.messages.append, store=origin)

    def shared(self) -> list[str]:
        log = HubLog(self.hub.directory)
        try:
            return shared_blobs(log.read().versions, set())
        finally:
            log.close()

    def await_stocked(self) -> None:
        """Wait until the bucket has exactly the blobs that members may request, and the hub knows it."""
        until(lambda: self.s3.names() == set(self.shared()), "the hub, which fills the store")
        count = f"barnraise_hub_stored {len(self.shared())}.0"
        until(lambda: count in plainly(f"{self.hub.address}/metrics").text, "the hub, which counts")

    def fetch_base(self, client: HubClient) -> bytes:
        _, _, name, size, *_ = plainly(f"{self.hub.address}/v1/head").json()["steps"][0]
        target = self.folder / "fetched"
        client.fetch(name, target, size=size)
        client.close()
        assert target.read_bytes() == self.blob(name)
        return target.read_bytes()

    def check_said(self, whys: list[str]) -> None:
        """Compare the messages since the last call."""
        assert [why for why, message in zip(whys, self.messages, strict=True) if why not in message] == []
        self.messages.clear()

    def await_led(self, hub: HubProcess, name: str) -> str:
        """Wait until the hub redirects to a link, and return the link."""
        url, headers = f"{hub.address}/v1/blobs/{name}", {STORE_HEADER: self.s3.endpoint}
        until(lambda: plainly(url, headers=headers).status_code == 307, "the hub, which puts the blob")
        link = plainly(url, headers=headers).headers["location"]
        assert plainly(link).content == self.blob(name)
        return link

    def blob(self, name: str) -> bytes:
        return (self.hub.directory / "blobs" / name[:2] / name).read_bytes()


@pytest.fixture
def scene(tmp_path: Path, s3: S3Process) -> Iterator[HubWithStore]:
    made = HubWithStore(tmp_path, s3)
    yield made
    made.close()


def test_members_download_committed_blobs_from_store(scene: HubWithStore) -> None:
    scene.train(2)
    scene.await_stocked()
    assert scene.ann.describe().store == scene.s3.endpoint
    scene.fetch_base(scene.client())
    assert scene.messages == []
    ((path, headers),) = scene.s3.fetched()
    assert path.startswith(f"/{BUCKET}/some/folder/{scene.invite.hub_id}/")
    assert headers == {
        *("HTTP_HOST", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING", "HTTP_CONNECTION", "HTTP_USER_AGENT")
    }, "a download tells the store nothing about the member"
    url = f"{scene.hub.address}/v1/blobs/{scene.shared()[0]}"
    assert plainly(url).content == scene.blob(scene.shared()[0]), (
        "a client without the header is not redirected"
    )
    link = scene.await_led(scene.hub, scene.shared()[0])
    led = plainly(url, headers={STORE_HEADER: scene.s3.endpoint})
    assert (led.status_code, led.headers["cache-control"]) == (307, "no-store")
    assert plainly(url, headers={STORE_HEADER: "https://elsewhere.example"}).status_code == 200
    assert plainly(link.replace("Signature=", "Signature=0")).status_code == 403
    shown = (
        scene.hub.output() + plainly(scene.hub.address).text + plainly(f"{scene.hub.address}/metrics").text
    )
    assert KEY_ID not in shown
    assert SECRET not in shown


def test_request_during_commit_waits_for_upload(scene: HubWithStore) -> None:
    scene.await_stocked()
    scene.s3.tell("late", "1.5")
    scene.train()
    name = scene.shared()[0]
    client = scene.client()
    client.fetch(name, scene.folder / "delta", size=len(scene.blob(name)))
    client.close()
    assert [path.rpartition("/")[2] for path, _ in scene.s3.fetched()] == [name]
    scene.s3.tell("late", "40")
    scene.train()
    url, headers = f"{scene.hub.address}/v1/blobs/{scene.shared()[0]}", {STORE_HEADER: scene.s3.endpoint}
    begin = time.monotonic()
    assert plainly(url, headers=headers).content == scene.blob(scene.shared()[0])
    assert 8.0 < time.monotonic() - begin < 30.0, "but not for long"
    scene.s3.kill()  # it still holds the upload


def test_swept_blobs_are_removed_from_store(scene: HubWithStore) -> None:
    stray = f"some/folder/{scene.invite.hub_id}/{'1' * 64}"
    others = ["some/folder/notes.txt", f"some/folder/{'0' * 64}"]
    for key in (stray, *others):
        scene.s3.client().put_object(Bucket=BUCKET, Key=key, Body=b"not the hub's")
    scene.hub.kill()
    scene.start()
    base = scene.shared()[-1]
    until(lambda: base in scene.s3.names(), "the hub, which puts the base")
    scene.train(7)  # with whole bases at versions 3 and 6
    assert base not in scene.shared()
    kept = {key.rpartition("/")[2] for key in others}
    until(lambda: scene.s3.names() == {*scene.shared(), *kept}, "the hub, which removes what it swept")


def test_rounds_continue_without_store_and_upload_follows(scene: HubWithStore) -> None:
    scene.await_stocked()
    scene.s3.kill()
    scene.fetch_base(scene.client())
    scene.check_said(["it cannot be reached; blobs come from the hub"])
    begin = time.monotonic()
    scene.train(2)
    assert time.monotonic() - begin < 20.0
    until(lambda: "EndpointConnectionError" in scene.hub.output(), "the hub's word about it")
    newest = scene.shared()[0]
    for name in scene.shared():
        url = f"{scene.hub.address}/v1/blobs/{name}"
        assert plainly(url, headers={STORE_HEADER: scene.s3.endpoint}).content == scene.blob(name)
    scene.s3.start()  # and what it held is gone
    until(lambda: newest in scene.s3.names(), "the hub, which tries again")
    scene.hub.kill()
    scene.start()
    scene.await_stocked()


def test_upload_is_repeated_after_store_crash(scene: HubWithStore) -> None:
    scene.await_stocked()
    scene.s3.tell("short", "1000")
    scene.train()
    until(scene.s3.has_died, "the store, which dies")
    scene.train()
    scene.s3.untell("short")
    scene.s3.start()
    for name in scene.shared()[:2]:
        scene.await_led(scene.hub, name)


def test_upload_is_resumed_after_hub_crash(scene: HubWithStore) -> None:
    scene.await_stocked()
    scene.s3.tell("shut")
    scene.train()
    scene.hub.kill()
    scene.s3.untell("shut")
    scene.start()
    scene.await_stocked()


def test_blob_missing_in_store_comes_from_hub(scene: HubWithStore, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.await_stocked()
    faults = {
        "other": ("", ["it has another content"]),
        "shut": ("", ["it answered 403"]),
        "slow": ("0.1", ["it is too slow"]),
        "short": ("7000", ["it broke off"]),
    }
    for count, (fault, (text, whys)) in enumerate(faults.items(), start=1):
        scene.s3.tell(fault, text)
        client = scene.client()
        with monkeypatch.context() as patch:
            if fault == "slow":  # with less time the others may be too slow, too
                patch.setattr(downloader, "_AT_LEAST_S", 0.5)
                patch.setattr(downloader, "_SLOWEST_BYTES_S", 1 << 20)
            assert len(scene.fetch_base(client)) > 20_000
        scene.check_said(whys)
        scene.fetch_base(client)
        scene.check_said([])
        assert len(scene.s3.fetched()) == count, "it is left alone for a while"
        scene.s3.untell(fault)


def test_wrong_part_from_store_is_not_resumed(scene: HubWithStore) -> None:
    scene.await_stocked()
    scene.s3.tell("other")
    scene.s3.tell("short", "7000")
    scene.fetch_base(scene.client())
    scene.check_said(["it broke off", "it began the blob"])


def test_store_without_permission_does_not_stop_rounds(
    tmp_path: Path, s3: S3Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-another-program")
    scene = HubWithStore(tmp_path, s3)
    try:
        scene.train()
        until(lambda: "it answered SignatureDoesNotMatch" in scene.hub.output(), "the hub's word")
        scene.fetch_base(scene.client())
        assert scene.messages == []
        assert "of-another-program" not in scene.hub.output()
    finally:
        scene.close()


def test_mirror_downloads_copy_from_store(scene: HubWithStore) -> None:
    scene.train()
    scene.await_stocked()
    second = HubProcess(scene.folder / "mirror", None)
    try:
        second.start(private=PrivateOptions(follow=invite_text(scene.hub.invite(role="mirror"))))
        head = plainly(f"{second.address}/v1/head").json()
        assert head["version"] == 1
        for _, _, name, size, *_ in head["steps"]:
            answer = plainly(f"{second.address}/v1/blobs/{name}", headers={STORE_HEADER: scene.s3.endpoint})
            assert (answer.status_code, len(answer.content)) == (200, size), "it serves them itself"
        assert len(scene.s3.fetched()) == len(scene.shared())
    finally:
        second.kill()


def test_region_downloads_versions_from_store_and_has_own_store(scene: HubWithStore) -> None:
    scene.train()
    scene.await_stocked()
    chain = set(scene.shared())
    region = HubProcess(scene.folder / "region", None)
    own = ("--store", f"s3://{BUCKET}/region", "--store-endpoint", scene.s3.endpoint)
    try:
        region.start(*own, private=PrivateOptions(parent=invite_text(scene.invite)))
        listed = {"Bucket": BUCKET, "Prefix": "region/"}
        until(lambda: len(chain) == scene.s3.client().list_objects_v2(**listed)["KeyCount"], "the region")
        assert len(scene.s3.fetched()) == len(chain)
        assert f"/{BUCKET}/region/" in scene.await_led(region, scene.shared()[0])
    finally:
        region.kill()


def test_hub_stops_at_once_if_store_is_silent(scene: HubWithStore) -> None:
    scene.hub.kill()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        scene.hub.start("--store", STORE, "--store-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
        link, _ = silent.accept()  # it is asked
        with link:
            process = scene.hub._process
            assert process is not None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=45) is not None, "the store has a minute to answer"


@pytest.mark.parametrize("text", ["", "bucket", "s3://", "s3://UP", "s3://ok/a b", "https://bucket.example"])
def test_invalid_bucket_url_is_refused(text: str) -> None:
    with pytest.raises(HubError, match="names no bucket"):
        parse_bucket_url(text)


def test_store_without_tls_must_be_local() -> None:
    assert parse_bucket_url("s3://our-blobs/a/b/", "http://localhost:9000").prefix == "a/b"
    assert (
        S3Bucket(BucketUrl("our-blobs", "", "http://localhost:9000"), "hub").origin == "http://localhost:9000"
    )
    with pytest.raises(HubError, match="without TLS"):
        S3Bucket(BucketUrl("our-blobs", "", "http://192.168.1.5:9000"), "hub")
    with pytest.raises(HubError, match="no address"):
        parse_bucket_url("s3://our-blobs", "ftp://example.org")


def test_amazon_bucket_origin_depends_on_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert S3Bucket(BucketUrl("our-blobs"), "hub").origin == "https://our-blobs.s3.eu-central-1.amazonaws.com"
    assert S3Bucket(BucketUrl("our.blobs"), "hub").origin == "https://s3.eu-central-1.amazonaws.com"


def test_server_that_is_no_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be a console at the wrong port, or the page of a network that blocks the store."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html><p>Welcome<br></html>")

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bucket = S3Bucket(BucketUrl(BUCKET, endpoint=f"http://127.0.0.1:{server.server_port}"), "hub")
        with pytest.raises(StoreAway):
            bucket.names()
        server.shutdown()


def test_bucket_in_other_region_gives_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library follows a bucket to its region and makes links to it; members do not accept those."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    bucket = S3Bucket(BucketUrl("ours"), "hub")
    assert bucket.link("ab" * 32).startswith(bucket.origin)
    moved = "https://ours.s3.eu-west-1.amazonaws.com/hub/x"
    monkeypatch.setattr(bucket._client, "generate_presigned_url", lambda *_, **__: moved)
    with pytest.raises(StoreAway, match="another region") as caught:
        bucket.link("ab" * 32)
    assert "AWS_DEFAULT_REGION" in caught.value.hint


def test_next_upload_adds_missing_blob_then_removes_unneeded() -> None:
    assert next_upload(["new", "old"], set()) == UploadPlan("put", "new")
    assert next_upload(["new", "old"], {"new", "gone"}) == UploadPlan("put", "old")
    assert next_upload(["new"], {"new", "gone", "going"}) == UploadPlan("remove", "going")
    assert next_upload(["new"], {"new"}) is None


def test_long_upload_is_not_worth_waiting() -> None:
    assert is_worth_waiting(5 << 20, 1 << 20)
    assert not is_worth_waiting(50 << 20, 1 << 20)
