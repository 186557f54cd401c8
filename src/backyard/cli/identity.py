"""``backyard id``: who this machine is."""

from __future__ import annotations

import click

from backyard.core.config import load_settings, state_directory
from backyard.identity.keys import NodeKey


def run() -> None:
    """Print the node id alone on standard output, so that it can be copied or piped."""
    key = NodeKey.load_or_create(state_directory(load_settings()) / "node.key")
    click.echo(str(key.id))
