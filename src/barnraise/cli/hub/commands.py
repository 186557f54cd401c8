"""Commands of ``barnraise hub``: their options, and the functions that run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from barnraise.cli.completion import complete_files

_name = click.option("--name", default="", help="Which hub of this machine (default: the only one).")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group("hub")
def hub_group() -> None:
    """Train one model with friends over the internet: this machine keeps it, all machines contribute."""


@hub_group.command("up", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--name", default="", help="Name of the run (default: that of the script).")
@click.option("--host", default="", help="Listen on this address (default: all).")
@click.option("--port", type=click.IntRange(1, 65535), default=52480, help="Listen on this port (52480).")
@click.option("--plain", is_flag=True, help="Without TLS, for a proxy or tunnel that runs on this machine.")
@click.option("--proxied", is_flag=True, help="A proxy elsewhere ends TLS; friends trust its certificate.")
@click.option(
    "--address", multiple=True, metavar="URL", help="How friends reach this hub; may be repeated, best first."
)
@click.option("--uses", type=click.IntRange(1, 10_000), default=1, help="Uses of the first invite (1).")
@click.option("--round", "round_time", default=None, help="How long a round of training lasts (30s).")
@click.option("--codec", default=None, help="How updates are encoded (int8; int4, bf16, fp32 ...).")
@click.option(
    "--wait-for",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Members with which the first round starts (1).",
)
@click.option(
    "--quorum",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of the members whose updates end a round (0.6).",
)
@click.option(
    "--max-staleness",
    type=click.IntRange(0, 64),
    metavar="K",
    help="How many versions late an update may be (2).",
)
@click.option(
    "--linear-scaling", is_flag=True, help="Whole batches, with learning rates times the members."
)
@click.option("--rounds", type=click.IntRange(1), metavar="N", help="End after N rounds, and save the model.")
@click.option("--train/--no-train", default=True, help="Train on this machine too (the default), or not.")
@click.option("--parent", default="", metavar="INVITE", help="Send merged updates to that hub; - asks.")
@click.option(
    "--seats",
    type=click.IntRange(0, 10_000),
    default=100,
    help="With --parent: how many friends it may send here.",
)
@click.option(
    "--held-out",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A Python file here whose loss(parameters) tries each update before it counts.",
)
@click.option(
    "--store", default="", metavar="s3://BUCKET/FOLDER", help="Store model files there for friends."
)
@click.option("--store-endpoint", default="", metavar="URL", help="Address of that store, if not Amazon.")
@click.option("--folder", type=click.Path(path_type=Path), help="The folder to send (default: this one).")
@click.argument("script", required=False, shell_complete=complete_files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def _up(**options: Any) -> int:
    """Serve a model that friends train with you; without SCRIPT, continue the hub of before.

    Prints an invite for friends. Ctrl-C ends the hub; nothing of the run is lost.
    """
    from barnraise.cli.hub import up

    return up.up(up.HubUpOptions(**options))


@hub_group.command("follow")
@_name
@click.option("--host", default="0.0.0.0", help="Listen on this address (default: all).")
@click.option("--port", type=click.IntRange(1, 65535), default=52480, help="Listen on this port (52480).")
@click.argument("invite")
def _follow(**options: Any) -> int:
    """Keep a copy of a hub that can replace it. INVITE: `barnraise invite --mirror`; - asks for it."""
    from barnraise.cli.hub import mirror

    return mirror.follow(**options)


@hub_group.command("hand-over")
@_name
@click.option("--for", "lasts", default="2160h", metavar="TIME", help="How long it can be used (2160h).")
@click.option("--revoke", is_flag=True, help="Withdraw all permissions that NODE got so far.")
@click.argument("node")
def _hand_over(**options: Any) -> int:
    """Print a permission for mirror NODE to replace this hub. Keep it in a safe place."""
    from barnraise.cli.hub import mirror

    return mirror.hand_over(**options)


@hub_group.command("take-over")
@_name
@click.argument("word")
def _take_over(word: str, name: str) -> int:
    """Make the mirror on this machine the hub, with the permission WORD; - asks for it."""
    from barnraise.cli.hub import mirror

    return mirror.take_over(word=word, name=name)


@hub_group.command("export")
@_name
@click.argument("folder", type=click.Path(path_type=Path))
def _export(folder: Path, name: str) -> int:
    """Write the newest model of a hub of this machine to FOLDER, as model.safetensors."""
    from barnraise.cli.hub import status

    return status.export(folder=folder, name=name)


@hub_group.command("pardon")
@_name
@click.argument("member")
def _pardon(member: str, name: str) -> int:
    """Accept updates of MEMBER (name or start of its id) again. The hub must be up."""
    from barnraise.cli.hub import owner

    return owner.pardon(member=member, name=name)


@hub_group.command("expel")
@_name
@click.argument("member")
def _expel(member: str, name: str) -> int:
    """Exclude MEMBER (name or start of its id) until it is pardoned. The hub must be up."""
    from barnraise.cli.hub import owner

    return owner.expel(member=member, name=name)


@hub_group.command("status")
@_name
@_as_json
def _status(name: str, as_json: bool) -> int:
    """Show the hubs of this machine: versions, members, and which members a round waits for."""
    from barnraise.cli.hub import status

    return status.status(name=name, as_json=as_json)


@click.command("invite")
@_name
@click.option(
    "--uses", type=click.IntRange(1, 10_000), default=1, help="Machines that may use it (default: one)."
)
@click.option("--list", "listed", is_flag=True, help="Show the invites, and which machines came with each.")
@click.option("--revoke", default="", metavar="ID", help="Withdraw the invite with this id of --list.")
@click.option("--for", "lasts", default="168h", metavar="TIME", help="How long it can be used (168h).")
@click.option("--stranger", is_flag=True, help="For people you do not know: their updates are trimmed.")
@click.option("--mirror", is_flag=True, help="For a machine that keeps a copy: `barnraise hub follow`.")
@click.option("--region", is_flag=True, help="For a hub below this one: `barnraise hub up --parent`.")
@click.option("--address", multiple=True, metavar="URL", help="Address of this hub (default: as started).")
def invite_command(**options: Any) -> int:
    """Print an invite to a hub of this machine: one line for `barnraise join --invite`."""
    from barnraise.cli.hub import invite

    return invite.run(invite.InviteOptions(**options))
