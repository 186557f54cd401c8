"""The ``backyard`` command: its verbs, and how an error reaches a person."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from backyard import __version__
from backyard.core.errors import BackyardError

app = typer.Typer(
    name="backyard",
    help="Train PyTorch models on the machines you already own, together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"backyard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command("id")
def _id() -> None:
    """Print this machine's node id (its key is made if missing)."""
    from backyard.cli import identity

    identity.run()


@app.command("listen")
def _listen(
    port: Annotated[int | None, typer.Option(help="TCP port to listen on (default: 52416).")] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(metavar="NODEID", help="Node id to trust; repeat for more. Replaces [trust] nodes."),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when the last worker of this machine has left.")
    ] = False,
) -> None:
    """Listen on this machine's one port, for its workers."""
    from backyard.cli import listen

    raise typer.Exit(listen.run(port=port, trust=trust, until_idle=until_idle))


@app.command("settings")
def _settings() -> None:
    """Show the effective settings and where each came from."""
    from backyard.cli import settings

    settings.run()


@app.command("torch")
def _torch() -> None:
    """Show how to install torch here, and what is installed."""
    from backyard.cli import torch_install

    raise typer.Exit(torch_install.run())


def main() -> None:
    """Run a command; our own errors are a sentence and a hint, never a traceback."""
    try:
        app()
    except BackyardError as error:
        typer.echo(f"backyard: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
