"""Blob store: immutable files named by the SHA-256 of their content. A file with such a name is complete.

A file is written under another name, synced, renamed, and its directory synced. So every blob that the log
names exists after any crash. Blobs that the log does not name are removed at the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Iterator, Set
from pathlib import Path

from barnraise.core.errors import HubError
from barnraise.core.files import replace, sync, sync_path

_NAME = re.compile("[0-9a-f]{64}")
_READ = 1 << 20
FREE_SPACE_HINT = "Free space on the hub's disk. Committed versions are safe, and the hub continues then."


class PartialBlob:
    """A blob that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb", buffering=_READ)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def finish(self) -> str:
        self._file.flush()
        sync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, again: the file goes anyway
            self._file.close()
        self.path.unlink(missing_ok=True)


class BlobStore:
    """Content-addressed files of one hub."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._drafts = directory / "drafts"
        try:
            self._drafts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failed(error) from error

    def path(self, name: str) -> Path:
        """Return the path of a blob, existing or not. Raise HubError if the name is invalid."""
        if not _NAME.fullmatch(name):
            raise HubError(
                "a blob is named by 64 hexadecimal digits", hint="Use a name that the hub returned."
            )
        return self._directory / name[:2] / name

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def put(self, data: bytes) -> str:
        with self.partial() as draft:
            draft.write(data)
            return self.commit(draft)

    @contextlib.contextmanager
    def partial(self) -> Iterator[PartialBlob]:
        """Open a file to write.

        `commit` turns it into a blob; otherwise it is removed. Raise HubError if the disk is full.
        """
        draft: PartialBlob | None = None
        try:
            draft = PartialBlob(self._drafts / secrets.token_hex(8))
            yield draft
        except OSError as error:
            raise _failed(error) from error
        finally:
            if draft is not None:
                draft.discard()

    def commit(self, draft: PartialBlob) -> str:
        """Turn a partial blob into a blob, and return its name."""
        name = draft.finish()
        self.adopt(draft.path, name)
        return name

    def adopt(self, file: Path, name: str) -> None:
        """Move a synced file, whose content has this hash, into the store."""
        target = self.path(name)
        try:
            if not target.parent.is_dir():
                target.parent.mkdir(exist_ok=True)
                sync_path(self._directory)
            replace(file, target)
            sync_path(target.parent)
        except OSError as error:
            raise _failed(error) from error

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def remove_all(self, names: Set[str]) -> None:
        for name in names:
            self.remove(name)

    def names(self) -> Iterator[str]:
        for folder in self._directory.iterdir():
            if len(folder.name) == 2 and folder.is_dir():
                yield from (file.name for file in folder.iterdir() if _NAME.fullmatch(file.name))

    def sweep(self, named: Set[str]) -> int:
        """Remove partial files and unnamed blobs that a crash left. Return the number of blobs removed."""
        for file in self._drafts.iterdir():
            file.unlink(missing_ok=True)
        orphans = {name for name in self.names() if name not in named}
        self.remove_all(orphans)
        return len(orphans)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, which is its blob name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _failed(error: OSError) -> HubError:
    return HubError(f"the hub's disk failed: {error.strerror or error}", hint=FREE_SPACE_HINT)
