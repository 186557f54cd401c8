"""``barnraise listen``: the process that owns this machine's one port."""

from __future__ import annotations

import click

from barnraise.core.config import load_settings
from barnraise.core.flow.console_log import install_process_log
from barnraise.transport.listener.listener import serve


def run(*, port: int | None, trust: list[str] | None, until_idle: bool) -> int:
    """Serve until interrupted (or idle); returns the exit code."""
    overrides: dict[str, object] = {}
    if port is not None:
        overrides["network.port"] = port
    if trust:
        overrides["trust.nodes"] = trust
    settings = load_settings(overrides=overrides)
    install_process_log()
    if settings.network.encryption == "plaintext":
        click.echo(
            "barnraise: PLAINTEXT links, by your setting: anyone on this network can read them", err=True
        )
    try:
        return serve(settings, until_idle=until_idle)
    except KeyboardInterrupt:
        return 130
