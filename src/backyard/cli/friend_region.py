"""Where in a run's tree a newcomer takes its seat: at the nearest region that takes it in, or at the hub."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from backyard.cli.kept import say
from backyard.core.errors import BackyardError, HubAway, HubRefused
from backyard.hub.client import HubClient
from backyard.hub.invites import Invite, read_invite
from backyard.hub.messages import Description, Join, Joined
from backyard.hub.taking_in import by_distance

_LEVELS = 4
_TRIES = 3
_MEASURED_S = 8.0


class Place(NamedTuple):
    invite: Invite
    client: HubClient


def settle(first: Place, joined: Joined, name: str, connect: Callable[[Invite], HubClient]) -> Invite:
    """Of the hub where this machine is a member in the end."""
    place, opened = first, list[HubClient]()
    try:
        for _ in range(_LEVELS):
            others = _places(joined.regions, place, connect)
            opened += [one.client for one in others]
            found = _take_in(place, others, joined.description, name) if others else None
            if found is None:
                break
            place, joined = found
        return place.invite
    finally:
        for client in opened:
            client.close()


def _places(regions: Sequence[str], here: Place, connect: Callable[[Invite], HubClient]) -> list[Place]:
    invites = [read_invite(text) for text in regions]
    return [Place(one, connect(one)) for one in invites if one.hub != here.invite.hub]


def _take_in(
    here: Place, others: Sequence[Place], description: Description, name: str
) -> tuple[Place, Joined] | None:
    own_s, *distances = _measured([here, *others], description)
    reached = [(one, far) for one, far in zip(others, distances, strict=True) if far is not None]
    for place, far in by_distance(own_s or float("inf"), reached):
        asked = Join(token=place.invite.token_text, name=name)
        try:
            joined = place.client.ask("POST", "/v1/members", Joined, asked)
        except (HubAway, HubRefused) as error:
            say(f"the region at {place.client.address} does not take this machine: {error.message}")
            continue
        near = "" if own_s is None else f"; the hub itself: {1000 * own_s:.0f} ms"
        say(f"the nearest region of this run is {place.client.address} ({1000 * far:.0f} ms{near})")
        return place, joined
    return None


def _measured(places: Sequence[Place], description: Description) -> list[float | None]:
    """Round trips, all at once; None for who does not answer soon, or has another run."""
    pool = ThreadPoolExecutor(len(places))
    asked = [pool.submit(_round_trip, place.client, description) for place in places]
    wait(asked, timeout=_MEASURED_S)
    pool.shutdown(wait=False, cancel_futures=True)
    return [one.result() if one.done() and not one.cancelled() else None for one in asked]


def _round_trip(client: HubClient, description: Description) -> float | None:
    took = []
    try:
        for _ in range(_TRIES):  # the first one also connects
            began = time.monotonic()
            told = client.ask("GET", "/v1/run", Description)
            took.append(time.monotonic() - began)
    except BackyardError:
        return None
    return min(took) if (told.name, told.code) == (description.name, description.code) else None
