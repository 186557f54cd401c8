"""Command ``export`` with its options. Light to import."""

from __future__ import annotations

from pathlib import Path

import click

from barnraise.cli.completion import complete_runs
from barnraise.core.errors import RunError

_folder = click.Path(path_type=Path, file_okay=False)


@click.command("export")
@click.argument("run", shell_complete=complete_runs)
@click.argument("folder", type=_folder)
@click.option("--adapter", is_flag=True, help="Write the adapter of a PEFT model, as PeftModel loads it.")
@click.option("--merged", is_flag=True, help="Write the base model with the adapter merged into it.")
@click.option(
    "--base",
    metavar="PATH|ID",
    help="With --merged: the base model, a folder or an id in this machine's Hugging Face cache.",
)
def export_command(run: str, folder: Path, adapter: bool, merged: bool, base: str | None) -> int:
    """Write the model of RUN's newest complete checkpoint into FOLDER."""
    from barnraise.cli.runs import resume
    from barnraise.cli.runs.data_sets import find_model

    if adapter and merged:
        raise RunError("--adapter and --merged exclude each other", hint="Export twice, into two folders.")
    if base is not None and not merged:
        raise RunError("--base was given without --merged", hint="Add --merged, or leave --base out.")
    return resume.export(
        run,
        folder,
        "adapter" if adapter else "merged" if merged else "model",
        None if base is None else find_model(base),
    )
