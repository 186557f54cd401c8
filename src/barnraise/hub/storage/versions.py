"""Version chain: which blobs lead to the newest version, which are still needed, and what a mirror gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from barnraise.hub.protocol.messages import VersionStep
from barnraise.hub.rounds.leases import ActiveLease
from barnraise.hub.storage.log import CommittedRound, HubLog, LogReplica

_REPLICATED = ("founding", "layout", "course", "pool")


def last_base(versions: Sequence[CommittedRound]) -> int:
    """Return the index of the last version with a base."""
    return next(_bases(versions))


def kept_from(versions: Sequence[CommittedRound]) -> int:
    """Return the index from which blobs are kept: the base before the last one, so that members a little
    behind need only deltas."""
    bases = _bases(versions)
    last = next(bases)
    return next(bases, last)


def _bases(versions: Sequence[CommittedRound]) -> Iterator[int]:
    """Yield the indexes of versions with a base, last first.

    A caller that stops early does not scan all versions.
    """
    return (place for place in reversed(range(len(versions))) if versions[place].base is not None)


def steps_after(versions: Sequence[CommittedRound], after: int | None) -> tuple[VersionStep, ...]:
    """Return the steps from a version, or from nothing: deltas if they exist and are smaller than a base."""
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
    """Return the blobs that the versions still need."""
    names: set[str] = set()
    if versions:
        for one in versions[kept_from(versions) :]:
            names |= {one.step.sha256, (one.base or one.step).sha256}
        head = versions[-1]
        names |= {name for name in (head.momentum, head.feedback) if name is not None}
    return names


def shared_blobs(versions: Sequence[CommittedRound], code: Set[str]) -> list[str]:
    """Return the blobs that members fetch, newest first. The outer optimizer's state is for mirrors only."""
    names = []
    if versions:
        for one in reversed(versions[kept_from(versions) :]):
            names += [one.step.sha256, *([one.base.sha256] if one.base is not None else [])]
    return list(dict.fromkeys([*names, *sorted(code)]))


def replica_of(log: HubLog, after: int | None) -> LogReplica:
    """Return the replica for a mirror. Pending updates become leases, so that their samples return."""
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
