"""Weights of a model: which files may be pickles, and which files an index names. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

INDEX_SUFFIX = ".safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class _WeightIndex(msgspec.Struct):
    """The index of weights that are in several files."""

    weight_map: dict[str, str] = {}


def pickled_weights(paths: Iterable[str]) -> list[str]:
    """Return the files whose names are those of pickles: to load one may run code."""
    return [path for path in paths if path.casefold().endswith(_PICKLED)]


def has_safetensors(paths: Iterable[str]) -> bool:
    """Tell whether there are weights in safetensors."""
    return any(path.casefold().endswith(".safetensors") for path in paths)


def missing_shards(paths: Iterable[str], index: str, content: bytes) -> list[str]:
    """Return the files that an index of weights names and that are not there.

    An index that cannot be read names none: the script will say what it finds wrong.
    """
    try:
        named = set(msgspec.json.decode(content, type=_WeightIndex).weight_map.values())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    folder = index.rpartition("/")[0]
    wanted = {f"{folder}/{name}" if folder else name for name in named}
    return sorted(wanted - set(paths))
