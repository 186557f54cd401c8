"""Node id: a machine's Ed25519 public key, printed with check characters.

The 52 base-32 characters of the key are cut into four blocks of 13, and each block gets one check character.
The alphabet has no I, L, O or U; the first three are read as the digits they look like. The check character
is a CRC over GF(32) with a primitive polynomial. A block is shorter than 31 characters, so the CRC finds
every wrong character and every swap of two characters within a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from barnraise.core.errors import IdentityError

KEY_BYTES = 32
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {letter: value for value, letter in enumerate(_ALPHABET)}
_VALUES |= {letter.lower(): value for letter, value in _VALUES.items()}
_VALUES |= {"O": 0, "o": 0, "I": 1, "i": 1, "L": 1, "l": 1}

_BLOCK = 13
_BLOCKS = 4
_PADDING_BITS = _BLOCK * _BLOCKS * 5 - KEY_BYTES * 8
_GROUP = 4
_LENGTH = (_BLOCK + 1) * _BLOCKS
_LONGEST_INPUT = 4 * _LENGTH
_POLYNOMIAL = 0b100101  # x^5 + x^2 + 1, primitive over GF(2)


@dataclass(frozen=True, order=True)
class NodeId:
    """Name of a machine: its public key."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != KEY_BYTES:
            raise IdentityError(f"an id is {KEY_BYTES} bytes, this has {len(self.raw)}")

    def __str__(self) -> str:
        bits = int.from_bytes(self.raw, "big") << _PADDING_BITS
        count = _BLOCK * _BLOCKS
        values = [bits >> 5 * (count - 1 - place) & 31 for place in range(count)]
        letters = ""
        for start in range(0, count, _BLOCK):
            block = values[start : start + _BLOCK]
            letters += "".join(_ALPHABET[value] for value in (*block, _check(block)))
        return "-".join(letters[start : start + _GROUP] for start in range(0, _LENGTH, _GROUP))

    def __repr__(self) -> str:
        return f"NodeId({self})"

    @property
    def short(self) -> str:
        """Return the first two groups, enough for people to tell machines apart but no proof."""
        return str(self)[: 2 * _GROUP + 1]

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Parse typed or pasted text; case, dashes, spaces and look-alike characters do not matter."""
        if len(text) > _LONGEST_INPUT:
            raise _wrong_length(len(text))
        values = []
        for letter in text:
            if letter == "-" or letter.isspace():
                continue
            if letter not in _VALUES:
                raise IdentityError(f"an id has no character {letter!r}")
            values.append(_VALUES[letter])
        if len(values) != _LENGTH:
            raise _wrong_length(len(values))
        bits = 0
        for number in range(_BLOCKS):
            *block, check = values[number * (_BLOCK + 1) : (number + 1) * (_BLOCK + 1)]
            if _check(block) != check:
                raise IdentityError(
                    f"the check character of part {number + 1} of {_BLOCKS} of the id does not fit: "
                    f"one of characters {number * (_BLOCK + 1) + 1} to {(number + 1) * (_BLOCK + 1)} is wrong"
                )
            for value in block:
                bits = bits << 5 | value
        if bits & (1 << _PADDING_BITS) - 1:
            raise IdentityError("the last part of the id does not end as an id does")
        return cls((bits >> _PADDING_BITS).to_bytes(KEY_BYTES, "big"))


def _wrong_length(length: int) -> IdentityError:
    return IdentityError(f"an id has {_LENGTH} characters without its dashes, this has {length}")


def _check(block: list[int]) -> int:
    remainder = 0
    for value in block:
        remainder = (remainder ^ value) << 1
        if remainder & 32:
            remainder ^= _POLYNOMIAL
    return remainder
