"""Own copies: files of a model that this machine's Hugging Face cache has, and that need not be fetched.

The names there are hashes of other kinds, and no one checks them after the download. So a file counts if
its size is right and each of its pieces has our hash.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from barnraise.artifacts.models.huggingface_cache import repository_folder
from barnraise.artifacts.packing.hash_cache import HashCache, HashedFile
from barnraise.artifacts.packing.share import Sharing, share
from barnraise.artifacts.store.clone import Cloner
from barnraise.artifacts.store.disk import new_draft, read_up_to
from barnraise.artifacts.store.manifest import PIECE, FileEntry, FolderManifest, piece_hash
from barnraise.artifacts.store.store import ArtifactStore
from barnraise.core.files import create_file, discard, write_all

_MOST_SEEN = 200_000  # files of the cache
_MOST_TRIED = 16  # files of one size
_log = logging.getLogger(__name__)

OnCompared = Callable[[int, int], None]


def adopt_own_copies(
    manifest: FolderManifest,
    store: ArtifactStore,
    cache: Path,
    repository: str = "",
    *,
    on_compared: OnCompared = lambda _done, _all: None,
    on_adopted: Callable[[], None] = lambda: None,
) -> int:
    """Put the files that the cache has into the store, and return their bytes.

    ``repository``: where to look first. ``on_compared`` gets the bytes that were compared and that could be;
    it may raise to stop the search.
    """
    missing = store.missing(manifest)
    wanted = {name: entry for name, entry in manifest.objects().items() if name in missing}
    if not wanted or not os.path.isdir(cache):
        return 0
    known = _by_size(cache, repository, {entry.size for entry in wanted.values()})
    possible = [entry for entry in wanted.values() if entry.size in known]
    search = _Search(store, sum(entry.size for entry in possible), on_compared)
    taken = 0
    with HashCache(store.directory, os.path.realpath(cache)) as remembered:
        for entry in possible:
            if any(search.take(path, entry, remembered) for path in known[entry.size]):
                taken += entry.size
                on_adopted()
            search.finish(entry)
        remembered.learn(search.hashed)
    return taken


class _Search:
    """Comparison of candidates with the entries of a manifest."""

    def __init__(self, store: ArtifactStore, all_bytes: int, on_compared: OnCompared) -> None:
        self.hashed: list[HashedFile] = []
        self._store = store
        self._sharing = Sharing(Cloner(), links=True)
        self._all_bytes = all_bytes
        self._finished_bytes = 0
        self._on_compared = on_compared

    def finish(self, entry: FileEntry) -> None:
        """Count the file of an entry as compared."""
        self._finished_bytes += entry.size
        self._on_compared(self._finished_bytes, self._all_bytes)

    def take(self, path: str, entry: FileEntry, remembered: HashCache) -> bool:
        """Put a candidate into the store if it has the content of the entry; return False if it has not."""
        try:
            facts = os.stat(path)
            if facts.st_size != entry.size:
                return False
            known = remembered.pieces(path, facts)
            if known is not None and known != entry.pieces:
                return False
            if known is None and not self._has_pieces(Path(path), entry, limit=1):
                return False  # a link, also one that is removed again, would change the file's times
            taken = self._share(path, facts, entry, is_known=known is not None)
            if taken is None:
                taken = self._copy(path, entry)
        except OSError as error:
            _log.info("%s is not used: %s", path, error)
            return False
        if taken:
            self._store.drop_partial(entry.object)
            self.hashed.append(HashedFile(path, facts, entry.pieces))
        return taken

    def _share(self, path: str, facts: os.stat_result, entry: FileEntry, *, is_known: bool) -> bool | None:
        """Share the candidate's blocks; return None if the disk cannot."""
        draft = share(path, facts, self._store, self._sharing)
        if draft is None:
            return None
        try:
            if not is_known and not self._has_pieces(draft.path, entry):
                return False
            now = os.stat(draft.path if draft.is_link else path)
            if (now.st_size, now.st_mtime_ns) != (facts.st_size, facts.st_mtime_ns):
                return False
            draft.adopt(self._store, entry.object)
        finally:
            discard(draft.path)
        return True

    def _copy(self, path: str, entry: FileEntry) -> bool:
        """Copy the candidate; what is stored is what was hashed."""
        draft = Path(new_draft(self._store.partial))
        try:
            target = create_file(draft, 0o600)
            try:
                if not self._has_pieces(Path(path), entry, target):
                    return False
            finally:
                os.close(target)
            self._store.adopt(draft, entry.object)
        finally:
            discard(draft)
        return True

    def _has_pieces(
        self, path: Path, entry: FileEntry, target: int | None = None, *, limit: int | None = None
    ) -> bool:
        """Compare the first ``limit`` pieces, or all, and stop at the first difference.

        ``target``: where the compared pieces are written to.
        """
        with open(path, "rb", buffering=0) as file:
            for index, digest in enumerate(entry.pieces[:limit]):
                data = read_up_to(file.fileno(), entry.piece_size(index))
                if len(data) != entry.piece_size(index) or piece_hash(data) != digest:
                    return False
                if target is not None:
                    write_all(target, data)
                self._on_compared(self._finished_bytes + index * PIECE, self._all_bytes)
        return True


def _by_size(cache: Path, repository: str, sizes: set[int]) -> dict[int, list[str]]:
    """Return the files of the cache that have one of these sizes; those of the repository first."""
    matches: dict[int, dict[str, None]] = {}
    first = repository_folder(repository) if repository else ""
    try:
        folders = sorted(cache.glob("models--*"), key=lambda folder: (folder.name != first, folder.name))
    except OSError:
        return {}
    seen = 0
    for folder in folders:
        for path in _files(folder):
            seen += 1
            if seen > _MOST_SEEN:
                return {size: list(paths) for size, paths in matches.items()}
            try:
                facts = os.stat(path)
            except OSError:  # a link that leads nowhere
                continue
            paths = matches.setdefault(facts.st_size, {}) if facts.st_size in sizes else None
            if paths is not None and stat.S_ISREG(facts.st_mode) and len(paths) < _MOST_TRIED:
                paths[os.path.realpath(path)] = None
    return {size: list(paths) for size, paths in matches.items()}


def _files(folder: Path) -> Iterator[str]:
    """Yield the blobs, and the files of versions that were stored without links."""
    for top in ("blobs", "snapshots"):
        for place, _, names in os.walk(folder / top):
            for name in names:
                path = os.path.join(place, name)
                if top == "blobs" or not os.path.islink(path):
                    yield path
