"""Facts that all members of a run that splits a model must have alike, and the first difference. Pure.

A member with another model, or with other options that change the result, must not train with the others. So
all members report their facts, and a difference is said in words.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.sanitize import printable
from barnraise.core.units import counted

MOST_UNITS, MOST_OPTIONS = 4096, 64
_MOST_WORDS = 200
_PRINTABLE = r"^[ -~]*\Z"

Words = Annotated[str, Meta(max_length=_MOST_WORDS, pattern=_PRINTABLE)]
Hash = Annotated[bytes, Meta(max_length=32)]
Count = Annotated[int, Meta(ge=0, le=1 << 60)]


class ModelFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of a member about its model and the options that change what is trained.

    ``path``: of the list of blocks. ``parts``: hashes of the names, shapes and types of the parameters before
    the blocks, in each block, and after them. ``numbers``: of all parameters. ``trained``: hash of the names
    of those that are trained. ``options``: names with values, such as those of the optimizer.
    """

    path: Words = ""
    parts: Annotated[tuple[Hash, ...], Meta(max_length=MOST_UNITS)] = ()
    numbers: Count = 0
    trained: Hash = b""
    trained_numbers: Count = 0
    options: Annotated[tuple[tuple[Words, Words], ...], Meta(max_length=MOST_OPTIONS)] = ()

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return max(0, len(self.parts) - 2)


def as_words(text: object) -> str:
    """Return a text as facts may have it: printable ASCII of a limited length."""
    return printable(str(text)).encode("ascii", "replace").decode()[:_MOST_WORDS]


def difference(own: ModelFacts, other: ModelFacts, name: str) -> str:
    """Return what a member has that another one has not, in words; empty if nothing differs.

    ``name``: of the machine of the other one. An option that only one of them knows is no difference: another
    version of a library may have added it.
    """
    if (own.path, own.blocks) != (other.path, other.blocks):
        ours, theirs = (f"{counted(each.blocks, 'block')} in {each.path}" for each in (own, other))
        return f"its model has {ours}, and that of {name} has {theirs}"
    known = dict(other.options)
    for option, value in own.options:
        if known.get(option, value) != value:
            return f"its {option} is {value}, and that of {name} is {known[option]}"
    if own.parts != other.parts:
        return f"{_first_difference(own, other)} has other parameters than on {name}{_sizes(own, other)}"
    if own.trained != other.trained:
        ours, theirs = (f"{each.trained_numbers:,}" for each in (own, other))
        if ours == theirs:
            return f"it trains other parameters than {name}"
        return f"it trains {ours} numbers, and {name} trains {theirs}"
    return ""


def _first_difference(own: ModelFacts, other: ModelFacts) -> str:
    """Return the name of the first part that differs."""
    pairs = enumerate(zip_longest(own.parts, other.parts))
    place = next(place for place, (ours, theirs) in pairs if ours != theirs)
    if place == 0:
        return "what its model has before the blocks"
    return "what its model has after the blocks" if place > own.blocks else f"block {place} of its model"


def _sizes(own: ModelFacts, other: ModelFacts) -> str:
    if own.numbers == other.numbers:
        return ""
    return f"; the models have {own.numbers:,} and {other.numbers:,} numbers"
