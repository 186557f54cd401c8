"""Choice of the regional hub for a new member: the nearest one with free capacity, or the main hub.

A member whose region is gone chooses again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from barnraise.cli.child_process import say
from barnraise.core.errors import BarnraiseError, HubRefused
from barnraise.core.flow.background import DeadlineCall, DeadlineExceeded, start_in_thread
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.invites import HubPlace, check_addresses
from barnraise.hub.protocol.messages import (
    JoinRequest,
    JoinResponse,
    RunDescription,
    SeatGrant,
    SeatRequest,
)
from barnraise.hub.region.placement import nearest_regions
from barnraise.identity.node_id import NodeId
from barnraise.transport.addresses import Where

_LEVELS = 4
_TRIES = 3
_MEASURED_S = 8.0
_GONE_S, _LOOK_S = 200.0, 20.0  # by then its parent sends no member to a region any more

# With the patience that it has for an answer.
Connect = Callable[[HubPlace, float], HubClient]
IdAt = Callable[[NodeId], NodeId]  # this machine's id at a hub


class JoinedPlace(NamedTuple):
    """A hub that this machine has joined, with the request and its answer."""

    place: HubPlace
    request: JoinRequest
    joined: JoinResponse
    network: Where  # that it answered from


def settle(first: JoinedPlace, connect: Connect, id_at: IdAt) -> HubPlace:
    """Return the hub where this machine has its only seat: the first one, or the nearest of its regions."""
    here = first
    for _ in range(_LEVELS):
        below = _take_seat(here, connect, id_at) if here.joined.regions else None
        if below is None:
            break
        here = below
    return here.place


async def until_region_is_gone(
    region: HubPlace, top: HubPlace, connect: Connect, *, gone_s: float = _GONE_S, look_s: float = _LOOK_S
) -> None:
    """Return once a region has not answered for minutes, although the run's hub does."""
    loop = asyncio.get_running_loop()
    heard_at = loop.time()
    while True:
        await asyncio.sleep(look_s)
        if await start_in_thread(partial(_answers, connect, region)):
            heard_at = loop.time()
        elif loop.time() - heard_at >= gone_s and await start_in_thread(partial(_answers, connect, top)):
            return


def _answers(connect: Connect, place: HubPlace) -> bool:
    try:
        with contextlib.closing(connect(place, _MEASURED_S)) as client:
            client.ask("GET", "/v1/run", RunDescription)
    except HubRefused:  # a refusal is an answer
        return True
    except BarnraiseError:
        return False
    return True


def _take_seat(here: JoinedPlace, connect: Connect, id_at: IdAt) -> JoinedPlace | None:
    """Take a seat at the nearest region; None if this machine stays here."""
    regions = _readable(here)
    own_s, *distances = _measured([here.place, *regions], here.joined.description, connect)
    reached = [(place, far) for place, far in zip(regions, distances, strict=True) if far is not None]
    is_seated = False
    for place, far in nearest_regions(own_s or float("inf"), reached):
        try:
            with contextlib.closing(connect(here.place, _MEASURED_S)) as client:
                message = SeatRequest(
                    region=str(place.hub), member=str(id_at(place.hub)), name=here.request.name
                )
                seat = client.ask("POST", "/v1/seats", SeatGrant, message)
                is_seated = True
            with contextlib.closing(connect(place, _MEASURED_S)) as client:
                joined = client.ask("POST", "/v1/members", JoinResponse, seat.request)
                network = client.network
        except BarnraiseError as error:
            say(f"the region at {place.addresses[0]} does not take this machine: {error.message}")
            continue
        near = "" if own_s is None else f"; the hub itself: {1000 * own_s:.0f} ms"
        say(f"the nearest region of this run is {client.address} ({1000 * far:.0f} ms{near})")
        return JoinedPlace(place, seat.request, joined, network)
    if is_seated:  # joining again ends the seat that could not be taken
        with contextlib.closing(connect(here.place, _MEASURED_S)) as client:
            client.ask_with_retries("POST", "/v1/members", JoinResponse, here.request, patience_s=_MEASURED_S)
    return None


def _readable(here: JoinedPlace) -> list[HubPlace]:
    places = []
    for region in here.joined.regions:
        with contextlib.suppress(BarnraiseError):  # other regions accept this machine
            check_addresses(region.addresses)
            hub, root = NodeId.parse(region.hub), here.place.root or here.place.hub
            places.append(HubPlace(region.addresses, hub, region.pinned, here.network, root))
    return [place for place in places if place.hub != here.place.hub]


def _measured(
    places: Sequence[HubPlace], description: RunDescription, connect: Connect
) -> list[float | None]:
    """Measure round trips to all hubs at once; None for a hub that is slow or has another run."""
    calls = [DeadlineCall((), partial(_round_trip, connect, place, description)) for place in places]
    deadline = time.monotonic() + _MEASURED_S
    results = [call.result(deadline) for call in calls]
    return [None if isinstance(result, DeadlineExceeded) else result for result in results]


def _round_trip(connect: Connect, place: HubPlace, description: RunDescription) -> float | None:
    took = []
    with contextlib.closing(connect(place, _MEASURED_S)) as client:
        for _ in range(_TRIES):  # the first one also connects
            began = time.monotonic()
            answer = client.ask("GET", "/v1/run", RunDescription)
            took.append(time.monotonic() - began)
    return min(took) if (answer.name, answer.code) == (description.name, description.code) else None
