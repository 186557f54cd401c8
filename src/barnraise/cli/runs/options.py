"""Options of ``barnraise run``. Light to import.

Each option for a field of `RunOptions` has the name of that field, so that no code copies field by field.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from barnraise.cli.plan.options import PlanOptions
from barnraise.core.errors import RunError
from barnraise.core.units import parse_duration, parse_size

if TYPE_CHECKING:
    from barnraise.agent_client.run_options import RunOptions

Command = Callable[..., Any]


@dataclass(frozen=True)
class RunCommandOptions:
    """Options of ``barnraise run`` that the command itself handles, and that are not in `RunOptions`."""

    on: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    folder: Path | None = None
    all_output: bool = False
    detach: bool = False
    dry_run: bool = False
    separate: bool = False
    imports: tuple[str, ...] = ()  # of a module of ours, which is not in the folder
    wishes: PlanOptions = field(default_factory=PlanOptions)


def run_options(command: Command) -> Command:
    """Add an option for each field of `RunOptions`."""
    for option in reversed(
        (
            click.option(
                "--per-node", type=int, default=0, help="Workers on each machine (default: one per device)."
            ),
            click.option("--min-nodes", type=int, default=1, help="Do not run on fewer machines."),
            click.option(
                "--wait",
                "wait_s",
                type=parse_duration,
                default="30s",
                metavar="TIME",
                help="How long to wait for machines (default: 30s).",
            ),
            click.option(
                "--env",
                "environment",
                type=click.Choice(["auto", "sync", "agent"]),
                default="auto",
                help="sync: build the folder's environment on each machine; agent: use the agent's own.",
            ),
            click.option(
                "--engine",
                type=click.Choice(["auto", "barnraise", "gloo", "nccl"]),
                default="auto",
                help="Backend of torch.distributed (default: encrypted between machines).",
            ),
            click.option(
                "--trust-fabric",
                "fabric",
                is_flag=True,
                callback=lambda _context, _option, trusted: "trusted" if trusted else "untrusted",
                help="Trust the network between the machines: backends without encryption may use it.",
            ),
            click.option(
                "--restarts",
                type=int,
                default=3,
                help="Restarts after a killed worker or a lost machine (default: 3).",
            ),
            click.option(
                "--quiet", is_flag=True, help="Leave the machines usable: lowest priority, one core free."
            ),
            click.option("--nice", type=click.IntRange(0, 19), default=0, help="Priority of the workers."),
            click.option(
                "--memory",
                "memory_bytes",
                type=_size,
                default="",
                metavar="SIZE",
                help="Memory limit of each worker, such as 8GB.",
            ),
            click.option(
                "--container", default="", metavar="IMAGE", help="Run in this image with Docker or Podman."
            ),
            click.option("--sandbox", is_flag=True, help="Confine the script on every machine."),
            click.option(
                "--name", "title", default="", help="Name of the run (default: that of the script)."
            ),
        )
    ):
        command = option(command)
    return command


def add_data(command: Command) -> Command:
    """Add the options for data sets and models of the script."""
    for option in (
        click.option(
            "--model",
            "models",
            multiple=True,
            metavar="NAME=PATH|ID",
            help="Send a model: a folder, or an id in this machine's Hugging Face cache.",
        ),
        click.option(
            "--data",
            multiple=True,
            metavar="NAME=PATH",
            help="Send a data set. NAME=@PATH: on each machine.",
        ),
    ):
        command = option(command)
    return command


def is_path(value: str, base: Path = Path()) -> bool:
    """Tell whether a value of ``--model`` is a path and not an id; a folder wins, as in `from_pretrained`."""
    return value.startswith((".", "~", "/")) or "\\" in value or (base / value).is_dir()


def set_option(command: Command) -> Command:
    """Add the option for variables of the script."""
    option = click.option(
        "--set",
        "variables",
        type=_variable,
        multiple=True,
        metavar="NAME=VALUE",
        help="Set an environment variable of the script. Only machines of the run get the value, in memory.",
    )
    return option(command)


def take_run_options(options: dict[str, Any]) -> RunOptions:
    """Take the fields of `RunOptions` out of ``options``; the rest stays there.

    Raise RunError if a value is outside the limits of its field.
    """
    import msgspec

    from barnraise.agent_client.run_options import RunOptions

    try:
        return msgspec.convert({name: options.pop(name) for name in RunOptions.__struct_fields__}, RunOptions)
    except msgspec.ValidationError as error:
        raise RunError(
            f"an option of the run has a value that is not possible: {error}",
            hint="Run `barnraise run --help`.",
        ) from error


def _size(text: str) -> int:
    return parse_size(text) if text else 0


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.isidentifier():
        raise RunError(f"--set {text!r} is not NAME=VALUE", hint="For example: --set WANDB_MODE=offline")
    return name, value if equals else os.environ.get(name, "")
