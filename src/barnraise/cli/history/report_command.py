"""Command ``report`` with its options. Light to import."""

from __future__ import annotations

from pathlib import Path

import click

from barnraise.cli.completion import complete_runs


@click.command("report")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option(
    "--into",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write (default: RUN.html in this folder).",
)
@click.option(
    "--price",
    metavar="PRICE",
    help='What a kilowatt-hour costs, such as "0.30 EUR", for an estimate of the cost.',
)
def report_command(run: str | None, into: Path | None, price: str | None) -> int:
    """Write what happened in RUN (default: the newest) into one HTML file.

    The file needs no network and no other file: open it in a browser, print it, or send it.
    """
    from barnraise.cli.history import html_report

    return html_report.write(run=run, into=into, price=price)
