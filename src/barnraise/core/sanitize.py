"""Sanitizer of text from other machines: what a terminal or a log may show of it. Pure.

Text of a peer must not command the terminal, hide, change its direction, or look like several lines.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

# Marks, overrides and isolates that change the direction of the text after them.
DIRECTION_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Python calls these printable, and a terminal shows nothing for them.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_MOST_MARKS = 3  # combining marks on one letter; no script needs more
_CUT = "…"

_COLOUR = re.compile(r"\x1b\[([0-9;]{0,40})m")
_RESET = "\x1b[0m"
# Reset, bold, dim, italic, underlined, the ends of these, and the colours. Not: blinking, inverse, concealed.
_PLAIN_CODES = frozenset([0, 1, 2, 3, 4, 22, 23, 24, 39, 49, *range(30, 38), *range(40, 48), *range(90, 98)])
_PALETTES = {5: 1, 2: 3}  # how many numbers follow "38;5" (one of 256 colours) and "38;2" (red, green, blue)


def printable(text: str, *, also: str = "", instead: str = "?", limit: int = 0) -> str:
    """Replace control, invisible and direction characters with ``instead``, except those in ``also``.

    Combining marks stay if a letter is before them, at most three on each. ``limit``: characters to show; a
    longer text is cut with an ellipsis. 0: all.
    """
    if limit and len(text) > limit:
        text = text[: limit - 1] + _CUT
    if text.isascii() and text.isprintable():
        return text
    shown = []
    marks = _MOST_MARKS  # a mark at the beginning would change the text before it
    for sign in text:
        if unicodedata.category(sign) not in ("Mn", "Me"):
            marks = 0
            shown.append(sign if (sign.isprintable() and sign not in _INVISIBLE) or sign in also else instead)
            continue
        marks += 1
        if marks <= _MOST_MARKS and sign not in _INVISIBLE:
            shown.append(sign)
        elif marks <= _MOST_MARKS + 1:
            shown.append(instead)
    return "".join(shown)


def is_printable(text: str) -> bool:
    """Tell whether a text can be shown as it is."""
    return printable(text, instead="") == text


def forges_names(sign: str) -> bool:
    """Tell whether a character makes a file name look like another text: control, direction, line end."""
    return sign in DIRECTION_MARKS or unicodedata.category(sign) in ("Cc", "Zl", "Zp")


def coloured(text: str, *, also: str = "\t") -> str:
    """Return output of a program in which only plain colours command the terminal; they end with the text."""
    texts = _COLOUR.split(text)
    for place, part in enumerate(texts):
        if place % 2 == 0:
            texts[place] = printable(part, also=also)
        else:
            texts[place] = f"\x1b[{part}m" if _is_plain(part) else ""
    return "".join(texts) + (_RESET if any(texts[1::2]) else "")


def _is_plain(codes: str) -> bool:
    numbers = [int(code or 0) for code in codes.split(";")]
    while numbers:
        first = numbers.pop(0)
        if first in (38, 48) and numbers and numbers[0] in _PALETTES:
            del numbers[: 1 + _PALETTES[numbers[0]]]
        elif first not in _PLAIN_CODES and not 100 <= first < 108:
            return False
    return True


class OutputFilter:
    """Stream of a program's output as text in which only plain colours and line ends command the terminal.

    Movements of the cursor are removed.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the beginning of a colour whose end has not come yet

    def feed(self, data: bytes) -> str:
        """Return the text for the next bytes."""
        text = _CURSOR.sub("", self._rest + self._decoder.decode(data))
        unfinished = _UNFINISHED.search(text)
        whole = text if unfinished is None else text[: unfinished.start()]
        self._rest = text[len(whole) :]
        return coloured(whole, also="\r\n\t").removesuffix(_RESET) if whole else ""


_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]{0,40})?\Z")
_CURSOR_UP = "\x1b[A"
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")


def rewritten_line(text: str) -> str:
    """Return a line as a terminal shows it at its end, without what was overwritten after carriage returns.

    Movements of the cursor are removed, colours are kept.
    """
    return _CURSOR.sub("", text.rstrip("\r").rpartition("\r")[2])


def rewritten_text(text: str) -> str:
    """Return the lines of an output as a terminal shows them at its end.

    A progress bar below another one moves the cursor up after each change: it stays one line.
    """
    return "\n".join(map(rewritten_line, text.replace(f"{_CURSOR_UP}\n", "").split("\n")))
