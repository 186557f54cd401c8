"""Blob fetcher of mirrors and regions: only declared blobs, of the declared size, if the disk has room."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from barnraise.artifacts import FileEntry, FolderLimits, FolderManifest, encode_manifest
from barnraise.artifacts.store.manifest import piece_hash
from barnraise.core.errors import HubError, ShippingError
from barnraise.hub.client.client import HubClient
from barnraise.hub.mirror.blob_fetcher import BlobFetcher
from barnraise.hub.protocol.messages import CodeDescription, encode_message
from barnraise.hub.storage.blobs import BlobStore
from barnraise.identity.keys import NodeKey
from tests.unit.hub.client.fake_hub import FakeHub

SCRIPT, DATA = b"print('hello')", bytes(range(256)) * 50


class Scene(NamedTuple):
    hub: FakeHub
    here: BlobStore
    fetcher: BlobFetcher

    def offer(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self.hub.blobs[name] = data
        return name

    def offer_code(self, *contents: str) -> str:
        files = tuple(
            FileEntry(path, len(data), False, (piece_hash(data),))
            for path, data in (("data.bin", DATA), ("train.py", SCRIPT))
        )
        listed = self.offer(encode_manifest(FolderManifest(files)))
        return self.offer(
            encode_message(CodeDescription(entry="train.py", manifest=listed, contents=contents))
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    hub = FakeHub(tmp_path)
    client = HubClient(["http://hub.test"], hub.key.id, NodeKey.generate(), transport=hub.transport)
    here, folder = BlobStore(tmp_path / "blobs"), tmp_path / "uploads"
    folder.mkdir()
    return Scene(hub, here, BlobFetcher(client, here, folder, FolderLimits(1 << 20, 10)))


def test_blob_in_store_is_not_fetched_again(scene: Scene) -> None:
    name = scene.offer(DATA)
    scene.fetcher.fetch(name, size=len(DATA))
    scene.fetcher.fetch(name, size=len(DATA))
    assert scene.here.path(name).read_bytes() == DATA
    assert len(scene.hub.requests) == 1


def test_blob_larger_than_declared_is_refused(scene: Scene) -> None:
    name = scene.offer(DATA)
    for bound in ({"size": len(DATA) - 1}, {"max_bytes": len(DATA) - 1}):
        with pytest.raises(HubError, match="larger than declared"):
            scene.fetcher.fetch(name, **bound)
    assert not scene.here.has(name)


def test_blob_without_disk_space_is_not_started(scene: Scene) -> None:
    free = shutil.disk_usage(scene.hub.room).free
    with pytest.raises(ShippingError, match=r"free, and .* are to come"):
        scene.fetcher.fetch(scene.offer(DATA), size=2 * free + 1)
    assert scene.hub.requests == []


def test_fetch_code_returns_all_blobs(scene: Scene) -> None:
    contents = scene.offer(DATA), scene.offer(SCRIPT)
    kept = scene.fetcher.fetch_code(scene.offer_code(*contents))
    assert kept[1:] == contents
    assert all(scene.here.has(name) for name in kept)


def test_content_with_wrong_size_is_refused(scene: Scene) -> None:
    code = scene.offer_code(scene.offer(DATA), scene.offer(SCRIPT + b"; and more"))
    with pytest.raises(HubError, match="larger than declared"):
        scene.fetcher.fetch_code(code)
    with pytest.raises(HubError, match="does not fit its list of files"):
        scene.fetcher.fetch_code(scene.offer_code(scene.offer(DATA)))
