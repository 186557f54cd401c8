"""Unpacking of manifests: a folder for a run to work in, or links to read-only data.

Files share their blocks with the store where the disk can clone files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from barnraise.artifacts.packing.portable_names import check_names
from barnraise.artifacts.store.clone import Cloner
from barnraise.artifacts.store.disk import new_draft, shipping_error
from barnraise.artifacts.store.manifest import PIECE, FileEntry, FolderManifest, piece_hash
from barnraise.artifacts.store.stamps import is_stamped, stamp
from barnraise.core.errors import ShippingError
from barnraise.core.files import create_file, discard, remove_tree, replace, write_all

Locate = Callable[[bytes], Path]


def copy_tree(manifest: FolderManifest, target: Path, locate: Locate) -> None:
    """Create the files as clones or copies, never as links: the script may write to its folder.

    The content of each file is hashed.
    """
    check_names(entry.path for entry in manifest.files)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.mkdir(mode=0o700)
    except FileExistsError:
        raise ShippingError(f"{target} exists already", hint="Remove it, then run it again.") from None
    except OSError as error:
        raise shipping_error(error, target, "made") from error
    try:
        made = {""}
        cloner = Cloner()
        buffer = memoryview(bytearray(min(PIECE, max((entry.size for entry in manifest.files), default=0))))
        for entry in manifest.files:
            _make_folders(target, entry.path.rpartition("/")[0], made)
            mode = 0o777 if entry.executable else 0o666
            if not _clone(entry, target / entry.path, locate, cloner, mode):
                _copy(entry, target / entry.path, locate, buffer)
    except OSError as error:
        remove_tree(target)
        raise shipping_error(error, target, "unpacked") from error
    except BaseException:
        remove_tree(target)
        raise


def link_tree(manifest: FolderManifest, target: Path, locate: Locate) -> None:
    """Create the files as clones, links or copies, all read-only. The folder appears when it is complete."""
    draft = Path(new_draft(target.parent))
    check_names(entry.path for entry in manifest.files)
    try:
        draft.mkdir(mode=0o700)
        made = {""}
        cloner = Cloner()
        buffer = memoryview(bytearray(min(PIECE, max((entry.size for entry in manifest.files), default=0))))
        for entry in manifest.files:
            _make_folders(draft, entry.path.rpartition("/")[0], made)
            _link_or_copy(entry, draft / entry.path, locate, cloner, buffer)
        for folder in sorted(made - {""}, reverse=True):
            os.chmod(draft / folder, 0o500)
        try:
            replace(draft, target)  # before it is read-only: macOS does not rename what it cannot write
        except OSError:
            if not target.is_dir():  # else another run was faster, with the same files
                raise
            remove_tree(draft)
        os.chmod(target, 0o500)
    except OSError as error:
        remove_tree(draft)
        raise shipping_error(error, target, "made") from error
    except BaseException:
        remove_tree(draft)
        raise


def _make_folders(top: Path, folder: str, made: set[str]) -> None:
    """Create each folder exactly once; one that exists has another name on this disk, which is an error."""
    if folder in made:
        return
    _make_folders(top, folder.rpartition("/")[0], made)
    os.mkdir(top / folder, 0o755)
    made.add(folder)


def is_unchanged(path: Path | str, facts: os.stat_result, entry: FileEntry) -> bool:
    """Tell whether a file has the content of an entry; it is read only if it was written since `stamp`."""
    if facts.st_size != entry.size:
        return False
    return is_stamped(facts, entry.object) or _has_content(path, entry)


def is_tree_unchanged(manifest: FolderManifest, tree: Path) -> bool:
    """Tell whether a folder that `link_tree` made still has all files with their content."""
    try:
        for entry in manifest.files:
            path = tree / entry.path
            if not is_unchanged(path, os.lstat(path), entry):
                return False
    except OSError:
        return False
    return True


def _has_content(path: Path | str, entry: FileEntry) -> bool:
    buffer = memoryview(bytearray(min(PIECE, entry.size)))
    with open(path, "rb", buffering=0) as file:
        return all(
            _fill(file, part := buffer[: entry.piece_size(index)]) and piece_hash(part) == digest
            for index, digest in enumerate(entry.pieces)
        )


def _clone(entry: FileEntry, path: Path, locate: Locate, cloner: Cloner, mode: int) -> bool:
    """Create the file as a clone of the stored content, and hash it; return False if it must be copied."""
    if not entry.pieces or not cloner.works:
        return False
    source = locate(entry.object)
    try:
        if not cloner.clone(source, path, mode):
            return False
    except FileNotFoundError:
        raise _gone(entry) from None
    if os.stat(path).st_size != entry.size or not _has_content(path, entry):
        discard(source)
        raise _gone(entry)
    return True


def _link_or_copy(entry: FileEntry, path: Path, locate: Locate, cloner: Cloner, buffer: memoryview) -> None:
    if _clone(entry, path, locate, cloner, 0o600):
        _make_read_only(entry, path)
        return
    # Links share one mode, so a program needs its own copy; and an empty file is no object.
    if entry.pieces and not entry.executable:
        try:
            os.link(locate(entry.object), path)
            return
        except FileNotFoundError:
            raise _gone(entry) from None
        except FileExistsError:
            raise
        except OSError:  # no hard links on this disk, or too many of this file
            pass
    _copy(entry, path, locate, buffer)
    _make_read_only(entry, path)


def _make_read_only(entry: FileEntry, path: Path) -> None:
    os.chmod(path, 0o500 if entry.executable else 0o400)
    stamp(path, entry.object)


def _copy(entry: FileEntry, path: Path, locate: Locate, buffer: memoryview) -> None:
    target = create_file(path, 0o777 if entry.executable else 0o666)
    try:
        if not entry.pieces:
            return
        name = entry.object
        try:
            source = open(locate(name), "rb", buffering=0)  # noqa: SIM115  # closed below
        except FileNotFoundError:
            raise _gone(entry) from None
        with source:
            for index, digest in enumerate(entry.pieces):
                part = buffer[: entry.piece_size(index)]
                if not _fill(source, part) or piece_hash(part) != digest:
                    discard(locate(name))
                    raise _gone(entry)
                write_all(target, part)
    finally:
        os.close(target)


def _fill(source: FileIO, part: memoryview) -> bool:
    while part:
        count = source.readinto(part)
        if not count:
            return False
        part = part[count:]
    return True


def _gone(entry: FileEntry) -> ShippingError:
    return ShippingError(
        f"the stored content of {entry.path!r} is missing or damaged on this machine",
        hint="Run it again: the content is sent again.",
    )
