"""Which blobs bring a member to the head, which are still needed, and what a mirror needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from barnraise.hub.protocol.messages import VersionStep
from barnraise.hub.rounds.leases import ActiveLease
from barnraise.hub.storage.log import CommittedRound, HubLog, LogReplica

_REPLICATED = ("founding", "layout", "course", "pool")


def last_base(versions: Sequence[CommittedRound]) -> int:
    """Its place in the sequence."""
    return next(_bases(versions))


def kept_from(versions: Sequence[CommittedRound]) -> int:
    """The place from which on blobs are kept: the base before the last one, so that those who are a little
    behind need no whole state."""
    bases = _bases(versions)
    last = next(bases)
    return next(bases, last)


def _bases(versions: Sequence[CommittedRound]) -> Iterator[int]:
    """Their places, the last one first: nobody looks through all versions of a year for each question."""
    return (place for place in reversed(range(len(versions))) if versions[place].base is not None)


def steps_after(versions: Sequence[CommittedRound], after: int | None) -> tuple[VersionStep, ...]:
    """From a version, or from nothing. Deltas if they are there and no larger than a whole state."""
    head = versions[-1].number
    if after == head:
        return ()
    base_place = last_base(versions)
    base = versions[base_place].base
    assert base is not None
    anew = (base, *(one.step for one in versions[base_place + 1 :]))
    kept = versions[kept_from(versions) :]
    first = kept[0].number
    if after is None or not first <= after < head:
        return anew
    deltas = tuple(one.step for one in kept if one.number > after)
    return deltas if sum(one.size for one in deltas) <= sum(one.size for one in anew) else anew


def named_blobs(versions: Sequence[CommittedRound]) -> set[str]:
    """What the chain still needs."""
    names: set[str] = set()
    if versions:
        for one in versions[kept_from(versions) :]:
            names |= {one.step.sha256, (one.base or one.step).sha256}
        head = versions[-1]
        names |= {name for name in (head.momentum, head.feedback) if name is not None}
    return names


def shared_blobs(versions: Sequence[CommittedRound], code: Set[str]) -> list[str]:
    """What members fetch, the newest first. What the outer optimizer remembers is for mirrors alone."""
    names = []
    if versions:
        for one in reversed(versions[kept_from(versions) :]):
            names += [one.step.sha256, *([one.base.sha256] if one.base is not None else [])]
    return list(dict.fromkeys([*names, *sorted(code)]))


def replica_of(log: HubLog, after: int | None) -> LogReplica:
    """What a mirror takes over. Updates that wait become leases, so that their samples return."""
    found, grants = log.read_with_grants()
    first = kept_from(found.versions) if found.versions else 0
    waiting = [
        ActiveLease(one.update.lease, one.update.node, one.update.version, one.spans, 1.0, 0.0, 0.0)
        for one in found.arrivals
    ]
    return LogReplica(
        facts={name: found.facts[name] for name in _REPLICATED if name in found.facts},
        members=tuple(found.members.values()),
        grants=grants,
        leases=(*found.leases, *waiting),
        versions=tuple(one for one in found.versions[first:] if after is None or one.number > after),
        seen=found.seen,
    )
