"""Judgement of recorded terminals: silences, wide lines, and text for people to read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Literal

from lab.terminal import COLUMNS, ROWS, Printed, Screen, Terminal, TypedCommand, plain

PATIENCE_S = 2.0  # a person waits so long without a question
_QUESTION = re.compile(r"\[[Yy]/[Nn]\]:$")
Owner = Literal["ours", "pip", "venv"]


def owner_of(line: str) -> Owner:
    """Return whose program a typed command starts. pip that `barnraise` starts is ours."""
    words = line.split()
    if "venv" in words:
        return "venv"
    return "pip" if words and words[0].endswith("pip") else "ours"


def silent_seconds(command: TypedCommand, now: float) -> float:
    """Return the seconds by which silences of a command exceed the patience of a person.

    A text that is printed again unchanged is silence; an open question is none. ``now`` ends a command that
    still runs.
    """
    silent, last, shown = 0.0, command.begin_s, ""
    for part in (*command.printed, Printed(command.end_s or now, "the end")):
        text = plain(part.text).strip()
        if text in ("", shown):
            continue
        if not _QUESTION.search(shown):
            silent += max(0.0, part.at_s - last - PATIENCE_S)
        last, shown = part.at_s, text
    return silent


def wide_lines(command: TypedCommand) -> list[str]:
    """Return printed lines that are wider than the terminal."""
    text = plain("".join(part.text for part in command.printed))
    return [line for line in re.split(r"[\r\n]+", text) if len(line.rstrip()) > COLUMNS]


def cast(terminal: Terminal, title: str) -> str:
    """Return the recording as a file of asciinema, version 2."""
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
    parts = [[round(part.at_s - terminal.begin_s, 3), "o", part.text] for part in terminal.printed]
    return "".join(json.dumps(each) + "\n" for each in (head, *parts))


def text_with_times(printed: Iterable[Printed], begin_s: float) -> str:
    """Return the lines on the screen at the end, each with the seconds at which it last changed."""
    screen = Screen()
    times: dict[int, float] = {}
    for part in printed:
        screen.show(part.text)
        times |= dict.fromkeys(screen.touched, part.at_s - begin_s)
        screen.touched.clear()
    return "".join(
        f"{times[row]:8.1f}  {line}\n" if row in times else f"{'':8}  {line}\n"
        for row, line in enumerate(screen.lines)
    )
