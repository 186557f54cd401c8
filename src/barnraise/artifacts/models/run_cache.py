"""The Hugging Face cache of one run: libraries find the run's models in it by their ids, without a network.

The files are links to the read-only folders of the store. Where the system allows no symbolic links, they
are hard links, or copies. Names come from other machines, so each is checked before it is made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from barnraise.agent_client.run_options import ModelVersion
from barnraise.artifacts.models.huggingface_cache import repository_folder
from barnraise.artifacts.packing.portable_names import check_names
from barnraise.artifacts.store.disk import shipping_error
from barnraise.artifacts.store.manifest import FileEntry, FolderManifest
from barnraise.core.files import discard, remove_tree

_DEFAULT = "main"


class CachedModel(NamedTuple):
    """Model of a run: its name, and its files in a folder of the store."""

    snapshot: ModelVersion
    manifest: FolderManifest
    tree: Path


def make_run_cache(directory: Path, models: Collection[CachedModel]) -> None:
    """Create the cache of a run; replace one of an earlier start. Raise ShippingError if that fails."""
    distinct = {(model.snapshot.repository, model.snapshot.commit): model for model in models}
    refs = _refs(models)
    check_names(
        [
            *(f"{folder}/refs/{revision}" for folder, revision in refs),
            *(
                f"{repository_folder(repository)}/snapshots/{commit}/{entry.path}"
                for (repository, commit), model in distinct.items()
                for entry in model.manifest.files
            ),
        ]
    )
    remove_tree(directory)
    try:
        directory.mkdir(mode=0o700, parents=True)
        for (folder, revision), commit in refs.items():
            ref = directory / folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, encoding="ascii")
        linker = _Linker()
        for (repository, commit), model in distinct.items():
            own = directory / repository_folder(repository)
            for entry in model.manifest.files:
                target = own / "snapshots" / commit / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                linker.place(entry, model.tree / entry.path, own / "blobs", target)
    except OSError as error:
        remove_tree(directory)
        raise shipping_error(error, directory, "made") from error


def _refs(models: Collection[CachedModel]) -> dict[tuple[str, str], str]:
    """Return commits by folder and revision. An id without a revision means the first one that was given."""
    refs: dict[tuple[str, str], str] = {}
    for snapshot in (model.snapshot for model in models):
        refs.setdefault((repository_folder(snapshot.repository), snapshot.revision), snapshot.commit)
    for snapshot in (model.snapshot for model in models):
        refs.setdefault((repository_folder(snapshot.repository), _DEFAULT), snapshot.commit)
    return refs


class _Linker:
    """Makes symbolic links as long as the system can; after the first refusal it does not try again."""

    def __init__(self) -> None:
        self._works = True

    def place(self, entry: FileEntry, source: Path, blobs: Path, target: Path) -> None:
        """Make ``target`` a link to ``source`` through ``blobs``, as huggingface_hub does; or a copy."""
        if self._works:
            try:
                self._link(blobs / entry.object.hex(), source, target)
                return
            except FileExistsError:
                raise
            except (OSError, NotImplementedError):
                self._works = False
                discard(target)
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(source, target)
            os.chmod(target, 0o500 if entry.executable else 0o400)

    def _link(self, blob: Path, source: Path, target: Path) -> None:
        blob.parent.mkdir(exist_ok=True)
        if not blob.is_symlink():  # one content may have several names
            os.symlink(source, blob)
        os.symlink(os.path.relpath(blob, target.parent), target)
