"""``barnraise join``: enter the cluster of a machine that shows a code, or a friend's run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from barnraise.agent_client.cluster_requests import JoinClusterRequest, RequestDone, Role
from barnraise.cli.agent_call import ask, ensure_agent, print_json
from barnraise.cli.machine.torch_install import offer_torch
from barnraise.cli.terminal import read_secret
from barnraise.cli.waiting import waiting
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
    no_sandbox: bool
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
            is_sandboxed=not options.no_sandbox,
        )
    assert code is not None
    return _pair(read_secret(code, "Code"), options)


def _pair(code: str, options: JoinOptions) -> int:
    ensure_agent()
    if not options.as_json:
        where = f"at {options.at}" if options.at else "on this network"
        click.echo(f"Looking for the machine that shows this code {where} ...")
    role: Role | None = "guest" if options.guest else None
    question = JoinClusterRequest(code=code, at=options.at or "", role=role, patience_s=_LOOK_S)
    with waiting("Looking"):
        done = ask(question, RequestDone, timeout_s=_LOOK_S + _PAIRING_S, offer_start=False)
    if options.as_json:
        print_json(done)
        return 0
    click.echo(done.sentence)
    click.echo("See the cluster with `barnraise status`.")
    return offer_torch(yes=options.yes)
