"""``barnraise explain``: the page of an error code or of a check of ``barnraise doctor``, in a terminal.

The pages are those of ``docs/errors`` and ``docs/doctor``. The wheel contains them as files of this package.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

import barnraise
from barnraise.core.errors import BarnraiseError
from barnraise.core.names import similar_names

# Folder of the pages in the wheel; pyproject.toml fills it.
WHEEL_FOLDER = "pages"
_TITLES = {"errors": "Errors", "doctor": "Checks of `barnraise doctor`"}
_WIDTH = 80
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_ITEM = re.compile(r"( *)([-*]|\d+\.) ")


def run(code: str | None) -> int:
    """Print the pages with this name, or the list of all names."""
    pages = read_pages()
    if code is None:
        click.echo(list_pages(pages))
        return 0
    wanted = code.strip("[]").lower()
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    texts = [render(text, width) for (_, name), text in pages.items() if name == wanted]
    if not texts:
        similar = similar_names(wanted, [name for _, name in pages])
        guess = f" Did you mean {similar}?" if similar else ""
        raise click.UsageError(
            f"no error and no check is called {code!r}.{guess} List all: barnraise explain"
        )
    click.echo("\n\n".join(texts))
    return 0


def more_about(*codes: str) -> str:
    """Return the line that leads to the pages of errors or checks."""
    return "More: " + ", ".join(f"barnraise explain {code}" for code in codes)


def read_pages() -> dict[tuple[str, str], str]:
    """Return the pages by folder and name. Raise BarnraiseError if this installation has none."""
    package = Path(barnraise.__file__).parent
    # Without a wheel, the package is in the repository, beside the documentation.
    places = (package / WHEEL_FOLDER, package.parents[1] / "docs")
    root = next((place for place in places if (place / "errors").is_dir()), None)
    if root is None:
        raise BarnraiseError(
            "this installation has no pages about errors", hint="Install Barnraise again, from its wheel."
        )
    return {
        (folder, file.stem): file.read_text(encoding="utf-8")
        for folder in _TITLES
        for file in sorted((root / folder).glob("*.md"))
        if file.stem != "README"
    }


def list_pages(pages: dict[tuple[str, str], str]) -> str:
    """Return one line for each page: its name and its title. Pure."""
    width = max(len(name) for _, name in pages)
    lines = []
    for folder, title in _TITLES.items():
        lines += [f"{title}:"]
        for (place, name), text in pages.items():
            if place == folder:
                line = f"  {name.ljust(width)}  {_heading(text).partition(': ')[2]}"
                lines += textwrap.wrap(line, _WIDTH, subsequent_indent=" " * (width + 4))
        lines.append("")
    return "\n".join([*lines, "Read one: barnraise explain CODE"])


def render(text: str, width: int) -> str:
    """Return a page without its marks, at most ``width`` wide. Commands of a code block stay whole. Pure."""
    lines = [_heading(text)]
    lines.append("=" * len(lines[0]))
    is_code = False
    # The heading of a table is left out, because its rows become items of a list.
    for line in re.sub(r"^\|.*\n(?=\|[-:| ]+$)", "", text, flags=re.MULTILINE).splitlines()[1:]:
        if line.strip().startswith("```"):
            is_code = not is_code
        elif is_code:
            lines.append(f"    {line}".rstrip())
        else:
            lines += _render_line(line, width)
    return "\n".join(lines)


def _render_line(line: str, width: int) -> Iterator[str]:
    if line.startswith("|"):
        line = _table_row(line)
        if not line:
            return
    plain = _LINK.sub(r"\1", line)
    if plain.startswith("## "):
        yield plain.removeprefix("## ").upper()
        return
    item = _ITEM.match(plain)
    indent = " " * item.end() if item else ""
    options = {"break_long_words": False, "break_on_hyphens": False}
    yield from textwrap.wrap(plain, width, subsequent_indent=indent, **options) or [""]  # type: ignore[arg-type]


def _table_row(line: str) -> str:
    """Return a row of a table as an item of a list; empty for the line below the heading."""
    cells = [cell.strip() for cell in line.strip("| ").split("|")]
    if not any(cell.strip("-: ") for cell in cells):
        return ""
    return f"- {cells[0]}: {'; '.join(cells[1:])}"


def _heading(text: str) -> str:
    return _LINK.sub(r"\1", text.split("\n", 1)[0]).removeprefix("# ").replace("`", "")
