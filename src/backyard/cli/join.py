"""``backyard join``: enter the cluster of a machine that shows a code."""

from __future__ import annotations

import click

from backyard.cli.asking import ask, print_json
from backyard.local.questions import Done, JoinAsk

_LOOK_S = 30.0
_PAIRING_S = 90.0


def run(*, code: str, at: str | None, guest: bool, as_json: bool) -> int:
    if not as_json:
        where = f"at {at}" if at else "on this network"
        click.echo(f"Looking for the machine that shows this code {where} ...")
    question = JoinAsk(code=code, at=at or "", role="guest" if guest else None, patience_s=_LOOK_S)
    done = ask(question, Done, timeout_s=_LOOK_S + _PAIRING_S)
    if as_json:
        print_json(done)
    else:
        click.echo(done.sentence)
        click.echo("See the cluster with `backyard status`.")
    return 0
