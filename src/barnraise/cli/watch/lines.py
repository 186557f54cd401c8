"""Lines of the screen: pieces of text with a style, measured in columns of a terminal. Pure.

Every style but ``plain`` also differs without colours, or stands beside words that say the same.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from barnraise.core.sanitize import printable

Style = Literal["plain", "title", "strong", "faint", "good", "warning", "error", "curve"]


class Span(NamedTuple):
    """Piece of a line."""

    text: str
    style: Style = "plain"


Line = tuple[Span, ...]


def line(text: str, style: Style = "plain") -> Line:
    """Return a line of one piece; it cannot command the terminal."""
    return (Span(printable(text), style),)


def columns_of(text: str) -> int:
    """Return how many columns a text takes."""
    return sum(_columns(sign) for sign in text)


def text_of(spans: Line) -> str:
    """Return the text of a line without its styles."""
    return "".join(span.text for span in spans).rstrip()


def wrapped(text: str, width: int, style: Style = "plain", indent: str = "") -> list[Line]:
    """Return a sentence in lines that fit; ``indent`` comes before all but the first."""
    parts = textwrap.wrap(printable(text), width, subsequent_indent=indent, break_on_hyphens=False)
    return [fitted(line(part, style), width) for part in parts]


def fitted(spans: Line, width: int, *, padded: bool = False) -> Line:
    """Return the line cut to the width; with ``padded``, filled up to it."""
    kept: list[Span] = []
    left = width
    for span in spans:
        text = ""
        for sign in span.text:
            size = _columns(sign)
            if size > left:
                left = 0
                break
            text, left = text + sign, left - size
        kept.append(Span(text, span.style))
        if not left:
            break
    used = sum(columns_of(span.text) for span in kept)
    if padded and used < width:
        kept.append(Span(" " * (width - used)))
    return tuple(kept)


def beside(left: Sequence[Line], right: Sequence[Line], width: int, gap: int = 3) -> list[Line]:
    """Return two blocks next to each other; the left one is ``width`` columns wide."""
    rows = []
    for place in range(max(len(left), len(right))):
        left_line = left[place] if place < len(left) else ()
        other = right[place] if place < len(right) else ()
        rows.append((*fitted(left_line, width, padded=True), Span(" " * gap), *other))
    return rows


def section(title: str, body: Iterable[Line]) -> list[Line]:
    """Return a block with its title and an empty line after it; nothing without a body."""
    rows = list(body)
    return [line(title, "title"), *rows, ()] if rows else []


def _columns(sign: str) -> int:
    if unicodedata.category(sign) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
