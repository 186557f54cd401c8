"""Choice of the regional hub for a new member: the nearest one with free capacity, or the main hub."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from barnraise.cli.child_process import say
from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.background import DeadlineCall, DeadlineExceeded
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.invites import Invite, read_invite
from barnraise.hub.protocol.messages import JoinRequest, JoinResponse, RunDescription
from barnraise.hub.region.placement import nearest_regions

_LEVELS = 4
_TRIES = 3
_MEASURED_S = 8.0

# With the patience that it has for an answer.
Connect = Callable[[Invite, float], HubClient]


def settle(first: Invite, joined: JoinResponse, name: str, connect: Connect) -> Invite:
    """Return the invite of the hub that this machine joins; all of them have the same run."""
    here, description = first, joined.description
    for _ in range(_LEVELS):
        others = _readable(joined.regions, here)
        accepted = _take_in(here, others, description, name, connect) if others else None
        if accepted is None:
            break
        here, joined = accepted
    return here


def _readable(regions: Sequence[str], here: Invite) -> list[Invite]:
    invites = []
    for text in regions:
        with contextlib.suppress(BarnraiseError):  # of another version: other regions accept this machine
            invites.append(read_invite(text))
    return [invite for invite in invites if invite.hub != here.hub]


def _take_in(
    here: Invite, others: Sequence[Invite], description: RunDescription, name: str, connect: Connect
) -> tuple[Invite, JoinResponse] | None:
    own_s, *distances = _measured([here, *others], description, connect)
    reached = [(invite, far) for invite, far in zip(others, distances, strict=True) if far is not None]
    for invite, far in nearest_regions(own_s or float("inf"), reached):
        with contextlib.closing(connect(invite, _MEASURED_S)) as client:
            try:
                joined = client.ask(
                    "POST", "/v1/members", JoinResponse, JoinRequest(token=invite.token_text, name=name)
                )
            except BarnraiseError as error:
                say(f"the region at {client.address} does not take this machine: {error.message}")
                continue
            near = "" if own_s is None else f"; the hub itself: {1000 * own_s:.0f} ms"
            say(f"the nearest region of this run is {client.address} ({1000 * far:.0f} ms{near})")
        return invite, joined
    return None


def _measured(invites: Sequence[Invite], description: RunDescription, connect: Connect) -> list[float | None]:
    """Measure round trips to all hubs at once; None for a hub that is slow or has another run."""
    calls = [DeadlineCall((), partial(_round_trip, connect, invite, description)) for invite in invites]
    deadline = time.monotonic() + _MEASURED_S
    results = [call.result(deadline) for call in calls]
    return [None if isinstance(result, DeadlineExceeded) else result for result in results]


def _round_trip(connect: Connect, invite: Invite, description: RunDescription) -> float | None:
    took = []
    with contextlib.closing(connect(invite, _MEASURED_S)) as client:
        for _ in range(_TRIES):  # the first one also connects
            began = time.monotonic()
            answer = client.ask("GET", "/v1/run", RunDescription)
            took.append(time.monotonic() - began)
    return min(took) if (answer.name, answer.code) == (description.name, description.code) else None
