"""Commands ``export`` and ``checkpoint`` with their options. Light to import."""

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


@click.group("checkpoint")
def checkpoint_group() -> None:
    """Convert saved checkpoints without a running program."""


@checkpoint_group.command("reshard")
@click.argument("sources", nargs=-1, required=True, metavar="RUN|FOLDER...")
@click.argument("target", type=_folder)
@click.option("--into", type=click.IntRange(1, 1024), metavar="N", help="Write the shards of N ranks (1).")
@click.option("--step", type=click.IntRange(0), help="Of this step (default: the newest complete one).")
@click.option("--safetensors", is_flag=True, help="Write model.safetensors instead of shards.")
@click.option("--prefix", default="", help="With --safetensors: only names with this start, without it.")
def _reshard(
    sources: tuple[str, ...], target: Path, into: int | None, step: int | None, safetensors: bool, prefix: str
) -> int:
    """Put the parts of a sharded checkpoint together in TARGET, or cut it into other shards.

    Name the folders of all machines that have parts, copied to this one. A RUN means this machine's own.
    """
    from barnraise.cli.runs import resume

    if safetensors and into is not None:
        raise RunError("--into and --safetensors exclude each other", hint="One file has no shards.")
    if prefix and not safetensors:
        raise RunError("--prefix was given without --safetensors", hint="Shards keep all names.")
    return resume.reshard(sources, target, into=into or 1, step=step, safetensors=safetensors, prefix=prefix)
