"""Changes that a run made in its folder: the files to bring back."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from barnraise.artifacts.packing.ignore_rules import ALWAYS_LEFT_OUT, FoundFile
from barnraise.artifacts.packing.pack import check_size
from barnraise.artifacts.store.disk import read_up_to
from barnraise.artifacts.store.manifest import FileEntry, FolderLimits, FolderManifest, piece_hash
from barnraise.core.errors import ShippingError


def changed_since(manifest: FolderManifest, folder: Path, limits: FolderLimits) -> list[str]:
    """Return the paths of new and changed files; symbolic links are skipped.

    Ignore files do not apply: git often ignores checkpoints, and these are the result of a run.
    """
    return sorted(file.path for file in check_size(folder, altered_files(manifest, folder), limits))


def altered_files(manifest: FolderManifest, folder: Path) -> Iterator[FoundFile]:
    """Return new and changed files, in any order."""
    known = {entry.path: entry for entry in manifest.files}
    return (file for file in _files(folder) if not _is_same(known.get(file.path), file))


def drop_unchanged(manifest: FolderManifest, folder: Path, is_stored: Callable[[FileEntry], bool]) -> int:
    """Remove the files of a run that has ended and that it did not change; return their bytes.

    Only contents that the store has are removed. Nothing is removed through a symbolic link.
    """
    top = os.path.realpath(folder)
    freed = 0
    for entry in manifest.files:
        real = os.path.join(top, *entry.path.split("/"))
        try:
            facts = os.lstat(real)
            is_ours = stat.S_ISREG(facts.st_mode) and os.path.realpath(real) == real
            if is_ours and is_stored(entry) and _is_same(entry, FoundFile(entry.path, real, facts)):
                os.unlink(real)
                freed += entry.size
        except (OSError, ShippingError):  # the script removed or hid it
            continue
    return freed


def _files(folder: Path) -> Iterator[FoundFile]:
    waiting = [("", os.fspath(folder))]
    while waiting:
        path, real = waiting.pop()
        try:
            with os.scandir(real) as entries:
                for entry in entries:
                    if entry.name in ALWAYS_LEFT_OUT:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((f"{path}{entry.name}/", entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        yield FoundFile(path + entry.name, entry.path, entry.stat(follow_symlinks=False))
        except OSError as error:
            raise ShippingError(
                f"{real} cannot be read: {error.strerror}", hint="Make it readable for you, then try again."
            ) from error


def _is_same(entry: FileEntry | None, file: FoundFile) -> bool:
    if entry is None or entry.size != file.facts.st_size:
        return False
    try:
        with open(file.real, "rb", buffering=0) as content:
            return all(
                piece_hash(read_up_to(content.fileno(), entry.piece_size(number))) == digest
                for number, digest in enumerate(entry.pieces)
            )
    except OSError as error:
        raise ShippingError(
            f"{file.path!r} cannot be read: {error.strerror}",
            hint="Make it readable for you, then try again.",
        ) from error
