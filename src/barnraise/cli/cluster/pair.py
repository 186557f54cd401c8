"""``barnraise pair``: one short code for each machine that joins."""

from __future__ import annotations

import time

import click

from barnraise.agent_client.cluster_requests import OfferRequest, OfferResponse, PairRequest, Role
from barnraise.cli.agent_call import ask, ensure_agent, print_json
from barnraise.cli.machine.torch_install import offer_torch
from barnraise.cli.waiting import waiting
from barnraise.core.errors import PairingError

_POLL_S = 0.3


def run(*, guest: bool, wait: bool, machines: int, yes: bool, as_json: bool) -> int:
    """Show a code and wait until it is used, for one machine after the other; 1 if one was burned or expired.

    Each machine gets a code of its own: machines that share a code could pretend to be each other. A code
    that was guessed wrong ends the command, because the next code is the next guess.
    """
    if machines > 1 and (as_json or not wait):
        raise PairingError(
            "--machines waits for each machine, and prints text", hint="Leave out --json and --no-wait."
        )
    ensure_agent()
    role: Role = "guest" if guest else "owner"
    for number in range(1, machines + 1):
        offer = ask(PairRequest(role), OfferResponse, offer_start=False)
        if as_json and not wait:
            print_json(offer)
            return 0
        if not as_json:
            which = "the other machine" if machines == 1 else f"machine {number} of {machines}"
            click.echo(f"On {which} run:  barnraise join {offer.code}")
            click.echo(_means(offer))
            click.echo(f"The code works once and expires in {offer.seconds_left / 60:.0f} minutes.")
        if not wait:
            return 0
        offer = _used(offer)
        if as_json:
            print_json(offer)
            return 0 if offer.granted else 1
        click.echo(offer.granted or offer.sentence)
        if not offer.granted:
            return 1
        if number < machines:
            click.echo()
    return offer_torch(yes=yes)


def _used(offer: OfferResponse) -> OfferResponse:
    """Return the offer when it is used, burned or expired. Ctrl-C withdraws the code."""

    def line(_: float) -> str:
        if offer.state != "open":
            return f"{offer.sentence} Waiting for the cluster to decide ..."
        minutes, seconds = divmod(round(offer.seconds_left), 60)
        return f"Waiting for the other machine (Ctrl-C withdraws the code) ... {minutes}:{seconds:02} left"

    try:
        with waiting(line):
            while not offer.granted and offer.state in ("open", "answered", "used"):
                time.sleep(_POLL_S)
                offer = ask(OfferRequest(), OfferResponse, offer_start=False)
    except KeyboardInterrupt:
        ask(OfferRequest(withdraw=True), OfferResponse, offer_start=False)
        click.echo("The code is withdrawn.")
        raise click.exceptions.Abort from None
    return offer


def _means(offer: OfferResponse) -> str:
    if offer.role == "guest":
        return "It will be a guest: it contributes to runs that it accepts, and starts none."
    return "The two machines can then run code on each other. Pair only machines you trust."
