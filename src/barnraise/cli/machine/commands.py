"""Commands ``pause``, ``resume-machine``, ``limit`` and ``metrics`` with their options. Light to import."""

from __future__ import annotations

from typing import Any

import click

from barnraise.cli.completion import complete_machines
from barnraise.cli.notify.commands import notify_group

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.command("pause")
@click.argument("machine", required=False, shell_complete=complete_machines)
@click.option("--for", "duration", metavar="TIME", help="How long, such as 2h or 30min (default: no end).")
@_as_json
def pause_command(machine: str | None, duration: str | None, as_json: bool) -> int:
    """Let no run use MACHINE (default: this one). Sessions continue on the others, and nothing is lost."""
    from barnraise.cli.machine import limits

    return limits.pause(machine=machine, duration=duration, as_json=as_json)


@click.command("resume-machine")
@click.argument("machine", required=False, shell_complete=complete_machines)
@_as_json
def resume_command(machine: str | None, as_json: bool) -> int:
    """Let runs use MACHINE (default: this one) again after `barnraise pause`."""
    from barnraise.cli.machine import limits

    return limits.resume(machine=machine, as_json=as_json)


@click.command("limit")
@click.option("--cpus", metavar="COUNT", help="Processor cores for all workers together.")
@click.option("--memory", metavar="SIZE", help="Memory of each worker, such as 8GiB.")
@click.option("--gpu-memory", metavar="PERCENT", help="Share of each GPU's memory, such as 50%.")
@click.option("--rate", metavar="RATE", help="How fast workers send, such as 20mbit.")
@click.option("--hours", metavar="SPAN", help="When runs of other machines may use this one: 22:00-07:00.")
@click.option("--battery", type=click.Choice(["wait", "allow"]), help="Such runs on battery (default: wait).")
@click.option(
    "--metered", type=click.Choice(["wait", "allow"]), help="On a metered connection (default: wait)."
)
@_as_json
def limit_command(as_json: bool, **options: Any) -> int:
    """Show how much of this machine runs may use, and change it. "none" removes a limit."""
    from barnraise.cli.machine import limits

    return limits.limit(options, as_json=as_json)


@click.command("metrics")
@click.argument("name", default="")
@click.option("--watch", is_flag=True, help="Print them again every two seconds.")
@_as_json
def metrics_command(name: str, *, watch: bool, as_json: bool) -> int:
    """Show what this machine and its runs count: steps, times, bytes, devices. NAME: only these."""
    from barnraise.cli.machine import metrics

    return metrics.run(name, watch=watch, as_json=as_json)


@click.command("id")
def id_command() -> None:
    """Print the id of this machine. Its key is made if missing; needs no agent."""
    from barnraise.cli.machine import identity

    identity.run()


@click.group("identity")
def identity_group() -> None:
    """Change this machine's key."""


@identity_group.command("rotate")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
def _identity_rotate(yes: bool, as_json: bool) -> int:
    """Replace this machine's key in place; the cluster keeps its role and name."""
    from barnraise.cli.machine import identity

    return identity.rotate(yes=yes, as_json=as_json)


machine_commands = (
    pause_command,
    resume_command,
    limit_command,
    metrics_command,
    notify_group,
    id_command,
    identity_group,
)
