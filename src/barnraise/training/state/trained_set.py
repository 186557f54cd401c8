"""Trained set: which tensors of the model are state, and what a received state must fit. Pure.

State is what training or the script changes: parameters in an optimizer with ``requires_grad``, statistics of
batch norms, and what shares memory with these. The other tensors are the base. A tensor of the base that
changes becomes state, and stays state. A model without frozen parameters has no base.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from blake3 import blake3

from barnraise.checkpoint.tensor_hash import UNCOMPARED
from barnraise.core.errors import RunError

MOST_NAMED = 16  # names of changed tensors in a vote
_LISTED = 3
_SAME_BASE = (
    "Give all machines the same base model. If it is only stored differently (4 bit here, bfloat16 there), "
    'call barnraise.init(base="may-differ") on all of them.'
)
_SAME_SCRIPT = "Freeze and unfreeze the same parameters on all machines."
_RESTART = "Start this worker again, from the base that the others have."


class Origin(enum.Enum):
    """Reason why a tensor is state."""

    TRAINED = "an optimizer trains it"
    STATISTIC = "a batch norm writes it"
    SHARED = "it shares memory with a trained tensor"
    WHOLE = "the model has no frozen parameter"


class TensorFacts(NamedTuple):
    """Facts about a tensor of the model when `prepare` was called.

    ``memory``: its first address and the one after its last; equal if it has none.
    """

    name: str
    is_parameter: bool
    is_trained: bool
    is_statistic: bool
    memory: tuple[int, int]


class BaseDescription(NamedTuple):
    """Description of a base in a state that is sent or saved.

    ``hashes``: by name; None if the base may differ. ``trained``: parameters that gradients are summed for.
    ``unfrozen``: those of them that were frozen at first, in order; True while they are not frozen again.
    """

    hashes: Mapping[str, str] | None
    trained: tuple[str, ...]
    unfrozen: Mapping[str, bool] = {}


class OwnTensors(NamedTuple):
    """Tensors of this worker's model.

    ``moved``: names that were in the base and became state. ``held``: frozen parameters in an optimizer.
    """

    names: frozenset[str]
    base: frozenset[str]
    moved: frozenset[str]
    trained: tuple[str, ...]
    may_differ: bool
    held: frozenset[str] = frozenset()


def initial_state(tensors: Sequence[TensorFacts]) -> dict[str, Origin]:
    """Return the names that are state from the beginning, each with the reason."""
    if all(tensor.is_trained or not tensor.is_parameter for tensor in tensors):
        return dict.fromkeys((tensor.name for tensor in tensors), Origin.WHOLE)
    live = [tensor.memory for tensor in tensors if tensor.is_trained or tensor.is_statistic]
    shares = _overlap_with(live)
    origins = {}
    for tensor in tensors:
        if tensor.is_trained:
            origins[tensor.name] = Origin.TRAINED
        elif tensor.is_statistic:
            origins[tensor.name] = Origin.STATISTIC
        elif shares(tensor.memory):
            origins[tensor.name] = Origin.SHARED
    return origins


def _overlap_with(spans: Iterable[tuple[int, int]]) -> Callable[[tuple[int, int]], bool]:
    """Return a function that tells whether a span of addresses overlaps with one of these.

    Tensors that were read from one file may be parts of one storage without sharing any number.
    """
    merged: list[tuple[int, int]] = []
    for first, last in sorted(span for span in spans if span[0] < span[1]):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    starts = [first for first, _ in merged]

    def overlaps(span: tuple[int, int]) -> bool:
        place = bisect.bisect_left(starts, span[1]) - 1
        return span[0] < span[1] and place >= 0 and merged[place][1] > span[0]

    return overlaps


def merge(
    own: OwnTensors,
    received: Collection[str],
    described: BaseDescription | None,
    own_hash: Callable[[str], str],
    *,
    source: str,
    is_checkpoint: bool = False,
) -> frozenset[str]:
    """Return the names of the base with a received state. Raise RunError if they do not fit together.

    ``received``: names of the tensors in the state. ``own_hash``: returns the hash of a tensor as it is now.
    ``source``: whose state it is, for messages. A checkpoint may be of a training that trained other parts.
    """
    names = frozenset(received)
    if unknown := names - own.names:
        raise RunError(f"{_listed(unknown, 'is', 'are')} not in this model, but in the state of {source}")
    if not is_checkpoint:
        _check_same_training(own, names, described, source)
    absent = own.names - names
    if not absent:
        return frozenset()
    hashes = described.hashes if described is not None else {}
    if hashes is None and not own.may_differ:
        raise RunError(
            f"{source} did not compare the base model",
            hint='Call barnraise.init(base="may-differ") here, too.',
        )
    # What changed here can be compared only with the hash of the same storage.
    compared = own.moved & absent if own.may_differ else absent
    _check_hashes(own, compared, hashes or {}, own_hash, source)
    if not own.may_differ and (lacking := (hashes or {}).keys() - own.names):
        raise RunError(f"{_listed(lacking, 'is', 'are')} not in this model, but in the base of {source}")
    return absent & (own.base | own.moved)


def check_sets(
    digests: Sequence[bytes], moved: Sequence[Collection[str]], name_of: Callable[[int], str]
) -> None:
    """Raise RunError if the workers of a group have different sets of state tensors.

    ``moved``: by rank, the first names that became state since `prepare`.
    """
    if len(set(digests)) <= 1:
        return
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = set(moved[0]), set(moved[other])
    if different := first ^ second:
        name = min(different)
        has, lacks = (0, other) if name in first else (other, 0)
        what = f"{name} changed on {name_of(has)} after prepare, but not on {name_of(lacks)}"
    else:
        what = f"{name_of(0)} and {name_of(other)} have different tensors in their training state"
    raise RunError(what, hint="Change the model the same way after the same step on all machines.")


def set_digest(names: Iterable[str]) -> bytes:
    """Return a hash of the names of the state tensors."""
    return blake3("\n".join(sorted(names)).encode()).digest(8)


def _check_same_training(
    own: OwnTensors, names: frozenset[str], described: BaseDescription | None, source: str
) -> None:
    """Raise RunError if the sender trains other parameters: gradients could not be summed."""
    theirs = frozenset(names if described is None else described.trained)
    if described is None and own.base:
        raise RunError(
            f"{_listed(own.base, 'is', 'are')} frozen here, but trained on {source}", hint=_SAME_SCRIPT
        )
    if only_here := frozenset(own.trained) - theirs:
        raise RunError(
            f"{_listed(only_here, 'is', 'are')} trained here, but frozen on {source}", hint=_SAME_SCRIPT
        )
    only_there = theirs - frozenset(own.trained)
    unfrozen = frozenset(described.unfrozen) & own.held if described is not None else frozenset()
    if described is not None and (untrained := only_there - unfrozen):
        raise RunError(
            f"{_listed(untrained, 'is', 'are')} frozen here, but trained on {source}", hint=_SAME_SCRIPT
        )


def _check_hashes(
    own: OwnTensors,
    compared: Collection[str],
    hashes: Mapping[str, str],
    own_hash: Callable[[str], str],
    source: str,
) -> None:
    if missing := {name for name in compared if name not in hashes} - (
        own.moved if own.may_differ else set()
    ):
        raise RunError(
            f"{_listed(missing, 'is', 'are')} neither in the state nor in the base of {source}",
            hint=_SAME_BASE,
        )
    different = set()
    for name in compared:
        theirs, ours = hashes.get(name, UNCOMPARED), own_hash(name)
        is_known = UNCOMPARED not in (theirs, ours) or name in own.moved
        if is_known and theirs != ours:
            different.add(name)
    if stale := different & own.moved:
        raise RunError(f"{_listed(stale, 'was', 'were')} changed here, but not on {source}", hint=_RESTART)
    if different:
        other = "that" if len(different) == 1 else "those"
        raise RunError(f"{_listed(different, 'differs', 'differ')} from {other} of {source}", hint=_SAME_BASE)


def _listed(names: Collection[str], singular: str, plural: str) -> str:
    """Return a few names and how many more there are, with the verb."""
    first = sorted(names)[:_LISTED]
    more = len(names) - len(first)
    if len(names) == 1:
        return f"{first[0]} {singular}"
    return f"{', '.join(first)}{f' and {more} more tensors' if more else ''} {plural}"
