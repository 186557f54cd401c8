"""Data sets and models of ``barnraise run``, packed into the store of this machine before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import click

from barnraise.agent_client.run_options import DATA_NAME, DataSet, ModelVersion
from barnraise.artifacts import ArtifactStore, data_limits, pack
from barnraise.artifacts.models.huggingface_cache import (
    ModelReference,
    cache_directory,
    find_snapshot,
    parse_reference,
    snapshot_files,
)
from barnraise.artifacts.models.weights import has_safetensors, pickled_weights
from barnraise.artifacts.packing.ignore_rules import FoundFile, walk
from barnraise.artifacts.packing.pack import PackedFolder, pack_files
from barnraise.artifacts.packing.share import Sharing
from barnraise.artifacts.store.clone import Cloner
from barnraise.cli.runs.options import is_path
from barnraise.cli.waiting import waiting
from barnraise.core.config import Settings, load_settings
from barnraise.core.errors import RunError
from barnraise.core.units import counted, format_size

_MOST_LISTED = 4


def read_data_set(text: str, store: ArtifactStore, settings: Settings) -> DataSet:
    """Pack the data set of one ``--data NAME=PATH``."""
    name, value = _name_and_value(text, "--data", "PATH", "mnist=./mnist")
    if value.startswith("@"):
        return DataSet(name, path=value[1:])
    path = Path(value).expanduser().resolve()
    if not path.exists():
        raise RunError(
            f"there is no data set at {path}",
            hint="If each machine has its own copy at that path, write --data NAME=@PATH.",
        )
    click.echo(f"barnraise: reading data set {name} at {path}", err=True)
    with waiting(f"barnraise: reading data set {name}"):
        packed = pack(path, store, data_limits(settings), everything=True)
    return _packed(DataSet(name), packed)


def read_data(
    data: Sequence[str], models: Sequence[str], store: ArtifactStore, settings: Settings
) -> tuple[DataSet, ...]:
    """Pack the data sets and models of a program."""
    return (*(read_data_set(text, store, settings) for text in data), *read_models(models, store, settings))


def read_models(texts: Sequence[str], store: ArtifactStore, settings: Settings) -> list[DataSet]:
    """Pack the models of all ``--model NAME=PATH|ID``."""
    models = [_read_model(text, store, settings) for text in texts]
    variables = [model.variable for model in models]
    double = next((model.name for model in models if variables.count(model.variable) > 1), None)
    if double is not None:
        raise RunError(f"two models have the name {double}", hint="Give each --model a name of its own.")
    return models


def find_model(value: str) -> Path:
    """Return the folder of a model on this machine: the one named, or that of an id in the cache."""
    path = Path(value).expanduser()
    reference = None if is_path(value) else parse_reference(value)
    if reference is not None and not path.is_dir():
        cache = cache_directory(os.environ, load_settings().runs.huggingface_cache)
        return find_snapshot(cache, reference)[1]
    if not path.is_dir():
        raise RunError(
            f"there is no folder of a model at {path.resolve()}",
            hint="Name a folder, or the id of a model in this machine's Hugging Face cache.",
        )
    return path


def _read_model(text: str, store: ArtifactStore, settings: Settings) -> DataSet:
    name, value = _name_and_value(text, "--model", "PATH|ID", "base=./llama")
    if value.startswith("@"):
        return DataSet(name, path=value[1:], is_model=True)
    path = Path(value).expanduser()
    reference = None if is_path(value) else parse_reference(value)
    if reference is not None:
        return _from_cache(name, reference, store, settings)
    if not path.is_dir():
        raise RunError(
            f"there is no folder of a model at {path.resolve()}",
            hint="Name a folder, or the id of a model in this machine's Hugging Face cache: "
            "--model base=meta-llama/Llama-3.2-1B. If each machine has its own copy: --model NAME=@PATH.",
        )
    path = path.resolve()
    click.echo(f"barnraise: reading model {name} at {path}", err=True)
    return _pack(DataSet(name, is_model=True), path, list(walk(path, everything=True)), store, settings)


def _from_cache(name: str, reference: ModelReference, store: ArtifactStore, settings: Settings) -> DataSet:
    """Pack a model of this machine's Hugging Face cache. Its pickles stay if it has safetensors."""
    cache = cache_directory(os.environ, settings.runs.huggingface_cache)
    version, folder = find_snapshot(cache, reference)
    where = f"{version.repository}, {_shown_version(version)}"
    click.echo(f"barnraise: reading model {name}: {where} in the Hugging Face cache", err=True)
    files = snapshot_files(folder)
    paths = [file.path for file in files]
    left_out = frozenset(pickled_weights(paths)) if has_safetensors(paths) else frozenset()
    if left_out:
        size = format_size(sum(file.facts.st_size for file in files if file.path in left_out))
        click.echo(
            f"barnraise: {name}: not sent, as there are safetensors: {_listed(sorted(left_out))} ({size})",
            err=True,
        )
    kept = [file for file in files if file.path not in left_out]
    return _pack(DataSet(name, is_model=True, version=version), folder, kept, store, settings)


def _shown_version(version: ModelVersion) -> str:
    return (
        f"commit {version.commit[:8]}"
        if version.revision == version.commit
        else f"{version.revision} ({version.commit[:8]})"
    )


def _pack(
    model: DataSet, folder: Path, files: Sequence[FoundFile], store: ArtifactStore, settings: Settings
) -> DataSet:
    """Pack the files of a model. A file of the Hugging Face cache never changes, so it may be linked."""
    sharing = Sharing(Cloner(), links=model.version is not None)
    with waiting(f"barnraise: reading model {model.name}"):
        packed = pack_files(folder, files, store, data_limits(settings), sharing)
    pickled = pickled_weights(file.path for file in files)
    if pickled:
        click.echo(
            f"barnraise: {model.name}: {_listed(pickled)} may be pickles, which can run code when they are "
            "loaded; a guest's machine rejects them",
            err=True,
        )
        click.echo("  -> Save the model as safetensors, or list them in .barnraiseignore", err=True)
    return _packed(model, packed)


def _packed(data: DataSet, packed: PackedFolder) -> DataSet:
    what = f"{counted(packed.files, 'file')}, {format_size(packed.bytes)}"
    click.echo(f"barnraise: {data.name}: {what}", err=True)
    return DataSet(
        data.name,
        manifest=packed.id,
        files=packed.files,
        bytes=packed.bytes,
        is_model=data.is_model,
        version=data.version,
    )


def _name_and_value(text: str, option: str, form: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or re.fullmatch(DATA_NAME, name) is None or not value:
        raise RunError(
            f"{option} {text!r} is not NAME={form}",
            hint=f"NAME has at most 40 letters, digits and underscores. For example: {option} {example}",
        )
    return name, value


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"{', '.join(names[:_MOST_LISTED])}{more}"
