"""Packing of a folder into the store: walk, check, hash, store."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts.packing.hash_cache import HashCache, HashedFile
from barnraise.artifacts.packing.ignore_rules import FoundFile, walk
from barnraise.artifacts.packing.portable_names import check_names
from barnraise.artifacts.packing.share import Sharing, hash_pieces, share
from barnraise.artifacts.store.disk import new_draft, read_up_to, shipping_error
from barnraise.artifacts.store.manifest import (
    MOST_FILES,
    PIECE,
    FileEntry,
    FolderLimits,
    FolderManifest,
    make_manifest,
    piece_hash,
)
from barnraise.artifacts.store.stamps import is_stamped
from barnraise.artifacts.store.store import ArtifactStore
from barnraise.core.errors import ShippingError
from barnraise.core.files import create_file, discard, write_all
from barnraise.core.units import format_size

_MOST_LISTED = 8
LOOK_AT_MOST = 1_000_000
_THREADS = 4


class PackedFolder(NamedTuple):
    """Folder that is in the store."""

    manifest: FolderManifest
    id: bytes
    files: int
    bytes: int


def pack(
    folder: Path,
    store: ArtifactStore,
    limits: FolderLimits,
    only: Iterable[str] | None = None,
    *,
    everything: bool = False,
) -> PackedFolder:
    """Pack a working folder, a data set, or single files.

    ``everything``: a data set, in which only ``.barnraiseignore`` leaves files out. ``only``: exactly these
    files, such as those that a run has changed.
    """
    files = walk(folder, everything=everything) if only is None else _named(folder, only)
    return pack_files(folder, files, store, limits)


def pack_files(
    folder: Path,
    files: Iterable[FoundFile],
    store: ArtifactStore,
    limits: FolderLimits,
    sharing: Sharing | None = None,
) -> PackedFolder:
    """Pack the files found in a folder. ``sharing``: large ones share their blocks with the store."""
    checked = check_size(folder, files, limits)
    check_names(file.path for file in checked)
    with HashCache(store.directory, _common_folder(folder, checked)) as remembered:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            packed = list(pool.map(lambda file: _pack_file(file, store, remembered, sharing), checked))
        remembered.learn(hashed for _, hashed in packed)
    manifest = make_manifest(entry for entry, _ in packed)
    name = store.put_manifest(manifest)
    return PackedFolder(manifest, name, len(manifest.files), manifest.size)


def _common_folder(folder: Path, files: Iterable[FoundFile]) -> str:
    """Return the folder that all files are really in; those of a Hugging Face cache are beside the links."""
    top = os.path.realpath(folder)
    try:
        return os.path.commonpath([top, *(os.path.dirname(file.real) for file in files)])
    except ValueError:  # several drives
        return top


def check_size(folder: Path, files: Iterable[FoundFile], limits: FolderLimits) -> list[FoundFile]:
    """Raise ShippingError with the largest files if they exceed the limits."""
    checked = []
    total = 0
    for file in files:
        checked.append(file)
        total += file.facts.st_size
        if len(checked) >= LOOK_AT_MOST:
            break
    most_files = min(limits.most_files, MOST_FILES)
    if len(checked) <= most_files and total <= limits.most_bytes:
        return checked
    at_least = "at least " if len(checked) >= LOOK_AT_MOST else ""
    if len(checked) > most_files:
        what = f"{folder} has {at_least}{len(checked):,} files to ship, at most {most_files:,} are possible"
    else:
        max_size = format_size(limits.most_bytes)
        what = f"{folder} has {at_least}{format_size(total)} to send, at most {max_size} are allowed"
    by_count = len(checked) > most_files
    raise ShippingError(
        f"{what}; the largest are:\n  " + "\n  ".join(_largest(checked, by_count=by_count)),
        hint="List what the run does not need in `.barnraiseignore`, and give data sets with "
        "`--data NAME=PATH`.",
    )


def _largest(files: list[FoundFile], *, by_count: bool) -> list[str]:
    """Return the largest folders and files; a folder that is nearly all of another replaces it."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for file in files:
        sizes[file.path] += file.facts.st_size
        counts[file.path] += 1
        parent = file.path.rpartition("/")[0]
        while parent:
            sizes[f"{parent}/"] += file.facts.st_size
            counts[f"{parent}/"] += 1
            parent = parent.rpartition("/")[0]
    weights = counts if by_count else sizes
    chosen: list[str] = []
    for name, weight in heapq.nsmallest(
        4 * _MOST_LISTED, weights.items(), key=lambda item: (-item[1], -len(item[0]))
    ):
        if not any(other.startswith(name) and weights[other] > 0.9 * weight for other in chosen):
            chosen.append(name)
    return [
        f"{format_size(sizes[name]):>9}  {counts[name]:>7,} file{'s' if counts[name] != 1 else ' '}  {name}"
        for name in chosen[:_MOST_LISTED]
    ]


