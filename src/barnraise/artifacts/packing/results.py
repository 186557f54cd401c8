"""Results of a run: the files that it wrote, packed where it ran and unpacked where the user wants them."""

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
    """Return the directory of the store that agent and command line of a user share."""
    return state / "store"


def folder_limits(settings: Settings) -> FolderLimits:
    """Return the limits of a run's folder and of its results."""
    return FolderLimits(settings.runs.most_bytes, settings.runs.most_files)


def data_limits(settings: Settings) -> FolderLimits:
    """Return the limits of a data set."""
    return FolderLimits(settings.runs.most_data_bytes, settings.runs.most_files)


def pack_changes(manifest: FolderManifest, folder: Path, store: ArtifactStore, limits: FolderLimits) -> bytes:
    """Pack all new and changed files; return the id of the manifest, or empty if there are none."""
    changed = changed_since(manifest, folder, limits)
    return pack(folder, store, limits, only=changed).id if changed else b""


def unpack_into(store: ArtifactStore, name: bytes, target: Path) -> int:
    """Copy the files of a packed folder and return their number.

    Files that exist already stay as they are.
    """
    manifest = store.manifest(name)
    if manifest is None:
        raise ShippingError("the files are not in this machine's store any more", hint="Bring them again.")
    if not target.exists():
        store.unpack(manifest, target)
    return len(manifest.files)


def read_files(
    store: ArtifactStore, manifest: FolderManifest, wanted: Callable[[str], bool]
) -> dict[str, bytes]:
    """Return the contents of some files by path; leave out those too large to be text."""
    return {
        entry.path: _content(store, entry)
        for entry in manifest.files
        if entry.size <= _LARGEST_READ and wanted(entry.path)
    }


def _content(store: ArtifactStore, entry: FileEntry) -> bytes:
    return (store.read_piece(entry.object, 0) or b"") if entry.pieces else b""
