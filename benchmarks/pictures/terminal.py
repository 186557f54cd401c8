"""Picture of a command in a real terminal of a given size: tmux runs it, Rich draws the screen as SVG.

Each letter gets its own place, so that letters of another font, such as Braille, do not move the others.
"""

from __future__ import annotations

import html
import io
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.text import Text

from benchmarks.agents.machines import REPOSITORY

_PATIENCE_S = 120.0
_LETTER = 12.2  # width in Rich's pictures
_TEXT = re.compile(
    r'(<text class="[^"]*-r\d+" )x="([0-9.]+)"([^>]*) textLength="[0-9.]+"([^>]*)>([^<]*)</text>'
)
# Rich's own form loads a font from another place; this one uses what is here.
_FORM = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-title {{ font: 18px sans-serif; }}
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class TerminalScreen:
    """Terminal of a given size in which a command runs. It has a tmux server of its own."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], *, columns: int, rows: int
    ) -> None:
        self._socket = f"barnraise-pictures-{os.getpid()}-{columns}"
        self.columns = columns
        words = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        self._tmux(
            *("new-session", "-d", "-s", "picture", "-x", str(columns), "-y", str(rows)),
            f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(words)}",
        )

    def until(self, truth: Callable[[str], object]) -> None:
        """Wait until the screen shows what is wanted."""
        deadline = time.monotonic() + _PATIENCE_S
        while not truth(self.text()):
            assert time.monotonic() < deadline, f"the screen never showed it:\n{self.text()}"
            time.sleep(0.2)

    def text(self) -> str:
        """Return the screen without colours."""
        return self._tmux("capture-pane", "-p", "-t", "picture")

    def draw(self, title: str) -> str:
        """Return the screen as the text of an SVG file."""
        screen = self._tmux("capture-pane", "-e", "-p", "-t", "picture").rstrip("\n")
        console = Console(
            record=True, width=self.columns, file=io.StringIO(), force_terminal=True, color_system="truecolor"
        )
        console.print(Text.from_ansi(screen), no_wrap=True, overflow="crop")
        drawn = console.export_svg(title=title, code_format=_FORM, unique_id=f"terminal-{self.columns}")
        return _TEXT.sub(_place_letters, drawn)

    def close(self) -> None:
        """End the command and the terminal."""
        self._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, "-f", "/dev/null", *words],
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return done.stdout


def _place_letters(match: re.Match[str]) -> str:
    """Return a text of the picture with a place for each of its letters."""
    start, x, middle, end, letters = match.groups()
    places = " ".join(f"{float(x) + _LETTER * place:.1f}" for place in range(len(html.unescape(letters))))
    return f'{start}x="{places}"{middle}{end}>{letters}</text>'
