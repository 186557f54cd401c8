"""Placement of mirrors: which member of a group mirrors what another one trains, and why. Pure.

A death takes all workers of a machine with it. So a mirror is on another machine, if one has memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from barnraise.core.units import format_size


class MirrorMember(NamedTuple):
    """A member of a group. ``machine``: several members may share one.

    ``trained_bytes``: what a mirror of it takes; 0 if it trains nothing. ``free_bytes``: the memory beside
    its own stage; None if unknown. ``units``: parts of the model that it trains; replicas have the same ones.
    ``neighbours``: ranks of the stages before and after its own.
    """

    name: str
    machine: str
    trained_bytes: int
    free_bytes: int | None = None
    units: frozenset[int] = frozenset()
    neighbours: frozenset[int] = frozenset()


class MirrorPlacement(NamedTuple):
    """Mirrors of a group. ``mirrors``: by rank, the rank that mirrors it; None without one.

    ``free_bytes``: the memory that is left on each rank; None if unknown. ``why``: sentences about risks.
    """

    mirrors: tuple[int | None, ...]
    free_bytes: tuple[int | None, ...]
    why: tuple[str, ...] = ()

    def mirrored_by(self, rank: int) -> list[int]:
        """Return the ranks that a rank mirrors."""
        return [other for other, mirror in enumerate(self.mirrors) if mirror == rank]


def place_mirrors(members: Sequence[MirrorMember]) -> MirrorPlacement:
    """Return a mirror for each member that trains something which no other machine has.

    Other machines come first, then neighbours in the pipeline, which take over the blocks if the member is
    lost. Then come those that mirror least so far, then the next ranks. A worker of the same machine mirrors
    only if no other machine can: that helps if a single process dies. Of replicas on one machine, the first
    one has a mirror for all.
    """
    world = len(members)
    mirrors: list[int | None] = [None] * world
    taken = [0] * world
    why = []
    for rank in sorted(range(world), key=lambda rank: (-members[rank].trained_bytes, rank)):
        member = members[rank]
        if not member.trained_bytes or _is_elsewhere(members, rank):
            continue
        copies = _copies_here(members, rank)
        if copies and copies[0] < rank:
            continue
        able = [
            other
            for other in range(world)
            if other != rank
            and not (copies and members[other].machine == member.machine)
            and _has_memory(members[other], taken[other] + member.trained_bytes)
        ]
        chosen = min(
            able,
            key=lambda other: (
                members[other].machine == member.machine,
                other not in member.neighbours,
                taken[other],
                (other - rank) % world,
            ),
            default=None,
        )
        mirrors[rank] = chosen
        if chosen is not None:
            taken[chosen] += member.trained_bytes
        if world > 1 and (chosen is None or members[chosen].machine == member.machine):
            why.append(_risk(members, rank))
    free = (
        None if member.free_bytes is None else member.free_bytes - used
        for member, used in zip(members, taken, strict=True)
    )
    return MirrorPlacement(tuple(mirrors), tuple(free), tuple(why))


def _is_elsewhere(members: Sequence[MirrorMember], rank: int) -> bool:
    """Tell whether other machines train all that a member trains."""
    others = (each.units for each in members if each.machine != members[rank].machine)
    return bool(members[rank].units) and members[rank].units <= frozenset().union(*others)


def _copies_here(members: Sequence[MirrorMember], rank: int) -> list[int]:
    """Return the other ranks on a member's machine that train all that it trains."""
    own = members[rank]
    return [
        other
        for other, each in enumerate(members)
        if other != rank and each.machine == own.machine and own.units and own.units <= each.units
    ]


def _has_memory(member: MirrorMember, needed: int) -> bool:
    return member.free_bytes is None or needed <= member.free_bytes


def _risk(members: Sequence[MirrorMember], rank: int) -> str:
    """Return a sentence about a member without a mirror on another machine."""
    member = members[rank]
    if all(other.machine == member.machine for other in members):
        lack = "there is no other machine"
    else:
        lack = f"no other machine has {format_size(member.trained_bytes)} free for it"
    return (
        f"what {member.name} trains has no mirror on another machine: {lack}. If {member.name} is lost, "
        "training goes back to the newest checkpoint"
    )
