"""What a run wrote into its folder: packed where it ran, unpacked where somebody wants it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from barnraise.artifacts.packing.changes import changed_since
from barnraise.artifacts.packing.pack import pack
from barnraise.artifacts.store.manifest import FileEntry, FolderLimits, FolderManifest
from barnraise.artifacts.store.store import ArtifactStore
from barnraise.core.config import Settings
from barnraise.core.errors import ShippingError

_LARGEST_READ = 4 << 20


def store_directory(state: Path) -> Path:
    """Where the agent and the command line of one user keep contents."""
    return state / "store"


def folder_limits(settings: Settings) -> FolderLimits:
    """Of a run's folder, and of what comes back from it."""
    return FolderLimits(settings.runs.most_bytes, settings.runs.most_files)


def data_limits(settings: Settings) -> FolderLimits:
    """Of a data set."""
    return FolderLimits(settings.runs.most_data_bytes, settings.runs.most_files)


def pack_changes(manifest: FolderManifest, folder: Path, store: ArtifactStore, limits: FolderLimits) -> bytes:
    """The id of a manifest of all that is new or altered since; empty if nothing is."""
    changed = changed_since(manifest, folder, limits)
    return pack(folder, store, limits, only=changed).id if changed else b""


def unpack_into(store: ArtifactStore, name: bytes, target: Path) -> int:
    """Copies of a packed folder's files; how many. What was unpacked there before is left as it is."""
    manifest = store.manifest(name)
    if manifest is None:
        raise ShippingError("the files are not in this machine's store any more", hint="Bring them again.")
    if not target.exists():
        store.unpack(manifest, target)
    return len(manifest.files)


def read_files(
    store: ArtifactStore, manifest: FolderManifest, wanted: Callable[[str], bool]
) -> dict[str, bytes]:
    """The contents of some files, by path; one that is too large to be text is left out."""
    return {
        entry.path: _content(store, entry)
        for entry in manifest.files
        if entry.size <= _LARGEST_READ and wanted(entry.path)
    }


def _content(store: ArtifactStore, entry: FileEntry) -> bytes:
    return (store.read_piece(entry.object, 0) or b"") if entry.pieces else b""
