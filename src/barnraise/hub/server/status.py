"""Public description of a run, and the sentence that says what its round waits for."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from barnraise.core.units import counted, format_duration
from barnraise.hub.aggregation.update_checks import member_names
from barnraise.hub.protocol.messages import PROTOCOL, RunDescription, VectorLayout
from barnraise.hub.rounds.leases import LEAST_NORMS, can_be_compared, held_s
from barnraise.hub.rounds.state_machine import RoundState, missing_members
from barnraise.hub.storage.create import HubFounding
from barnraise.hub.storage.log import MemberRecord
from barnraise.identity.node_id import NodeId

_AGAIN_S = 1.0


def describe_run(
    hub: NodeId, founding: HubFounding, layout: VectorLayout | None, state: RoundState, store: str | None
) -> RunDescription:
    """Return the public description of a run."""
    return RunDescription(
        protocol=PROTOCOL,
        hub=str(hub),
        name=founding.name,
        owner=founding.owner,
        terms=founding.terms,
        code=founding.code,
        layout=layout,
        course=state.course,
        version=state.version,
        finished=state.is_finished,
        store=store,
    )


def describe_wait(state: RoundState, names: Mapping[str, str], now: float) -> str:
    """Return a sentence that says what the round waits for, and for how long at most."""
    if state.version is None:
        return "waits for the owner's base"
    missing, wanted = missing_members(state, now), state.terms.wait_for
    if missing:
        here = f"{wanted - missing} of {counted(wanted, 'member')} asked for samples"
        return f"{here}; the first round waits for {missing} more"
    if state.closing:
        return f"merges {len(state.closing)} updates into version {state.version + 1}"
    if state.waiting and not can_be_compared(state.waiting.values(), state.known):
        here = counted(len(state.waiting), "stranger's update")
        missing = LEAST_NORMS - len(state.waiting)
        return (
            f"{here} received, but there is nothing to compare the norm with. Waits for {missing} more, or "
            "for one of a friend or the owner: invite a friend (`barnraise invite`), or train on the hub "
            "(`barnraise hub up` without `--no-train`)"
        )
    awaited = [lease for lease in state.lent.values() if now < lease.overdue]
    if not awaited:
        return "waits for a member to take a lease"
    first = heapq.nsmallest(5, awaited, key=lambda lease: lease.overdue)
    durations = [format_duration(round(held_s(lease, state.terms, now))) for lease in first]
    listed = ", ".join(
        f"{names.get(lease.node, lease.node[:9])} (training for {duration})"
        for lease, duration in zip(first, durations, strict=True)
    )
    more = f" and {len(awaited) - 5} more" if len(awaited) > 5 else ""
    until = format_duration(max(0.0, max(lease.overdue for lease in awaited) - now))
    return f"{counted(len(state.waiting), 'update')} received; waits for {listed}{more}, {until} at most"


class RoundWaits:
    """Cache of the wait sentence, renewed once a second.

    Making it reads every lease, and every long poll needs it.
    """

    def __init__(self) -> None:
        self._said, self._at = "", -math.inf

    def text(self, state: RoundState, members: Mapping[str, MemberRecord], now: float) -> str:
        """Return the wait sentence, at most a second old."""
        if now - self._at >= _AGAIN_S:
            self._said, self._at = describe_wait(state, member_names(members), now), now
        return self._said
