"""The ``backyard`` command: its verbs, and how an error reaches a person."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from backyard import __version__
from backyard.core.errors import BackyardError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@click.group("backyard", context_settings={"help_option_names": ["--help"]})
@click.version_option(__version__, message="backyard %(version)s", help="Print the version and exit.")
def app() -> None:
    """Train PyTorch models on the machines you already own, together."""


def _flag(name: str, help: str) -> Decorator:
    return click.option(name, is_flag=True, help=help)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@app.command("up")
@_flag("--detach", "Run in the background.")
@click.option(
    "--psk-file", type=click.Path(path_type=Path), help="A pre-shared key, where nobody types a code."
)
@_flag("--witness", "Only vote; never take work (for an old machine that is always on).")
def _up(detach: bool, psk_file: Path | None, witness: bool) -> int:
    """Start this machine's agent."""
    from backyard.cli import up

    return up.run(detach=detach, psk_file=psk_file, witness=witness)


@app.command("down")
@_as_json
def _down(as_json: bool) -> int:
    """Say goodbye to the others and end this machine's agent."""
    from backyard.cli import changes

    return changes.down(as_json=as_json)


@app.command("status")
@_as_json
@_flag("--graph", "Draw the machines and their links.")
@_flag("--measure", "Measure this machine's links again first (at most a second of traffic each).")
def _status(as_json: bool, graph: bool, measure: bool) -> int:
    """Show the cluster: machines, links, who coordinates."""
    from backyard.cli import status

    return status.run(as_json=as_json, graph=graph, measure=measure)


@app.command("nodes")
@_as_json
def _nodes(as_json: bool) -> int:
    """List the machines with their whole ids, roles and hardware."""
    from backyard.cli import status

    return status.nodes(as_json=as_json)


@app.command("pair")
@_flag("--guest", "Let it contribute, but run nothing here.")
@click.option("--wait/--no-wait", default=True, help="Wait until the code is used (the default), or not.")
@_as_json
def _pair(guest: bool, wait: bool, as_json: bool) -> int:
    """Show a code that lets one other machine in."""
    from backyard.cli import pair

    return pair.run(guest=guest, wait=wait, as_json=as_json)


@app.command("join")
@click.argument("code")
@click.option("--at", metavar="HOST", help="The other machine's address, if it is not found by itself.")
@_flag("--guest", "Agree to be a guest only.")
@_as_json
def _join(code: str, at: str | None, guest: bool, as_json: bool) -> int:
    """Join the cluster of the machine that shows CODE."""
    from backyard.cli import join

    return join.run(code=code, at=at, guest=guest, as_json=as_json)


@app.command("unpair")
@click.argument("node")
@_flag("--yes", "Do not ask.")
@_as_json
def _unpair(node: str, yes: bool, as_json: bool) -> int:
    """Remove NODE (its name or id) from the cluster for ever."""
    from backyard.cli import changes

    return changes.unpair(node=node, yes=yes, as_json=as_json)


@app.command("leave")
@_flag("--yes", "Do not ask.")
@_as_json
def _leave(yes: bool, as_json: bool) -> int:
    """Leave the cluster for good: this machine forgets it, and is a new node from then on."""
    from backyard.cli import changes

    return changes.leave(yes=yes, as_json=as_json)


@app.command("rename")
@click.argument("name")
@_as_json
def _rename(name: str, as_json: bool) -> int:
    """Give this machine another NAME."""
    from backyard.cli import changes

    return changes.rename(name=name, as_json=as_json)


@app.command("continue")
@click.option(
    "--without", multiple=True, required=True, metavar="NODE", help="A machine that is gone; may be repeated."
)
@_as_json
def _continue(without: tuple[str, ...], as_json: bool) -> int:
    """Go on without machines that are gone, when too few are left to decide."""
    from backyard.cli import changes

    return changes.go_on(without=list(without), as_json=as_json)


@app.group("psk")
def _psk() -> None:
    """Pre-shared keys, for machines where nobody types a code."""


@_psk.command("new")
@_flag("--guest", "Admit guests instead of owners.")
@click.option("--output", type=click.Path(path_type=Path), help="Write it to this new file (mode 0600).")
@_as_json
def _psk_new(guest: bool, output: Path | None, as_json: bool) -> int:
    """Make a key of 256 bits: whoever has it may join while this agent runs."""
    from backyard.cli import changes

    return changes.new_psk(guest=guest, output=output, as_json=as_json)


@app.command("doctor")
@_as_json
def _doctor(as_json: bool) -> int:
    """Look for what keeps this machine and its cluster from working, and say what mends it."""
    from backyard.cli import doctor

    return doctor.run(as_json=as_json)


@app.group("service")
def _service() -> None:
    """Let the operating system start this machine's agent."""


@_service.command("install")
@_as_json
def _service_install(as_json: bool) -> int:
    """Start the agent now and whenever you log in."""
    from backyard.cli import service

    return service.install(as_json=as_json)


@_service.command("remove")
@_as_json
def _service_remove(as_json: bool) -> int:
    """End the agent and do not start it by itself any more."""
    from backyard.cli import service

    return service.remove(as_json=as_json)


@_service.command("status")
@_as_json
def _service_status(as_json: bool) -> int:
    """Say whether the service is installed and running."""
    from backyard.cli import service

    return service.status(as_json=as_json)


@app.command("id")
def _id() -> None:
    """Print this machine's node id (its key is made if missing; needs no agent)."""
    from backyard.cli import identity

    identity.run()


@app.command("listen")
@click.option("--port", type=int, help="TCP port to listen on (default: 52416).")
@click.option(
    "--trust",
    multiple=True,
    metavar="NODEID",
    help="Node id to trust; repeat for more. Replaces [trust] nodes.",
)
@_flag("--until-idle", "End when the last worker of this machine has left.")
def _listen(port: int | None, trust: tuple[str, ...], until_idle: bool) -> int:
    """Listen on this machine's one port for its workers, without an agent."""
    from backyard.cli import listen

    return listen.run(port=port, trust=list(trust), until_idle=until_idle)


@app.command("settings")
def _settings() -> None:
    """Show the effective settings and where each came from (needs no agent)."""
    from backyard.cli import settings

    settings.run()


@app.command("torch")
def _torch() -> int:
    """Show how to install torch here, and what is installed (needs no agent)."""
    from backyard.cli import torch_install

    return torch_install.run()


def main() -> None:
    """Run a command; our own errors are a sentence and a hint, never a traceback."""
    try:
        code = app.main(standalone_mode=False)
    except BackyardError as error:
        click.echo(f"backyard: {error}", err=True)
        sys.exit(1)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
