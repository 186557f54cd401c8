"""The one printer of tables: columns that fit the terminal, because long cells are shortened."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence

from barnraise.cli import terminal
from barnraise.core.sanitize import printable

_GAP = "  "
_LEAST_WORDS = 12  # columns of words are shortened to this, before other columns lose anything
_LEAST = 3
_LEAST_WRAPPED = 20


def table(
    rows: Sequence[tuple[str, ...]],
    *,
    words: Sequence[int] = (),
    wraps: bool = False,
    indent: str = "",
    width: int = 0,
) -> str:
    """Format rows in columns; no line is longer than ``width``, which is the terminal's if 0.

    ``words``: the columns to shorten first, such as sentences. ``wraps``: the last column is never shortened;
    what does not fit continues below. Cells may quote another machine: control characters are replaced.
    """
    rows = [tuple(printable(cell.replace("\n", " ")) for cell in row) for row in rows]
    count = len(rows[0])
    room = (width or terminal.columns()) - len(indent) - len(_GAP) * (count - 1)
    natural = [max(_length(row[place]) for row in rows) for place in range(count)]
    if wraps:
        last = min(natural[-1], max(_LEAST_WRAPPED, room - sum(natural[:-1])))
        widths = [*column_widths(natural[:-1], room - last, words), last]
    else:
        widths = column_widths(natural, room, words)
    lines = []
    for row in rows:
        tails = _broken(row[-1], widths[-1]) if wraps else [shortened(row[-1], widths[-1])]
        cells = [shortened(cell, size) for cell, size in zip(row[:-1], widths, strict=False)]
        for tail in tails:
            padded = [cell + " " * (size - _length(cell)) for cell, size in zip(cells, widths, strict=False)]
            lines.append((indent + _GAP.join([*padded, tail])).rstrip())
            cells = [""] * len(cells)
    return "\n".join(lines)


def column_widths(natural: Sequence[int], room: int, words: Sequence[int] = ()) -> list[int]:
    """Return a width for each column, so that all fit into ``room`` characters.

    The widest of the columns ``words`` is narrowed first, and the widest of all if that is not enough.
    """
    widths = list(natural)
    every = range(len(widths))
    for places, minimum in (([place for place in words if place in every], _LEAST_WORDS), (every, _LEAST)):
        while sum(widths) > room:
            widest = max(places, key=lambda place: widths[place], default=None)
            if widest is None or widths[widest] <= minimum:
                break
            widths[widest] -= 1
    return widths


def shortened(text: str, width: int) -> str:
    """Return the text, cut with an ellipsis if it has more columns than ``width``."""
    if _length(text) <= width:
        return text
    kept = ""
    room = max(0, width - 1)
    for letter in text:
        room -= _length(letter)
        if room < 0:
            break
        kept += letter
    return kept.rstrip() + "…"


def _broken(text: str, width: int) -> list[str]:
    room = max(1, width if text.isascii() else width // 2)  # letters may be wide
    return textwrap.wrap(text, room, break_on_hyphens=False) or [""]


def _length(text: str) -> int:
    """Return how many columns a terminal uses: two for a wide letter, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )
