"""``barnraise report``: the report of a run as one HTML file."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path

import click

import barnraise
from barnraise.core.config import load_settings
from barnraise.core.errors import RunError
from barnraise.core.files import write_atomically
from barnraise.core.sanitize import printable
from barnraise.core.units import format_size
from barnraise.display.report.document import ReportOptions, build_report
from barnraise.display.report.energy import parse_price
from barnraise.display.source import HistorySource


def write(*, run: str | None, into: Path | None, price: str | None) -> int:
    """Write the report of a run, or of the run whose record changed last, and print where it is."""
    text = price or load_settings().runs.energy_price
    parsed = parse_price(text) if text is not None else None
    source = HistorySource()
    name = source.find(run) if run is not None else source.newest()
    zone = datetime.now().astimezone().tzinfo or UTC
    options = ReportOptions(parsed, time.time(), zone, barnraise.__version__)
    content = build_report(source.view(name), options).encode()
    path = into if into is not None else Path(f"{re.sub('[^A-Za-z0-9_-]', '-', name)}.html")
    try:
        write_atomically(path, content)
    except OSError as error:
        raise RunError(
            f"the report of run {name} cannot be written to {path}: {error.strerror}",
            hint="Give a file in a folder that exists: --into FILE",
        ) from error
    click.echo(f"report of run {printable(name)}: {path} ({format_size(len(content))})")
    return 0
