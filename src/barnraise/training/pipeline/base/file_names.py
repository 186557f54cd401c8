"""Names of parameters in the files of a model.

Transformers stores some parameters under other names, or in other pieces, than its models have. Its own table
says how. A model of another library has the same names in its files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from barnraise.core.errors import RunError
from barnraise.core.installation import install_hint

_LAYERS = (".base_layer", ".modules_to_save.default", ".original_module")
_COMPILED = "_orig_mod."
_PEFT = "base_model.model."

Read = Callable[[str], torch.Tensor]


class StoredSource(NamedTuple):
    """Tensors of files that become parameters. ``stored``: their names, in the order of the conversion.

    ``targets``: the parameters, as the model without adapters names them. ``load``: reads the tensors, and
    returns the parameters by target.
    """

    stored: tuple[str, ...]
    targets: tuple[str, ...]
    load: Callable[[Read], Mapping[str, torch.Tensor]]


class FileNames:
    """Sources of a model's tensors. ``stored``: names of the tensors in its files."""

    def __init__(self, model: nn.Module, stored: Iterable[str]) -> None:
        base = _find_transformers_model(model)
        self._prefix = _PEFT if base is None else base[0]
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        known = {self.plain_name(name) for name, _ in tensors}
        if base is None:
            self._sources = {name: _copied(name, name) for name in stored if name in known}
        else:
            self._sources = _converted(base[1], stored, known)

    def plain_name(self, name: str) -> str:
        """Return the name that a tensor of the model has without adapters and wrappers."""
        name = name.replace(_COMPILED, "").removeprefix(self._prefix)
        for layer in _LAYERS:
            name = name.replace(layer, "")
        return name

    def find(self, names: Iterable[str]) -> StoredSource | None:
        """Return the source of a tensor with one of these names in the model; None if no file has it."""
        return next(filter(None, (self._sources.get(self.plain_name(name)) for name in names)), None)


def _find_transformers_model(model: nn.Module) -> tuple[str, Any] | None:
    """Return the model of Transformers inside of a model, with the prefix of its names; None without one."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return (f"{name}." if name else "").replace(_COMPILED, ""), module
    return None


def _copied(stored: str, target: str) -> StoredSource:
    return StoredSource((stored,), (target,), lambda read: {target: read(stored)})


def _converted(model: Any, stored: Iterable[str], known: set[str]) -> dict[str, StoredSource]:
    """Return the sources by parameter, as Transformers loads them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        raise RunError(
            "this version of Transformers does not say how it stores parameters",
            hint=install_hint("transformers"),
        ) from error
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    flags = dict.fromkeys(known, True)
    collected: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        prefix = model.base_model_prefix
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, flags)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], prefix, flags)
        if renamed in known:
            collected.setdefault(renamed, []).append((name, pattern))
    sources = {}
    for target, pieces in collected.items():
        pattern = pieces[0][1]
        if pattern is None:
            sources[target] = _copied(pieces[0][0], target)
            continue
        converter = by_pattern[pattern]
        targets = tuple(
            target.replace(converter.target_patterns[0], each) for each in converter.target_patterns
        )
        load = partial(_convert, converter, model, target, pieces)
        source = StoredSource(tuple(name for name, _ in pieces), targets, load)
        sources.update(dict.fromkeys(targets, source))
    return sources


def _convert(
    converter: Any, model: Any, target: str, pieces: Iterable[tuple[str, str | None]], read: Read
) -> dict[str, torch.Tensor]:
    own = deepcopy(converter)
    for name, pattern in pieces:
        own.add_tensor(target, name, pattern, partial(read, name))
    converted = own.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