def _named(folder: Path, paths: Iterable[str]) -> list[FoundFile]:
    names = sorted(set(paths))
    check_names(names)
    top = os.path.realpath(folder)
    files = []
    for path in names:
        real = os.path.join(top, *path.split("/"))
        if os.path.realpath(real) != real or not os.path.isfile(real):
            raise ShippingError(
                f"{path!r} is not a file in {folder}", hint="Name files that are there and are no links."
            )
        files.append(FoundFile(path, real, os.stat(real)))
    return files


def _pack_file(
    file: FoundFile, store: ArtifactStore, remembered: HashCache, sharing: Sharing | None
) -> tuple[FileEntry, HashedFile]:
    try:
        pieces = remembered.pieces(file.real, file.facts)
        if pieces is None and sharing is not None:
            pieces = _linked_pieces(file, store, remembered)
        facts = file.facts
        entry = _entry(file, facts.st_size, pieces) if pieces is not None else None
        if entry is None or (pieces and not store.holds(entry)):
            shared = _share_in(file, store, sharing) if sharing is not None else None
            facts, pieces = shared or _hash_and_keep(file, store)
            entry = _entry(file, facts.st_size, pieces)
        return entry, HashedFile(file.real, facts, entry.pieces)
    except FileNotFoundError as error:
        raise _changing(file) from error
    except OSError as error:
        doing = "read" if error.filename == file.real else "packed"
        raise shipping_error(error, store.directory if doing == "packed" else file.path, doing) from error


def _entry(file: FoundFile, size: int, pieces: tuple[bytes, ...]) -> FileEntry:
    return FileEntry(file.path, size, bool(file.facts.st_mode & 0o100), pieces)


def _linked_pieces(file: FoundFile, store: ArtifactStore, remembered: HashCache) -> tuple[bytes, ...] | None:
    """Return the hashes of a file that the store has a hard link to and that was not written since.

    The store sets the time of such a file, so that the file's state is not the remembered one.
    """
    pieces = remembered.last_pieces(file.real)
    if pieces is None or file.facts.st_nlink < 2:
        return None
    name = _entry(file, file.facts.st_size, pieces).object
    try:
        is_same = os.path.samestat(os.stat(store.object_path(name)), file.facts)
    except FileNotFoundError:
        return None
    return pieces if is_same and is_stamped(file.facts, name) else None


def _share_in(
    file: FoundFile, store: ArtifactStore, sharing: Sharing
) -> tuple[os.stat_result, tuple[bytes, ...]] | None:
    """Put a clone or a hard link of a large file into the store; return None if the disk can do neither."""
    facts = os.stat(file.real)
    draft = share(file.real, facts, store, sharing) if facts.st_size > PIECE else None
    if draft is None:
        return None
    try:
        size, pieces = hash_pieces(draft.path)
        now = os.stat(file.real)
        if (now.st_mtime_ns, now.st_size, size) != (facts.st_mtime_ns, facts.st_size, facts.st_size):
            raise _changing(file)
        entry = FileEntry(file.path, size, False, pieces)
        if not store.holds(entry):
            draft.adopt(store, entry.object)
    finally:
        discard(draft.path)
    return facts, pieces


def _hash_and_keep(file: FoundFile, store: ArtifactStore) -> tuple[os.stat_result, tuple[bytes, ...]]:
    with open(file.real, "rb", buffering=0) as source:
        before = os.fstat(source.fileno())
        if before.st_size <= PIECE:
            data = read_up_to(source.fileno(), before.st_size + 1)
            pieces: tuple[bytes, ...] = (piece_hash(data),) if data else ()
            size = len(data)
            if pieces and size == before.st_size:
                entry = FileEntry(file.path, size, False, pieces)
                if not store.holds(entry):
                    store.put_object(entry.object, data)
        else:
            size, pieces = _copy_in(file, source.fileno(), before.st_size, store)
        after = os.fstat(source.fileno())
    if size != before.st_size or (before.st_mtime_ns, size) != (after.st_mtime_ns, after.st_size):
        raise _changing(file)
    return before, pieces


def _copy_in(
    file: FoundFile, source: int, expected: int, store: ArtifactStore
) -> tuple[int, tuple[bytes, ...]]:
    """Copy the content into the store while hashing it, so that the stored bytes are the hashed ones."""
    draft = Path(new_draft(store.partial))
    pieces: list[bytes] = []
    size = 0
    try:
        target = create_file(draft, 0o600)
        try:
            while size <= expected and (data := read_up_to(source, PIECE)):
                pieces.append(piece_hash(data))
                size += len(data)
                write_all(target, data)
        finally:
            os.close(target)
        entry = FileEntry(file.path, size, False, tuple(pieces))
        if size == expected and not store.holds(entry):
            store.adopt(draft, entry.object)
    finally:
        discard(draft)
    return size, tuple(pieces)


def _changing(file: FoundFile) -> ShippingError:
    return ShippingError(
        f"{file.path!r} changed while it was packed",
        hint="Wait until nothing writes it, or list it in `.barnraiseignore`, then run it again.",
    )
