"""Version chain: which blobs lead to the newest version, which are still needed, and what a mirror gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from barnraise.hub.protocol.messages import VersionStep
from barnraise.hub.rounds.leases import ActiveLease
from barnraise.hub.storage.log import CommittedRound, HubLog, LogReplica

_REPLICATED = ("founding", "layout", "course", "pool", "withdrawn-handovers")


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
    from_base = (base, *(version.step for version in versions[base_place + 1 :]))
    kept = versions[kept_from(versions) :]
    first = kept[0].number
    if after is None or not first <= after < head:
        return from_base
    deltas = tuple(version.step for version in kept if version.number > after)
    return deltas if sum(step.size for step in deltas) <= sum(step.size for step in from_base) else from_base


def named_blobs(versions: Sequence[CommittedRound]) -> set[str]:
    """Return the blobs that the versions still need."""
    names: set[str] = set()
    if versions:
        for version in versions[kept_from(versions) :]:
            names |= {version.step.sha256, (version.base or version.step).sha256}
        head = versions[-1]
        names |= {name for name in (head.momentum, head.feedback) if name is not None}
    return names


def shared_blobs(versions: Sequence[CommittedRound], code: Set[str]) -> list[str]:
    """Return the blobs that members fetch, newest first. The outer optimizer's state is for mirrors only."""
    names = []
    if versions:
        for version in reversed(versions[kept_from(versions) :]):
            names += [version.step.sha256, *([version.base.sha256] if version.base is not None else [])]
    return list(dict.fromkeys([*names, *sorted(code)]))


def replica_of(log: HubLog, after: int | None) -> LogReplica:
    """Return the replica for a mirror. Pending updates become leases, so that their samples return."""
    snapshot, grants = log.read_with_grants()
    first = kept_from(snapshot.versions) if snapshot.versions else 0
    waiting = [
        ActiveLease(
            arrival.update.lease, arrival.update.node, arrival.update.version, arrival.spans, 1.0, 0.0, 0.0
        )
        for arrival in snapshot.arrivals
    ]
    return LogReplica(
        facts={name: snapshot.facts[name] for name in _REPLICATED if name in snapshot.facts},
        members=tuple(snapshot.members.values()),
        grants=grants,
        leases=(*snapshot.leases, *waiting),
        versions=tuple(
            version for version in snapshot.versions[first:] if after is None or version.number > after
        ),
        seen=snapshot.seen,
    )
