"""Pairing code: a public number that names the offer, and three secret words.

The number is in the advert. The words are 24 bits, which is enough because a code allows one guess.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import secrets
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from barnraise.core.errors import PairingError
from barnraise.pairing.words import PREFIX_LETTERS, WORDS

NUMBERS = range(1, 100)
TAG_BYTES = 16
_LONGEST_INPUT = 200
_LONGEST_WORD = max(map(len, WORDS))
_TAG_DOMAIN = b"barnraise pairing offer 1\0"
_PASSWORD_DOMAIN = b"barnraise pairing code 1\0"
_KNOWN = frozenset(WORDS)
WORD_COUNT = 3
_FORM = "A code is a number and three words, as in 7-crossover-clockwork-zebra."


@dataclass(frozen=True, repr=False)
class PairingCode:
    """Number and three words. ``str`` shows all of it; ``repr``, which ends in logs, hides the words."""

    number: int
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.number not in NUMBERS or len(self.words) != WORD_COUNT or not _KNOWN.issuperset(self.words):
            raise PairingError("this is not a pairing code", hint=_FORM)

    def __str__(self) -> str:
        return "-".join((str(self.number), *self.words))

    def __repr__(self) -> str:
        return f"Code({self.number})"

    @property
    def tag(self) -> bytes:
        return offer_tag(self.number)

    @property
    def password(self) -> bytes:
        return _PASSWORD_DOMAIN + str(self).encode("ascii")


def new_code(number: int | None = None) -> PairingCode:
    """Return a random code; ``number`` is random, too, unless the caller passes a free one."""
    if number is None:
        number = secrets.choice(NUMBERS)
    return PairingCode(number, tuple(secrets.choice(WORDS) for _ in range(WORD_COUNT)))


def offer_tag(number: int) -> bytes:
    """Return the tag of an open offer, in adverts and in the preface. It hides nothing."""
    return hashlib.sha3_256(_TAG_DOMAIN + str(number).encode("ascii")).digest()[:TAG_BYTES]


def parse_code(text: str) -> PairingCode:
    """Parse typed text: case, blanks, dashes and word ends do not matter; unknown words are an error.

    A typing error is found here, before it costs the only guess.
    """
    if len(text) > _LONGEST_INPUT:
        raise PairingError("this is too long for a pairing code", hint=_FORM)
    parts = re.findall(r"[0-9]+|[^\W\d_]+", unicodedata.normalize("NFKC", text).lower())
    numbers = [part for part in parts if part.isdecimal()]
    letters = [part for part in parts if not part.isdecimal()]
    if len(numbers) != 1 or len(numbers[0]) > 4 or int(numbers[0]) not in NUMBERS:
        raise PairingError(
            f"a pairing code has one number from {NUMBERS[0]} to {NUMBERS[-1]}, this has "
            + (", ".join(number[:8] for number in numbers[:3]) or "none"),
            hint=_FORM,
        )
    words = tuple(map(_word, letters)) if len(letters) == WORD_COUNT else _split(letters)
    return PairingCode(int(numbers[0]), words)


def _word(typed: str) -> str:
    word = _match(typed)
    if word is not None:
        return word
    shown = typed if len(typed) <= 2 * _LONGEST_WORD else typed[: 2 * _LONGEST_WORD] + "..."
    begun = [word for word in WORDS if word.startswith(typed)]
    near = begun[:3] or difflib.get_close_matches(typed, WORDS, n=2, cutoff=0.6)
    if near:
        hint = f"Did you mean {' or '.join(near)}? Type the code again; nothing was sent."
    else:
        hint = f"Look at the code on the other machine again; nothing was sent. {_FORM}"
    raise PairingError(f"{shown!r} is not a word of a pairing code", hint=hint)


def _match(typed: str) -> str | None:
    """Return the word itself, or the one word that starts with the text."""
    if typed in _KNOWN:
        return typed
    if len(typed) < PREFIX_LETTERS:
        return None
    words = [word for word in WORDS if word.startswith(typed)]
    return words[0] if len(words) == 1 else None


def _split(letters: list[str]) -> tuple[str, ...]:
    """Split whole words that were joined or torn apart.

    Beginnings of words do not count here: a code with a missing word must not be read as another one.
    """
    typed = "".join(letters)
    complete = list(_splits(typed, WORD_COUNT))
    if complete:
        return complete[0]
    if len(letters) != 1 or _match(typed) is not None:
        raise PairingError(f"a pairing code has three words, this has {len(letters)}", hint=_FORM)
    raise PairingError("the words of the pairing code cannot be told apart", hint=f"Use dashes. {_FORM}")


def _splits(typed: str, count: int) -> Iterator[tuple[str, ...]]:
    """Yield the ways to read the text as ``count`` words; there is at most one way."""
    if count == 1:
        if typed in _KNOWN:
            yield (typed,)
        return
    for place in range(PREFIX_LETTERS, min(len(typed), _LONGEST_WORD + 1)):
        if typed[:place] in _KNOWN:
            yield from ((typed[:place], *rest) for rest in _splits(typed[place:], count - 1))
