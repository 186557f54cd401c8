"""Names of machines, runs and commands as a person types them: whole, shortened or mistyped. Pure."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_LISTED = 8
# Letters of other scripts, and digits, that look like small Latin letters. The most common ones.
_LOOK_ALIKE = str.maketrans(
    "аеорсухіјѕһԁԛԝвкмнтьαεικνορτυχ01|",
    "aeopcyxijshdqwbkmhtbaeikvoptyxoll",
)


@dataclass(frozen=True)
class NamedItem(Generic[T]):
    """Thing that a person may name, with its name and its ids. The first id is shown."""

    name: str
    value: T
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class NameMatch(Generic[T]):
    """Result of a search: the match, or the reason why there is none and what to do about it."""

    value: T | None
    problem: str = ""
    hint: str = ""


def match_name(text: str, named: Iterable[NamedItem[T]], *, kind: str, exact: bool = False) -> NameMatch[T]:
    """Find what has this name or id, or the only thing whose name starts with the text.

    ``kind``: what the names stand for, such as "machine". ``exact``: the beginning of a name is not enough.
    Upper and lower case are the same. Two things may have the same name: only an id tells them apart.
    """
    typed, items = text.strip().lower(), list(named)
    names = [item.name for item in items]
    same = [item for item in items if typed in (item.name.lower(), *map(str.lower, item.ids))]
    if len(same) == 1:
        return NameMatch(same[0].value)
    if same:
        ids = list_names([item.ids[0] for item in same if item.ids])
        return NameMatch(None, f"more than one {kind} is called {text!r}", f"Type an id instead: {ids}.")
    longer = [item for item in items if typed and item.name.lower().startswith(typed)]
    if len(longer) == 1 and not exact:
        return NameMatch(longer[0].value)
    shown = list_names([item.name for item in longer])
    if longer and not exact:
        return NameMatch(
            None, f"more than one {kind} starts with {text!r}: {shown}", "Type more of the name."
        )
    if longer:
        hint = f"This cannot be undone, so it needs the whole name: {shown}."
        return NameMatch(None, f"no {kind} is called {text!r}", hint)
    return NameMatch(None, f"no {kind} is called {text!r}", choice_hint(text, names, kind))


def choice_hint(text: str, names: Sequence[str], kind: str) -> str:
    """Return a hint for a name that does not exist: similar names, then all names."""
    if not names:
        return f"There is no {kind} yet."
    similar = similar_names(text, names)
    guess = f"Did you mean {similar}? " if similar else ""
    return f"{guess}There are: {list_names(names)}."


def skeleton(name: str) -> str:
    """Return a form that is equal for names that look alike: by case, width or letters of another script."""
    return unicodedata.normalize("NFKC", name).casefold().translate(_LOOK_ALIKE)


def list_names(names: Sequence[str]) -> str:
    """Return the names with commas; of many, the last ones and the number of the others."""
    shown = ", ".join(names[-_MOST_LISTED:])
    return shown if len(names) <= _MOST_LISTED else f"{shown} and {len(names) - _MOST_LISTED} more"


def similar_names(text: str, names: Iterable[str]) -> str:
    """Return the names that resemble a mistyped one, as "pc" or "pc or nas"; empty if none does."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.strip().lower(), list(by_lower), n=2, cutoff=0.6)
    return " or ".join(by_lower[name] for name in near)
