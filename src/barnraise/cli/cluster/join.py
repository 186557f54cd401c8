"""``barnraise join``: enter the cluster of a machine that shows a code, or a friend's run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from barnraise.agent_client.cluster_requests import JoinClusterRequest, RequestDone
from barnraise.cli.agent_call import ask, print_json
from barnraise.core.errors import PairingError

_LOOK_S = 30.0
_PAIRING_S = 90.0


class JoinOptions(NamedTuple):
    at: str | None
    guest: bool
    invite: str | None
    yes: bool
    name: str
    keep: Path | None
    quiet: bool
    site: bool
    as_json: bool


def run(code: str | None, options: JoinOptions) -> int:
    if (code is None) == (options.invite is None):
        raise PairingError(
            "there must be either a code or an invite",
            hint="Use `barnraise join CODE` for your own machines, `barnraise join --invite TEXT` for a hub.",
        )
    if options.site and options.invite is None:
        raise PairingError(
            "--site is about a hub's run, and there is no invite",
            hint="Type `barnraise join --site --invite TEXT`; to pair with a machine, give only its CODE.",
        )
    if options.invite is not None:
        from barnraise.cli.hub import join

        return join.run(
            invite=options.invite,
            yes=options.yes,
            name=options.name,
            keep=options.keep,
            quiet=options.quiet,
            site=options.site,
        )
    assert code is not None
    return _pair(code, at=options.at, guest=options.guest, as_json=options.as_json)


def _pair(code: str, *, at: str | None, guest: bool, as_json: bool) -> int:
    if not as_json:
        where = f"at {at}" if at else "on this network"
        click.echo(f"Looking for the machine that shows this code {where} ...")
    question = JoinClusterRequest(code=code, at=at or "", role="guest" if guest else None, patience_s=_LOOK_S)
    done = ask(question, RequestDone, timeout_s=_LOOK_S + _PAIRING_S)
    if as_json:
        print_json(done)
    else:
        click.echo(done.sentence)
        click.echo("See the cluster with `barnraise status`.")
    return 0
