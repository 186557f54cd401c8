"""``barnraise pair``: one short code with which one machine can join."""

from __future__ import annotations

import time

import click

from barnraise.agent_client.cluster_requests import OfferRequest, OfferResponse, PairRequest
from barnraise.cli.agent_call import ask, print_json

_POLL_S = 0.3


def run(*, guest: bool, wait: bool, as_json: bool) -> int:
    """Print the code, then wait until it is used; exit code 1 if it was burned or expired."""
    offer = ask(PairRequest("guest" if guest else "owner"), OfferResponse)
    if as_json and not wait:
        print_json(offer)
        return 0
    if not as_json:
        click.echo(f"On the other machine run:  barnraise join {offer.code}")
        click.echo(_means(offer))
        click.echo(f"The code works once and expires in {offer.seconds_left / 60:.0f} minutes.")
    if not wait:
        return 0
    try:
        offer = _follow(offer)
    except KeyboardInterrupt:
        ask(OfferRequest(withdraw=True), OfferResponse)
        click.echo("The code is withdrawn.")
        return 130
    if as_json:
        print_json(offer)
    else:
        click.echo(offer.granted or offer.sentence)
    return 0 if offer.granted else 1


def _follow(offer: OfferResponse) -> OfferResponse:
    announced = False
    while not offer.granted and offer.state in ("open", "answered", "used"):
        time.sleep(_POLL_S)
        offer = ask(OfferRequest(), OfferResponse, offer_start=False)
        if offer.state == "used" and not offer.granted and not announced:
            click.echo(f"{offer.sentence} Waiting for the cluster to decide ...", err=True)
            announced = True
    return offer


def _means(offer: OfferResponse) -> str:
    if offer.role == "guest":
        return "It will be a guest: it contributes to runs that it accepts, and starts none."
    return "The two machines can then run code on each other. Pair only machines you trust."
