"""``barnraise listen``: the process that owns this machine's one port."""

from __future__ import annotations

import logging

import click

from barnraise.core.config import load_settings
from barnraise.transport.listener.listener import serve


def run(*, port: int | None, trust: list[str] | None, until_idle: bool) -> int:
    """Serve until interrupted (or idle); returns the exit code."""
    overrides: dict[str, object] = {}
    if port is not None:
        overrides["network.port"] = port
    if trust:
        overrides["trust.nodes"] = trust
    settings = load_settings(overrides=overrides)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if settings.network.encryption == "plaintext":
        click.echo(
            "barnraise: PLAINTEXT links, by your setting: anyone on this network can read them", err=True
        )
    try:
        return serve(settings, until_idle=until_idle)
    except KeyboardInterrupt:
        return 130
