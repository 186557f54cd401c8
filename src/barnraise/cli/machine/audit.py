"""``barnraise audit``: what changed trust and ran code on this machine, from its audit log.

The command reads the files itself, also those of the hubs that this machine keeps. It needs no agent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime

import click
import msgspec

from barnraise.cli.hub.directories import kept_hubs
from barnraise.cli.tables import table
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import ConfigError
from barnraise.core.logs.audit_entry import AuditEntry, newest
from barnraise.core.logs.audit_log import AUDIT_LOG, read_audit
from barnraise.core.units import counted, parse_duration

_SHOWN_DIGEST = 12


def run(*, since: str, limit: int, as_json: bool) -> int:
    """Print the newest entries; ``limit`` 0: all that are kept."""
    start = parse_since(since, time.time()) if since else 0.0
    settings = load_settings()
    places = [state_directory(settings), *kept_hubs(settings)]
    entries = sorted((entry for place in places for entry in read_audit(place)), key=lambda entry: entry.at)
    chosen = newest(entries, since=start, limit=limit)
    if as_json:
        click.echo(json.dumps({"entries": msgspec.to_builtins(chosen), "kept": len(entries)}, indent=2))
    else:
        click.echo(describe(chosen, len(entries)))
    return 0


def parse_since(text: str, now: float) -> float:
    """Return the wall time that ``2h`` ago, ``2026-11-18`` or ``2026-11-18T12:30`` means. Pure."""
    try:
        return datetime.fromisoformat(text).timestamp()  # without a zone: of this machine
    except ValueError:
        pass
    try:
        return now - parse_duration(text)
    except ConfigError as error:
        raise ConfigError(
            f"{text!r} is neither a time such as 2h nor a date", hint="Write 30min, 2h, 3d or 2026-11-18."
        ) from error


def describe(entries: Sequence[AuditEntry], kept: int) -> str:
    """Format entries as a table, the newest last. Pure."""
    if not entries:
        return f"No line matches; {AUDIT_LOG} has {counted(kept, 'line')}."
    rows = [("TIME", "EVENT", "WHAT", "DETAIL")]
    for entry in entries:
        digest = f"order {entry.digest[:_SHOWN_DIGEST]}" if entry.digest else ""
        by = f"by {entry.by}" if entry.by else ""
        detail = "; ".join(part for part in (entry.detail, by, digest) if part)
        rows.append((_local(entry), entry.event.replace("-", " "), entry.subject, detail))
    return table(rows, words=(2,), wraps=True)


def _local(entry: AuditEntry) -> str:
    return datetime.fromtimestamp(entry.seconds).strftime("%y-%m-%d %H:%M:%S")
