"""Copies blobs of another hub; used by mirrors and regions.

A blob is fetched only if its size is known from a version or the list of files, or if it is small. The disk
must have room for it.
"""

from __future__ import annotations

from pathlib import Path

from barnraise.artifacts import FolderLimits, FolderManifest, decode_manifest
from barnraise.artifacts.store.disk import check_room
from barnraise.artifacts.store.manifest import MOST_ENCODED
from barnraise.core.errors import HubError
from barnraise.core.files import sync_path
from barnraise.core.sanitize import printable
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import CodeDescription, decode_message
from barnraise.hub.storage.blobs import BlobStore

MOST_CODE_BYTES = 4 << 20
ASK_THE_SENDER = "Ask the sender of the invite; the hub may run another Barnraise version."
_NO_ROOM = "Free some space there; what is here already is kept, and it continues automatically."


class BlobFetcher:
    """Downloader of another hub's blobs.

    For one thread. ``folder``: partial files; ``limits``: limits on a run's files.
    """

    def __init__(self, client: HubClient, blobs: BlobStore, folder: Path, limits: FolderLimits) -> None:
        self._client, self._blobs, self._folder, self._limits = client, blobs, folder, limits

    def fetch(self, name: str, *, size: int | None = None, max_bytes: int | None = None) -> None:
        """Fetch a blob as `HubClient.fetch` does, unless it is here.

        Raise ShippingError if the disk has no room.
        """
        if self._blobs.has(name):
            return
        check_room(self._folder, size or max_bytes or 0, _NO_ROOM)
        target = self._folder / f"blob-{name}"
        self._client.fetch(name, target, size=size, max_bytes=max_bytes)
        sync_path(target)
        self._blobs.adopt(target, name)

    def fetch_code(self, name: str) -> tuple[str, ...]:
        """Fetch all blobs of a run's code and return their names."""
        self.fetch(name, max_bytes=MOST_CODE_BYTES)
        code = decode_message(CodeDescription, self._blobs.path(name).read_bytes())
        self.fetch(code.manifest, max_bytes=MOST_ENCODED)
        files = files_of(code, self._blobs.path(code.manifest).read_bytes(), self._limits)
        for sha256, entry in zip(code.contents, files.objects().values(), strict=True):
            self.fetch(sha256, size=entry.size)
        return (code.manifest, *code.contents)


def files_of(code: CodeDescription, listed: bytes, limits: FolderLimits) -> FolderManifest:
    """Return the manifest of a code's files. Raise HubError unless manifest and description match."""
    manifest = decode_manifest(listed, limits)
    if code.entry not in {entry.path for entry in manifest.files}:
        raise HubError(
            f"the hub would start {printable(code.entry)}, which is not among its files", hint=ASK_THE_SENDER
        )
    if len(code.contents) != len(manifest.objects()):
        raise HubError("the hub's list of contents does not fit its list of files", hint=ASK_THE_SENDER)
    return manifest
