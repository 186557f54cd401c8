"""Options that ``barnraise plan`` and ``barnraise run --dry-run`` share. Light to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

Command = Callable[..., Any]


@dataclass(frozen=True)
class PlanOptions:
    """Limits of a plan, hypothetical machines, and the form of the output."""

    add: tuple[str, ...] = ()
    sync: Literal["exact", "auto"] = "exact"
    levels: Path | None = None
    as_json: bool = False
    picture: Path | None = None


def planning_options(command: Command) -> Command:
    """Add the options that both commands share."""
    for option in (
        click.option("--picture", type=click.Path(path_type=Path), help="Write the predicted times as SVG."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
        click.option(
            "--levels",
            type=click.Path(path_type=Path),
            help="TOML that fixes parts of plans, and of what a session does: docs/plans.md.",
        ),
        click.option(
            "--sync",
            type=click.Choice(["exact", "auto"]),
            default="exact",
            help="exact, or auto: may compress gradients and synchronize less often.",
        ),
        click.option(
            "--add",
            multiple=True,
            metavar="MACHINE",
            help="Plan with one more machine: 4090@1gbit; may be repeated.",
        ),
    ):
        command = option(command)
    return command


def size_options(command: Command) -> Command:
    """Add the options that say how large a model and its batches are."""
    for option in (
        click.option(
            "--seconds-per-sample", metavar="TIME", help="Time this machine needs to train one sample."
        ),
        click.option(
            "--flops-per-sample", metavar="COUNT", help="Forward and backward (default: 6 x --parameters)."
        ),
        click.option("--tokens", metavar="COUNT", help="Tokens of a sample, for language models."),
        click.option("--batch", metavar="COUNT", help="Samples of a global batch (default: 256; split: 16)."),
        click.option(
            "--base",
            type=click.Choice(["exact", "int8", "nf4"]),
            default="exact",
            help="With --config: form of the frozen layers.",
        ),
        click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            help="Folder of a language model that is split, with its config.json.",
        ),
        click.option("--parameters", metavar="COUNT", help="Size of the model, such as 124M."),
    ):
        command = option(command)
    return command


def take_wishes(options: dict[str, Any]) -> PlanOptions:
    """Take the plan options out of ``options``; the rest stays there."""
    return PlanOptions(**{name: options.pop(name) for name in PlanOptions.__dataclass_fields__})
