"""``barnraise pair``: one short code that lets one machine in."""

from __future__ import annotations

import time

import click

from barnraise.agent_client.cluster_requests import OfferRequest, OfferResponse, PairRequest
from barnraise.cli.agent_call import ask, print_json

_POLL_S = 0.3


def run(*, guest: bool, wait: bool, as_json: bool) -> int:
    """Print the code, then wait until it is used; exit code 1 if it was burned or expired."""
    told = ask(PairRequest("guest" if guest else "owner"), OfferResponse)
    if as_json and not wait:
        print_json(told)
        return 0
    if not as_json:
        click.echo(f"On the other machine run:  barnraise join {told.code}")
        click.echo(_means(told))
        click.echo(f"The code is good for one guess and {told.seconds_left / 60:.0f} minutes.")
    if not wait:
        return 0
    try:
        told = _follow(told)
    except KeyboardInterrupt:
        ask(OfferRequest(withdraw=True), OfferResponse)
        click.echo("The code is withdrawn.")
        return 130
    if as_json:
        print_json(told)
    else:
        click.echo(told.granted or told.sentence)
    return 0 if told.granted else 1


def _follow(told: OfferResponse) -> OfferResponse:
    said = False
    while not told.granted and told.state in ("open", "answered", "used"):
        time.sleep(_POLL_S)
        told = ask(OfferRequest(), OfferResponse, offer_start=False)
        if told.state == "used" and not told.granted and not said:
            click.echo(f"{told.sentence} Waiting for the cluster to decide ...", err=True)
            said = True
    return told


def _means(told: OfferResponse) -> str:
    if told.role == "guest":
        return "It becomes a guest: it may contribute to runs that it accepts, and run nothing here."
    return "It becomes an owner: it may run code here, and this machine there."
