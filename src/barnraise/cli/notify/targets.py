"""``barnraise notify``: adds, lists, removes and tests targets of notifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

import click

from barnraise.agent_client.cluster_requests import AgentResponse
from barnraise.agent_client.notifications.requests import (
    MAX_NAME,
    AddTargetRequest,
    ListTargetsRequest,
    RemoveTargetRequest,
    TargetRow,
    TargetsResponse,
    TargetTestRequest,
    TargetTestResponse,
)
from barnraise.agent_client.notifications.targets import (
    EVENTS,
    DesktopTarget,
    EmailTarget,
    NtfyTarget,
    Target,
    WebhookTarget,
    check_target,
    parse_events,
    split_server,
    split_target,
)
from barnraise.cli.agent_call import ask, ensure_agent, print_json
from barnraise.cli.tables import table
from barnraise.cli.terminal import read_secret, wrapped
from barnraise.core.errors import ConfigError
from barnraise.core.units import counted

_TEST_S = 60.0


class TargetOptions(NamedTuple):
    """Options of ``notify add`` besides the target and its events."""

    token: bool = False
    smtp: str | None = None
    user: str = ""
    sender: str = ""


def add(text: str, events: str | None, options: TargetOptions, *, as_json: bool) -> int:
    """Add a target, after its secrets were typed."""
    chosen = parse_events(events) if events is not None else EVENTS
    target = read_target(text, options, _ask_secret)
    ensure_agent()
    response = ask(AddTargetRequest(target, chosen), TargetsResponse)
    if as_json:
        return _print(response)
    for row in response.targets:
        click.echo(wrapped(f"Notices go to {row.name} ({row.address}) for: {', '.join(row.events)}."))
        if response.note:
            click.echo(wrapped(response.note))
        click.echo(f"Try it: barnraise notify test {row.name}")
    return 0


def read_target(text: str, options: TargetOptions, ask_secret: Callable[[str], str]) -> Target:
    """Return the target that was typed; raise ConfigError if it cannot be used.

    ``ask_secret`` returns what a person types after a word such as "Token".
    """
    kind, address = split_target(text)
    if kind != "email" and (options.smtp or options.user or options.sender):
        raise ConfigError(f"--smtp, --user and --from are for e-mail, not for {kind}", hint="Leave them out.")
    if options.token and kind not in ("webhook", "ntfy"):
        raise ConfigError(f"{kind} has no token", hint="Leave --token out.")
    if address == "-":
        address = ask_secret("Address" if kind == "email" else "URL")
    target: Target
    if kind == "desktop":
        target = DesktopTarget()
    elif kind == "email":
        target = _mail_target(address, options, ask_secret)
    else:
        token = ask_secret("Token") if options.token else ""
        target = WebhookTarget(address, token) if kind == "webhook" else NtfyTarget(address, token)
    check_target(target)
    return target


def _mail_target(address: str, options: TargetOptions, ask_secret: Callable[[str], str]) -> EmailTarget:
    if not options.smtp:
        raise ConfigError(
            "e-mail needs the server that takes it", hint="Write for example --smtp smtp.home.org:587."
        )
    host, port = split_server(options.smtp)
    password = ask_secret(f"Password of {options.user} at {host}") if options.user else ""
    return EmailTarget(
        address=address,
        host=host,
        port=port,
        user=options.user,
        password=password,
        sender=options.sender or address,
    )


def list_targets(*, as_json: bool) -> int:
    """Print the targets, with what reached them and what failed."""
    response = ask(ListTargetsRequest(), TargetsResponse)
    if as_json:
        return _print(response)
    click.echo(describe(response.targets))
    if response.note:
        click.echo(wrapped(response.note, indent="  "))
    return 0


def remove(name: str, *, as_json: bool) -> int:
    """Remove a target by its name."""
    response = ask(RemoveTargetRequest(name[:MAX_NAME]), TargetsResponse)
    if as_json:
        return _print(response)
    click.echo(f"{name} is removed; {counted(len(response.targets), 'target')} left.")
    return 0


def test(name: str | None, *, as_json: bool) -> int:
    """Send a test notice, and return 1 if a target did not take it."""
    chosen = name[:MAX_NAME] if name is not None else None
    response = ask(TargetTestRequest(chosen), TargetTestResponse, timeout_s=_TEST_S)
    if as_json:
        _print(response)
    else:
        for row in response.rows:
            result = f"failed: {row.failure}" if row.failure else "took the test notice"
            click.echo(wrapped(f"{row.name} ({row.address}) {result}"))
    return 1 if any(row.failure for row in response.rows) else 0


def describe(rows: Sequence[TargetRow]) -> str:
    """Format targets as a table, and their failures below it. Pure but for the local time."""
    if not rows:
        return "No notices are sent. Add a target: barnraise notify add desktop"
    lines = [("NAME", "TARGET", "EVENTS", "SENT", "LAST")]
    for row in rows:
        last = _time(row.delivered_at) if row.delivered_at is not None else "never"
        lines.append((row.name, row.address, ", ".join(row.events), f"{row.delivered}", last))
    text = table(lines, words=(1, 2))
    for row in rows:
        if row.failure:
            at = f" at {_time(row.failed_at)}" if row.failed_at is not None else ""
            text += "\n" + wrapped(f"{row.name} failed{at}: {row.failure}. {_left(row)}", indent="  ")
    return text


def _left(row: TargetRow) -> str:
    """Return what becomes of the notices that a target did not take."""
    waiting = f"{counted(row.waiting, 'notice')} will be tried again" if row.waiting else ""
    dropped = f"{counted(row.dropped, 'notice')} not sent" if row.dropped else ""
    return "; ".join(part for part in (waiting, dropped) if part).capitalize() + "."


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _ask_secret(what: str) -> str:
    """Return what a person types without showing it, or the next line of the input without a terminal."""
    if secret := read_secret("-", what):
        return secret
    raise ConfigError(f"the input has no line for: {what}", hint="Type it at a terminal, or pipe it in.")


def _print(response: AgentResponse) -> int:
    print_json(response)
    return 0
