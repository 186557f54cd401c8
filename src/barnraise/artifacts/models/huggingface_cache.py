"""The Hugging Face cache of this machine: where it is, and the files of one version of a model in it.

    models--ORG--NAME/refs/main             the commit of a branch
    models--ORG--NAME/snapshots/COMMIT/...  links to the files, by their names
    models--ORG--NAME/blobs/...             the files, by hashes of other kinds than ours

It belongs to the user: it is only read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from barnraise.agent_client.run_options import MODEL_COMMIT, MODEL_REPOSITORY, MODEL_REVISION, ModelVersion
from barnraise.artifacts.models.weights import INDEX_SUFFIX, missing_shards
from barnraise.artifacts.packing.ignore_rules import FoundFile
from barnraise.artifacts.store.disk import shipping_error
from barnraise.core.errors import ShippingError

_MOST_INDEX_BYTES = 64 << 20
_MOST_LISTED = 8


class ModelReference(NamedTuple):
    """Name of a model at Hugging Face, and the branch, tag or commit that is meant."""

    repository: str
    revision: str = "main"


def cache_directory(environ: Mapping[str, str], setting: str | None = None) -> Path:
    """Return the place of the cache, by the setting or by the variables of huggingface_hub itself."""
    for text in (setting, environ.get("HF_HUB_CACHE"), environ.get("HUGGINGFACE_HUB_CACHE")):
        if text:
            return Path(os.path.expandvars(text)).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "huggingface" / "hub"


def parse_reference(text: str) -> ModelReference | None:
    """Return what an id such as ``org/name`` or ``org/name@revision`` names; None if it is no id."""
    repository, at, revision = text.partition("@")
    if re.search(MODEL_REPOSITORY, repository) is None:
        return None
    if not at:
        return ModelReference(repository)
    if re.search(MODEL_REVISION, revision) is None:
        return None
    return ModelReference(repository, revision)


def repository_folder(repository: str) -> str:
    """Return the name of a model's folder in a cache."""
    return f"models--{repository.replace('/', '--')}"


def find_snapshot(cache: Path, reference: ModelReference) -> tuple[ModelVersion, Path]:
    """Return the version that a reference names and its folder; raise ShippingError if it is not here."""
    repository, revision = reference
    folder = cache / repository_folder(repository)
    download = f"hf download {repository}" + (f" --revision {revision}" if revision != "main" else "")
    hint = f"Download it first: {download}; or name a folder, such as ./llama"
    if not folder.is_dir():
        raise ShippingError(
            f"the model {repository} is not in the Hugging Face cache of this machine, {cache}", hint=hint
        )
    commit = _commit_of(folder, revision)
    snapshot = folder / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        known = ", ".join(_revisions(folder)[:_MOST_LISTED]) or "none"
        raise ShippingError(
            f"the revision {revision} of {repository} is not in the Hugging Face cache of this machine, "
            f"{cache}; it has: {known}",
            hint=hint,
        )
    return ModelVersion(repository, revision, commit), snapshot


def _commit_of(folder: Path, revision: str) -> str:
    """Return the commit of a revision; an empty text if it is unknown."""
    if re.search(MODEL_COMMIT, revision):
        return revision
    try:
        with open(folder / "refs" / revision, "rb") as file:
            text = file.read(100).decode("ascii", "replace").strip()
    except OSError:
        return ""
    return text if re.search(MODEL_COMMIT, text) else ""


def _revisions(folder: Path) -> list[str]:
    refs = [path for path in (folder / "refs").rglob("*") if path.is_file()]
    names = [path.relative_to(folder / "refs").as_posix() for path in refs]
    return [*sorted(names), *sorted(path.name for path in folder.glob("snapshots/*"))]


def snapshot_files(snapshot: Path) -> list[FoundFile]:
    """Return the files of a version; raise ShippingError if one is missing or lies outside of the cache."""
    repository = snapshot.parents[1]
    # The model's own folder may be a link to another disk.
    tops = {os.path.realpath(repository), os.path.realpath(repository.parent)}
    try:
        files = [_resolve(path, snapshot, tops) for path in _walk(snapshot)]
        paths = [file.path for file in files]
        for file in files:
            if file.path.endswith(INDEX_SUFFIX) and file.facts.st_size <= _MOST_INDEX_BYTES:
                missing = missing_shards(paths, file.path, Path(file.real).read_bytes())
                if missing:
                    raise _incomplete(snapshot, f"{', '.join(missing[:_MOST_LISTED])} is not there")
    except OSError as error:
        raise shipping_error(error, snapshot, "read") from error
    if not files:
        raise _incomplete(snapshot, "it has no files")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _resolve(path: Path, snapshot: Path, tops: set[str]) -> FoundFile:
    name = path.relative_to(snapshot).as_posix()
    real = os.path.realpath(path)
    if not any(Path(real).is_relative_to(top) for top in tops):
        raise ShippingError(
            f"the symbolic link {name!r} of the model leads out of the Hugging Face cache, to {real}",
            hint="Copy the model into a folder and name that: --model NAME=./FOLDER",
        )
    try:
        facts = os.stat(real)
    except OSError as error:
        raise _incomplete(snapshot, f"{name} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise _incomplete(snapshot, f"{name} is not a file")
    return FoundFile(name, real, facts)


def _incomplete(snapshot: Path, why: str) -> ShippingError:
    return ShippingError(
        f"the model in {snapshot} is not complete: {why}",
        hint="Download it again: hf download ID",
    )
