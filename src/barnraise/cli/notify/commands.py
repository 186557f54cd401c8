"""Commands of ``barnraise notify`` with their options. Light to import."""

from __future__ import annotations

import click

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group("notify", invoke_without_command=True)
@click.pass_context
def notify_group(context: click.Context) -> int | None:
    """Get a notice when a run of this machine is done, fails, stalls, or loses a machine.

    \b
      barnraise notify add desktop
      barnraise notify add ntfy=https://ntfy.sh/TOPIC
      barnraise notify add webhook=-                      asks for the URL
      barnraise notify add email=ME@HOME.ORG --smtp SMTP.HOME.ORG --user ME
    Without a command, list the targets.
    """
    if context.invoked_subcommand is not None:
        return None
    from barnraise.cli.notify import targets

    return targets.list_targets(as_json=False)


@notify_group.command("add")
@click.argument("target")
@click.option(
    "--on", "events", metavar="EVENTS", help="Only these: done,failed,stalled,no-news,machine-gone."
)
@click.option("--token", is_flag=True, help="Ask for an access token of the webhook or the ntfy server.")
@click.option("--smtp", metavar="HOST[:PORT]", help="For e-mail: the server that takes it (port 587 or 465).")
@click.option("--user", default="", help="For e-mail: the user at that server; asks for the password.")
@click.option(
    "--from", "sender", default="", metavar="ADDRESS", help="For e-mail: the sender (default: TARGET)."
)
@_as_json
def _add(
    target: str, events: str | None, token: bool, smtp: str | None, user: str, sender: str, as_json: bool
) -> int:
    """Send notices to TARGET: desktop, webhook=URL, ntfy=URL/TOPIC or email=ADDRESS.

    For "-" instead of the URL it asks, so that no other user of this machine sees it. Without a terminal,
    each secret is a line of the input.
    """
    from barnraise.cli.notify import targets

    options = targets.TargetOptions(token=token, smtp=smtp, user=user, sender=sender)
    return targets.add(target, events, options, as_json=as_json)


@notify_group.command("list")
@_as_json
def _list(as_json: bool) -> int:
    """List the targets, what reached them, and what failed. Secrets are not shown."""
    from barnraise.cli.notify import targets

    return targets.list_targets(as_json=as_json)


@notify_group.command("remove")
@click.argument("name")
@_as_json
def _remove(name: str, as_json: bool) -> int:
    """Remove the target NAME and its secrets. Notices that wait for it are not sent."""
    from barnraise.cli.notify import targets

    return targets.remove(name, as_json=as_json)


@notify_group.command("test")
@click.argument("name", required=False)
@_as_json
def _test(name: str | None, as_json: bool) -> int:
    """Send a test notice to the target NAME now (default: to all). Exit code 1: one did not take it."""
    from barnraise.cli.notify import targets

    return targets.test(name, as_json=as_json)
