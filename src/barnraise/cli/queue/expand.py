"""Lists and ranges in the arguments of a script, expanded to one command for each combination. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from barnraise.core.errors import RunError

_LIST = re.compile(r"[^\s,{}\[\]()\"']+(,[^\s,{}\[\]()\"']+)+\Z")
_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(\.\.(\d{1,9}))?\Z")
_OPTION = re.compile(r"(-[^=\s]*)=(.*)\Z", re.DOTALL)
_MAX_VALUES = 10_000


class Expanded(NamedTuple):
    """Arguments of each job, and the arguments that differ: their names and how many values they have."""

    commands: list[tuple[str, ...]]
    swept: list[tuple[str, int]]


def expand_arguments(arguments: Sequence[str], max_jobs: int) -> Expanded:
    """Return the product of all lists (``1e-4,3e-4``) and ranges (``0..3``, with both ends).

    Arguments after ``--`` stay as they are. Raise RunError for more than ``max_jobs`` combinations.
    """
    plain = list(arguments)
    rest: list[str] = []
    if "--" in plain:
        index = plain.index("--")
        plain, rest = plain[:index], plain[index + 1 :]
    choices: list[list[str]] = []
    swept: list[tuple[str, int]] = []
    for index, argument in enumerate(plain):
        option = _OPTION.match(argument)
        prefix, value = (f"{option[1]}=", option[2]) if option else ("", argument)
        values = expand_value(value)
        choices.append([prefix + value for value in values])
        if len(values) > 1:
            before = plain[index - 1] if index and plain[index - 1].startswith("-") else ""
            swept.append((prefix.removesuffix("=") or before or f"argument {index + 1}", len(values)))
    count = 1
    for values in choices:
        count *= len(values)
    if count > max_jobs:
        raise RunError(
            f"these arguments have {count:,} combinations; at most {max_jobs:,} jobs are added at once",
            hint="Give fewer values, or write -- before arguments that are no lists.",
        )
    return Expanded([(*combination, *rest) for combination in itertools.product(*choices)], swept)


def expand_value(text: str) -> list[str]:
    """Return the values of a list or a range; any other text is one value."""
    if _LIST.match(text):
        return list(dict.fromkeys(value for part in text.split(",") for value in _range(part)))
    return _range(text)


def _range(text: str) -> list[str]:
    match = _RANGE.match(text)
    if match is None:
        return [text]
    first, last, step = int(match[1]), int(match[2]), int(match[4] or 1)
    if step == 0 or abs(last - first) // step >= _MAX_VALUES:
        raise RunError(f"the range {text} has too many values", hint="For example: 0..3, or 0..100..10")
    direction = 1 if last >= first else -1
    return [str(number) for number in range(first, last + direction, direction * step)]


def parse_jobs(texts: Sequence[str]) -> list[int]:
    """Return the numbers of jobs that a person names: ``3``, ``5-8`` or ``3,7``. Raise RunError otherwise."""
    numbers: list[int] = []
    for text in (part for given in texts for part in given.split(",") if part):
        first, dash, last = text.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(text) > 20:
            raise RunError(f"{text!r} is not the number of a job", hint="For example: 3, or 5-8")
        low, high = int(first), int(last or first)
        if high - low >= _MAX_VALUES:
            raise RunError(f"{text} names too many jobs", hint="See them with: barnraise queue")
        numbers += range(low, high + 1)
    return list(dict.fromkeys(numbers))


def lift_options(arguments: Sequence[str], lifted: dict[str, bool]) -> list[str]:
    """Return the command line with options of the queue before the script, where click looks for them.

    ``lifted``: these options, and whether each takes a value. What comes after ``--`` stays.
    """
    front: list[str] = []
    back: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            back += arguments[index:]
            break
        name, equals, _ = word.partition("=")
        takes_value = lifted.get(name)
        if takes_value is None:
            back.append(word)
        else:
            count = 2 if takes_value and not equals else 1
            front += arguments[index : index + count]
            index += count - 1
        index += 1
    return [*front, *back]
