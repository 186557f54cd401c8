"""Linked files: large files that stay in place while others fetch them. The store has links, no copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from barnraise.artifacts.packing.pack import PackedFolder
from barnraise.artifacts.packing.share import hash_pieces
from barnraise.artifacts.store.disk import new_draft, shipping_error
from barnraise.artifacts.store.gc import named_elsewhere
from barnraise.artifacts.store.manifest import FileEntry, make_manifest
from barnraise.artifacts.store.store import ArtifactStore
from barnraise.core.files import discard


def entry_of(path: Path, name: str) -> FileEntry:
    """Return the manifest entry of a file, reading all of it; raise OSError if that fails."""
    size, pieces = hash_pieces(path)
    return FileEntry(name, size, False, pieces)


def link_files(folder: Path, names: Iterable[str], store: ArtifactStore) -> PackedFolder:
    """Make these files, which must not change any more, available to others. They become read-only."""
    try:
        entries = [_lend(folder / name, name, store) for name in names]
    except OSError as error:
        raise shipping_error(error, folder, "lent") from error
    manifest = make_manifest(entries)
    return PackedFolder(manifest, store.put_manifest(manifest), len(entries), manifest.size)


def unlink_files(store: ArtifactStore, name: bytes) -> None:
    """Drop a manifest and its contents from the store; linked files elsewhere stay.

    Contents that other manifests name stay as well, since a manifest may name contents of another.
    """
    manifest = store.manifest(name)
    kept = named_elsewhere(store, name) if manifest is not None else set()
    for key in manifest.objects() if manifest is not None else ():
        if key not in kept:
            discard(store.object_path(key))
    discard(store.manifests / name.hex())


def _lend(path: Path, name: str, store: ArtifactStore) -> FileEntry:
    entry = entry_of(path, name)
    if not entry.pieces or store.holds(entry):
        return entry
    draft = Path(new_draft(store.partial))
    try:
        try:
            os.link(path, draft)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links on this disk
            shutil.copyfile(path, draft)
        store.adopt(draft, entry.object)
    finally:
        discard(draft)
    return entry
