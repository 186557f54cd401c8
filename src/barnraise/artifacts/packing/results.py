"""Results of a run: the files that it wrote, packed where it ran and unpacked where the user wants them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts.packing.changes import altered_files
from barnraise.artifacts.packing.ignore_rules import FoundFile
from barnraise.artifacts.packing.pack import LOOK_AT_MOST, pack
from barnraise.artifacts.store.manifest import MOST_FILES, FileEntry, FolderLimits, FolderManifest
from barnraise.artifacts.store.store import ArtifactStore
from barnraise.core.config import Settings
from barnraise.core.errors import ShippingError
from barnraise.core.units import counted, format_size

RESULTS_STAY = "the results stay"  # so begins what a machine reports of results that it does not send
_LARGEST_READ = 4 << 20
_CHECKPOINT = re.compile(r"(?:.*/)?checkpoint-[0-9]+(?=/)")  # folders that a Trainer writes during training


class PackedResults(NamedTuple):
    """Files that a run wrote, in the store. ``id``: empty if there are none.

    ``note``: what was left out because of the limits; empty if nothing was.
    """

    id: bytes
    note: str = ""


def store_directory(state: Path) -> Path:
    """Return the directory of the store that agent and command line of a user share."""
    return state / "store"


def folder_limits(settings: Settings) -> FolderLimits:
    """Return the limits of a run's folder and of its results."""
    return FolderLimits(settings.runs.most_bytes, settings.runs.most_files)


def data_limits(settings: Settings) -> FolderLimits:
    """Return the limits of a data set."""
    return FolderLimits(settings.runs.most_data_bytes, settings.runs.most_files)


def pack_changes(
    manifest: FolderManifest, folder: Path, store: ArtifactStore, limits: FolderLimits
) -> PackedResults:
    """Pack all new and changed files. If they exceed the limits, leave out the checkpoints of a Trainer.

    Raise ShippingError if the rest exceeds them, too.
    """
    altered = list(islice(altered_files(manifest, folder), LOOK_AT_MOST))
    excess, note = _excess(altered, limits), ""
    if excess:
        rest = [file for file in altered if not _CHECKPOINT.match(file.path)]
        if not rest or _excess(rest, limits):
            raise _too_large(altered, excess)
        note = _left_out([file for file in altered if _CHECKPOINT.match(file.path)], excess)
        altered = rest
    if not altered:
        return PackedResults(b"")
    return PackedResults(pack(folder, store, limits, only=[file.path for file in altered]).id, note)


def _excess(files: Sequence[FoundFile], limits: FolderLimits) -> str:
    """Return which limit these files exceed, with the name of its setting; empty if they exceed none."""
    most_files, size = min(limits.most_files, MOST_FILES), _size(files)
    if len(files) > most_files:
        return f"they are {counted(len(files), 'file')}, and `runs.most_files` allows {most_files:,}"
    if size > limits.most_bytes:
        allowed = format_size(limits.most_bytes)
        return f"they have {format_size(size)}, and `runs.most_bytes` allows {allowed}"
    return ""


def _too_large(files: Sequence[FoundFile], excess: str) -> ShippingError:
    largest = max(files, key=lambda file: file.facts.st_size)
    return ShippingError(
        f"{excess}; the largest file is {largest.path} with {format_size(largest.facts.st_size)}",
        hint="Copy them from there before 20 later runs have ended, or export the newest checkpoint of a "
        "session: barnraise export RUN FOLDER. For the next run, raise that setting there and on the machine "
        "that fetches.",
    )


def _left_out(checkpoints: Sequence[FoundFile], excess: str) -> str:
    folders = sorted({match[0] for file in checkpoints if (match := _CHECKPOINT.match(file.path))})
    names = folders[0] if len(folders) == 1 else f"{folders[0]} and {len(folders) - 1} more"
    size = format_size(_size(checkpoints))
    return f"the results lack {names} ({size}), because all files would be too large: {excess}"


def _size(files: Sequence[FoundFile]) -> int:
    return sum(file.facts.st_size for file in files)


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
