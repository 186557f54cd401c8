"""``barnraise id``: the identity of this machine."""

from __future__ import annotations

import click

from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.identity.keys import NodeKey


def run() -> None:
    """Print the node id alone on standard output, so that it can be copied or piped."""
    click.echo(str(machine_key(load_settings()).id))


def machine_key(settings: Settings) -> NodeKey:
    """Return this machine's key, and create it if there is none yet."""
    return NodeKey.load_or_create(state_directory(settings) / "node.key")
