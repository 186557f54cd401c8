"""Garbage collection: drop the contents that were unused for the longest time."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts.store.store import ArtifactStore
from barnraise.core.errors import ShippingError
from barnraise.core.files import discard, remove_tree

GRACE_S = 3600.0  # another process may have put it there for a manifest that it has not written yet


class Garbage(NamedTuple):
    """Contents that can be dropped. ``objects`` are files of the store and received parts of files."""

    manifests: list[Path]
    trees: list[Path]
    objects: list[Path]
    bytes: int


class CollectedGarbage(NamedTuple):
    """Number and size of the dropped contents."""

    objects: int
    bytes: int


def collect(store: ArtifactStore, most_bytes: int, keep: Collection[bytes]) -> CollectedGarbage:
    """Keep the manifests ``keep`` and as many recently used others as fit; drop the rest.

    Contents that were written or used within the last hour stay, even if that is more than fits.
    """
    return remove_garbage(store, find_garbage(store, most_bytes, keep))


def find_garbage(store: ArtifactStore, most_bytes: int, keep: Collection[bytes]) -> Garbage:
    """Return what `collect` would drop, and drop nothing."""
    young = time.time() - GRACE_S
    held: set[bytes] = set()
    trees: set[str] = set()
    dropped: list[Path] = []
    total = 0
    full = False
    for name, used in sorted(_manifests(store), key=lambda manifest: (manifest[0] not in keep, -manifest[1])):
        must_stay = name in keep or used > young
        objects = _objects(store, name, used) if must_stay or not full else {}
        added = sum(size for key, size in objects.items() if key not in held)
        full = full or total + added > most_bytes
        if must_stay or not full:
            held |= objects.keys()
            trees.add(name.hex())
            total += added
        else:
            dropped.append(store.manifests / name.hex())
    old_trees = [
        tree
        for tree in store.data.iterdir()
        if tree.name not in trees and _size_if_old(tree, young) is not None
    ]
    sizes = _unused_objects(store, held, young)
    return Garbage(dropped, old_trees, list(sizes), sum(sizes.values()))


def remove_garbage(store: ArtifactStore, garbage: Garbage) -> CollectedGarbage:
    """Remove what `find_garbage` found, except what was used again since then."""
    young = time.time() - GRACE_S
    for path in garbage.manifests:
        if _size_if_old(path, young) is not None:
            discard(path)
    for tree in garbage.trees:
        if _size_if_old(tree, young) is not None:
            remove_tree(tree)
    dropped = freed = 0
    for path in garbage.objects:
        size = _size_if_old(path, young)
        if size is None:
            continue
        name = _name_of(store, path)
        if path.parent == store.partial and name is not None:
            store.drop_partial(name)
        else:
            discard(path)
        dropped += 1
        freed += size
    return CollectedGarbage(dropped, freed)


def stored_manifests(store: ArtifactStore) -> set[bytes]:
    """Return the ids of all manifests in the store."""
    return {name for name, _ in _manifests(store)}


def named_elsewhere(store: ArtifactStore, name: bytes) -> set[bytes]:
    """Return the contents that other manifests name, too."""
    lists = [(other, used) for other, used in _manifests(store) if other != name]
    return {key for other, used in lists for key in _objects(store, other, used)}


def _unused_objects(store: ArtifactStore, held: set[bytes], young: float) -> dict[Path, int]:
    """Return the sizes of the objects that no kept manifest names, and of unfinished drafts."""
    sizes = {}
    for path in [*store.objects.glob("??/*"), *store.partial.iterdir()]:
        size = _size_if_old(path, young)
        if size is not None and _name_of(store, path) not in held:
            sizes[path] = size
    return sizes


def _name_of(store: ArtifactStore, path: Path) -> bytes | None:
    """Return the name of an object from its path; None for an unfinished draft."""
    text = path.name[:64] if path.parent == store.partial else path.parent.name + path.name
    return bytes.fromhex(text) if _is_name(text) else None


def _manifests(store: ArtifactStore) -> list[tuple[bytes, float]]:
    """Return the manifests with the time of their last use."""
    manifests = []
    for path in store.manifests.iterdir():
        if _is_name(path.name):
            try:
                manifests.append((bytes.fromhex(path.name), path.stat().st_mtime))
            except OSError:  # gone meanwhile
                continue
    return manifests


def _objects(store: ArtifactStore, name: bytes, used: float) -> dict[bytes, int]:
    try:
        manifest = store.manifest(name)
        os.utime(store.manifests / name.hex(), (used, used))  # looking is not using
    except (ShippingError, OSError):
        return {}
    return {} if manifest is None else {key: entry.size for key, entry in manifest.objects().items()}


def _is_name(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _size_if_old(path: Path, young: float) -> int | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size if facts.st_mtime < young else None
