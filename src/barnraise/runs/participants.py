"""Owners and guests: which machines the workers of a run trust, and which pickles they load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from barnraise.agent_client.run_requests import GuestRow, RolesResponse
from barnraise.identity import NodeId
from barnraise.identity.trust import TrustLog
from barnraise.runs.record import RunSpec


def trusted_nodes(log: TrustLog, here: NodeId, spec: RunSpec | None) -> tuple[NodeId, ...]:
    """Return the machines that workers of one run on this machine trust.

    A run that `barnraise run` started trusts the machines that its signed spec names. ``spec`` is None for
    any other group (torchrun, a notebook): its workers trust owners only, and on a guest's machine no other
    machine. A removed machine is never trusted.
    """
    if spec is not None:
        named = (NodeId(raw) for raw in spec.nodes)
        others = [node for node in named if log.role(node) is not None]
    elif log.role(here) == "owner":
        others = list(log.owners)
    else:
        others = []
    return tuple(dict.fromkeys((here, *others)))


def roles(
    log: TrustLog, here: NodeId, spec: RunSpec | None, name_of: Callable[[NodeId], str]
) -> RolesResponse:
    """Return the owners and guests of the cluster, for a worker of a run or for any other process."""
    named = frozenset(spec.nodes) if spec is not None else frozenset()
    return RolesResponse(
        here=here.raw,
        owners=tuple(node.raw for node in log.owners),
        guests=tuple(
            GuestRow(node.raw, name_of(node), node.raw in named)
            for node in log.members
            if log.role(node) == "guest"
        ),
    )


def not_owners(known: RolesResponse, others: Iterable[bytes]) -> tuple[str, ...]:
    """Return the names of machines in a group, with this one, that do not belong to owners.

    A group that does not leave this machine has none.
    """
    nodes = dict.fromkeys((known.here, *others))
    if set(nodes) == {known.here}:
        return ()
    names = {guest.node: guest.name for guest in known.guests}
    return tuple(
        names.get(node) or (f"machine {node.hex()[:8]}" if node else "a machine without a certificate")
        for node in nodes
        if node not in known.owners
    )
