"""``barnraise settings``: the settings in force, and where each comes from."""

from __future__ import annotations

from operator import attrgetter

import click

from barnraise.artifacts import store_directory
from barnraise.core.config import default_config_path, resolve_settings, state_directory


def run() -> None:
    """Print every setting as TOML, with its origin as a comment where it is not the default."""
    resolved = resolve_settings()
    settings = resolved.settings
    encryption = settings.network.encryption
    click.echo(f"# settings file unless BARNRAISE_CONFIG names another: {default_config_path()}")
    state = state_directory(settings)
    click.echo(f"# state directory (this machine's key, cluster and logs): {state}")
    click.echo(f"# runs: {state / 'runs'}")
    click.echo(f"# files of runs and data sets: {store_directory(state)}")
    click.echo(f"# links: {'encrypted (TLS 1.3)' if encryption == 'tls' else 'PLAINTEXT, by your setting'}")
    section_before = ""
    for name, origin in resolved.origins.items():
        section, _, key = name.rpartition(".")
        if section != section_before:
            click.echo(f"\n[{section}]")
            section_before = section
        value = attrgetter(name)(settings)
        line = f"# {key} is not set" if value is None else f"{key} = {_toml(value)}"
        click.echo(line if origin == "default" else f"{line}  # from {origin}")


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
