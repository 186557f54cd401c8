"""Layout of a device mesh for FSDP2: which ranks share the shards, and which hold replicas. Pure.

Sharding moves the parameters in every step, and replicas only sum gradients. So the shard groups are the
smallest ones that have enough memory, and their ranks have the fastest links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from barnraise.core.errors import RunError
from barnraise.core.units import format_size

Groups = tuple[tuple[int, ...], ...]

_MOST_SEARCHED = 8  # machines; more of them are taken in their order


class MeshRank(NamedTuple):
    """A rank of the mesh: its machine, and the memory that it can use (0: unknown)."""

    machine: str
    memory_bytes: int = 0


class MeshLayout(NamedTuple):
    """Shard groups of equal size; ranks in the same place of them hold the same shard.

    ``why``: the reason, as a sentence.
    """

    shard_groups: Groups
    why: str


class StepTraffic(NamedTuple):
    """Bytes that a rank receives in a step: within its shard group, and from other groups."""

    sharded: float
    replicated: float


def choose_mesh(ranks: Sequence[MeshRank], mbps: Mapping[frozenset[str], float], needs: int) -> MeshLayout:
    """Return the smallest shard groups that have the memory for ``needs`` bytes of state.

    ``mbps``: measured rates between machines. With ``needs`` 0, a shard group is a machine if all machines
    have the same number of several ranks, and all ranks otherwise.
    """
    by_machine: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        by_machine.setdefault(rank.machine, []).append(number)
    rooms = list(by_machine.values())
    if not needs:
        is_even = len(rooms) > 1 and len({len(room) for room in rooms}) == 1 and len(rooms[0]) > 1
        groups = tuple(map(tuple, rooms)) if is_even else (tuple(range(len(ranks))),)
        return MeshLayout(groups, _describe(groups, ranks, mbps))
    for size in range(1, len(ranks) + 1):
        groups = _groups_of(size, rooms, ranks, mbps)
        if groups and all(_has_memory(group, ranks, needs) for group in groups):
            return MeshLayout(groups, _describe(groups, ranks, mbps))
    total = sum(rank.memory_bytes for rank in ranks)
    raise RunError(
        f"{format_size(needs)} of state do not fit into the {format_size(total)} of all ranks together",
        hint="Add a machine, or take a smaller model.",
    )


def traffic_of_step(groups: int, size: int, parameter_bytes: int, gradient_bytes: int) -> StepTraffic:
    """Return what a rank receives in a step with one forward and one backward pass.

    The parameters are gathered for both passes, and the gradients are scattered. Then the groups sum their
    shards of the gradients, by a ring.
    """
    others = (size - 1) / size
    sharded = others * (2 * parameter_bytes + gradient_bytes)
    return StepTraffic(sharded, 2 * (groups - 1) / groups * gradient_bytes / size)


def _groups_of(
    size: int, rooms: Sequence[Sequence[int]], ranks: Sequence[MeshRank], mbps: Mapping[frozenset[str], float]
) -> Groups:
    """Return groups of this size, each within a machine or of whole machines; empty if there are none."""
    if all(len(room) % size == 0 for room in rooms):
        return tuple(tuple(room[at : at + size]) for room in rooms for at in range(0, len(room), size))
    if len({len(room) for room in rooms}) > 1:  # only all ranks together form groups of equal size
        return (tuple(range(len(ranks))),) if size == len(ranks) else ()
    machines, rest = divmod(size, len(rooms[0]))
    if rest or len(rooms) % machines:
        return ()

    def slowest(partition: Sequence[Sequence[int]]) -> float:
        names = [[ranks[rooms[room][0]].machine for room in part] for part in partition]
        pairs = [frozenset(pair) for part in names for pair in combinations(part, 2)]
        return min((mbps.get(pair, 0.0) for pair in pairs), default=0.0)

    best = _best_partition(len(rooms), machines, slowest)
    return tuple(tuple(rank for room in part for rank in rooms[room]) for part in best)


def _best_partition(
    count: int, size: int, rate: Callable[[Sequence[Sequence[int]]], float]
) -> Sequence[Sequence[int]]:
    if count > _MOST_SEARCHED:
        return [range(at, at + size) for at in range(0, count, size)]
    return max(_partitions(tuple(range(count)), size), key=rate)  # the first of equal ones


def _partitions(members: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not members:
        yield ()
        return
    for others in combinations(members[1:], size - 1):
        rest = tuple(member for member in members[1:] if member not in others)
        for parts in _partitions(rest, size):
            yield ((members[0], *others), *parts)


def _has_memory(group: Sequence[int], ranks: Sequence[MeshRank], needs: int) -> bool:
    """Tell whether each rank has memory for its shard. A rank whose memory is unknown is taken to have it."""
    share = needs / len(group)
    return all(not ranks[rank].memory_bytes or share <= ranks[rank].memory_bytes for rank in group)


def _describe(groups: Groups, ranks: Sequence[MeshRank], mbps: Mapping[frozenset[str], float]) -> str:
    size, count = len(groups[0]), len(groups)
    machines = {ranks[rank].machine for rank in groups[0]}
    if size == 1:
        return f"each of {count} ranks holds the whole state, because it fits; only gradients travel"
    between = "" if count == 1 else f"; {count} groups of them hold replicas and sum their gradients"
    if len(machines) == 1:
        return f"{size} ranks of one machine share the shards{between}"
    pairs = [
        frozenset(pair)
        for group in groups
        for pair in combinations(sorted({ranks[rank].machine for rank in group}), 2)
    ]
    rates = [mbps[pair] for pair in pairs if pair in mbps]
    over = f", whose slowest measured link has {min(rates):.0f} Mbit/s" if rates else ""
    return f"{size} ranks on {len(machines)} machines share the shards{over}{between}"
