"""Update checks for robust aggregation. Pure: figures in, a verdict with its reason out.

Two figures describe an update. Its norm per square root of a sample is compared with the running median and
with the other updates of the round. Its sketch, a linear projection under a secret key (`update_figures`),
shows the angle between updates. Both are cheap for any model size.

All norms may grow at once: a learning rate warm-up makes updates ten times larger within a round. So the
running median only clips an update, less so if the round has other updates, and it is learned again. Only an
update that differs from its round is refused.

A region sends the mean of ``merged`` updates. If they agree, the mean is as long as one of them. If they are
unrelated, it is shorter by the square root of their number. All means of a round share this, so a mean of
more updates bounds the norm of one of fewer.

Strangers do not change the running median before other updates of their round confirm their norms. Until a
median is known, their updates are clipped to a friend's norm, or wait for enough others
(`leases.can_be_compared`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from barnraise.hub.protocol.messages import Role, RoundConfig
from barnraise.hub.rounds.leases import LEAST_NORMS
from barnraise.hub.storage.log import AcceptedUpdate, Contribution, MemberRecord, UpdateFingerprint

if TYPE_CHECKING:
    import numpy  # at runtime only where it is used: a hub answers before it is loaded

SKETCH = 1024  # numbers
_WINDOW = 32  # norms that make the running median
_WORSE = 0.1  # of the loss
_COPY = 0.999  # cosine
_COMPARED = 32  # earlier sketches at once: a copy of all would take megabytes in each thread
_LEAST_VOTES = 5  # updates of a round that can tell one of them apart
_AGREED = 0.3  # median cosine to the middle of a round from which on there is a direction at all
_UNLIKE = 0.2  # of that median
_FORGIVING = 10  # accepted updates take one refusal away
COUNTED = frozenset({"size", "schema", "not-finite", "norm", "copy", "unlike", "held-out", "forged"})

Sketch: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.float32]]"


class UpdateVerdict(NamedTuple):
    """Verdict on an update. ``kind`` is empty if the update may count; it is multiplied by ``scale`` then."""

    kind: str = ""
    reason: str = ""
    scale: float = 1.0


def median_norm(seen: Sequence[UpdateFingerprint], merged: int = 1) -> float | None:
    """Return the running median norm, for a mean of ``merged`` updates; None while too few are known."""
    known = [fingerprint for fingerprint in seen if fingerprint.norm > 0][-_WINDOW:]
    return _median(known, merged)


def _median(others: Sequence[AcceptedUpdate | UpdateFingerprint], merged: int) -> float | None:
    norms = [_max_norm(other, merged) for other in others]
    return statistics.median(norms) if len(norms) >= LEAST_NORMS else None


def _max_norm(other: AcceptedUpdate | UpdateFingerprint, merged: int) -> float:
    """Return the maximum norm of a mean of ``merged`` updates, given the norm of another update."""
    return other.norm * math.sqrt(max(1.0, other.merged / merged))


def trusted_merge_count(role: Role, claimed: int, samples: int) -> int:
    """Return how many updates an update was merged from.

    A stranger's claim would only loosen the check, so it counts as one.
    """
    return 1 if role == "stranger" else max(1, min(claimed, samples))


def clip_scale(norm: float, median: float | None, terms: RoundConfig) -> float:
    """Return the factor that clips an update. Both norms are per square root of a sample."""
    max_norm = terms.clip_over * median if median else norm
    return max_norm / norm if norm > max_norm else 1.0


def learned_norm(norm: float, median: float | None, terms: RoundConfig) -> float:
    """Return the norm to remember for the running median, limited so that one update cannot move it far."""
    return min(norm, terms.refuse_over * median) if median else norm


def judge_norm(norm: float, median: float | None, terms: RoundConfig) -> UpdateVerdict:
    """Judge an update by the median norm of its round."""
    if median and norm > terms.refuse_over * median:
        reason = (
            f"its norm is {norm / median:.3g} times the round's median, the limit is {terms.refuse_over:g}"
        )
        return UpdateVerdict("norm", reason, 0.0)
    return UpdateVerdict(scale=clip_scale(norm, median, terms))


def judge_copy(node: str, sha256: str, sketch: bytes, earlier: Sequence[UpdateFingerprint]) -> UpdateVerdict:
    """Judge whether an update repeats an earlier one of another member.

    Sketches of small models cannot tell copies from agreement.
    """
    if any(fingerprint.sha256 == sha256 for fingerprint in earlier):
        return UpdateVerdict("copy", "the same bytes were sent before")
    others = [
        fingerprint.sketch
        for fingerprint in earlier
        if fingerprint.node != node and len(fingerprint.sketch) == len(sketch)
    ]
    if sketch and others and _repeats(sketch, others):
        return UpdateVerdict("copy", "it points in the direction of another member's earlier update")
    return UpdateVerdict()


def _repeats(sketch: bytes, others: Sequence[bytes]) -> bool:
    """Return True if a sketch has the direction of another one, or the opposite one."""
    import numpy

    own = numpy.frombuffer(sketch, dtype="<f4")
    length = numpy.linalg.norm(own)
    for first in range(0, len(others), _COMPARED):
        some = others[first : first + _COMPARED]
        table = numpy.frombuffer(b"".join(some), dtype="<f4").reshape(len(some), -1)
        if bool((numpy.abs(table @ own) > _COPY * numpy.linalg.norm(table, axis=1) * length).any()):
            return True
    return False


def judge_held_out(now: float, alone: float | None) -> UpdateVerdict:
    """Judge an update by the loss on held-out samples: of the model now, and with this update alone (None:
    not finite).

    One member's model may be a little worse than the merged one, and often is late in a run.
    """
    if alone is None:
        return UpdateVerdict("held-out", "with it, the loss on the hub's own samples is not a finite number")
    if alone > now + _WORSE * abs(now):
        return UpdateVerdict(
            "held-out", f"with it, the loss on the hub's own samples is {alone:.4g} instead of {now:.4g}"
        )
    return UpdateVerdict()


def judge_round(
    arrivals: Sequence[AcceptedUpdate],
    strangers: frozenset[str],
    terms: RoundConfig,
    seen: Sequence[UpdateFingerprint] = (),
    sketches: Mapping[str, Sketch] | None = None,
) -> dict[str, UpdateVerdict]:
    """Judge all updates of a round together.

    Return the verdicts on those that differ from the others, by update.

    Only strangers are judged by direction, and only if enough other updates agree on one. ``sketches``: of
    all updates, under a key that was drawn after the last of them arrived.
    """
    merge_counts = {arrival.merged for arrival in arrivals}
    medians = {merged: _median(arrivals, merged) for merged in merge_counts}
    usual = {merged: median_norm(seen, merged) for merged in merge_counts}
    friends = [arrival for arrival in arrivals if arrival.update.node not in strangers]
    verdicts: dict[str, UpdateVerdict] = {}
    for arrival in arrivals:
        verdict = _judge_size(arrival, medians[arrival.merged], terms)
        if arrival.update.node in strangers:
            verdict = _judge_stranger(
                arrival, verdict, medians[arrival.merged], usual[arrival.merged], friends, terms
            )
        if verdict.kind or verdict.scale != 1.0:
            verdicts[arrival.update.id] = verdict
    directions = {name: _unit(sketch) for name, sketch in (sketches or {}).items()}
    judged = _judge_directions(arrivals, strangers, directions)
    return verdicts | judged | _judge_round_copies(arrivals, strangers, directions)


def needs_sketches(arrivals: Sequence[AcceptedUpdate], strangers: frozenset[str]) -> bool:
    """Tell whether `judge_round` would use sketches: a stranger takes part, and not alone."""
    return len(arrivals) > 1 and any(arrival.update.node in strangers for arrival in arrivals)


def _judge_size(arrival: AcceptedUpdate, median: float | None, terms: RoundConfig) -> UpdateVerdict:
    by_before = arrival.scale if median is None else arrival.scale * terms.refuse_over / terms.clip_over
    verdict = judge_norm(arrival.norm, median, terms)
    return verdict._replace(scale=min(verdict.scale, by_before))


def _judge_stranger(
    arrival: AcceptedUpdate,
    verdict: UpdateVerdict,
    median: float | None,
    usual: float | None,
    friends: Sequence[AcceptedUpdate],
    terms: RoundConfig,
) -> UpdateVerdict:
    """Limit a stranger's update by the running median, which may be known only since it arrived.

    Without one, use a friend's update or the median of the round. Alone, the update is refused.
    """
    if usual is not None:
        max_norm = usual * (terms.clip_over if median is None else terms.refuse_over)
    elif friends:
        max_norm = min(_max_norm(other, arrival.merged) for other in friends)
    elif median is not None:
        return verdict
    else:
        return UpdateVerdict("incomparable", "there is no other update yet to compare its norm with", 0.0)
    return (
        verdict._replace(scale=min(verdict.scale, max_norm / arrival.norm))
        if arrival.norm > max_norm
        else verdict
    )


def confirmed_norms(
    arrivals: Sequence[AcceptedUpdate], parts: Iterable[Contribution], strangers: frozenset[str]
) -> dict[str, float]:
    """Return the norms that strangers' updates add to the running median, by hash.

    There are none if the round had too few updates.
    """
    if len(arrivals) < LEAST_NORMS:
        return {}
    norms = {arrival.sha256: arrival.norm for arrival in arrivals}
    return {part.sha256: norms[part.sha256] * part.scale for part in parts if part.node in strangers}


def replace_norms(seen: Iterable[UpdateFingerprint], norms: Mapping[str, float]) -> list[UpdateFingerprint]:
    """Return the fingerprints with the norms of ``norms``, by hash."""
    return [
        msgspec.structs.replace(fingerprint, norm=norms[fingerprint.sha256])
        if fingerprint.sha256 in norms
        else fingerprint
        for fingerprint in seen
    ]


def _judge_directions(
    arrivals: Sequence[AcceptedUpdate], strangers: frozenset[str], directions: Mapping[str, Sketch]
) -> dict[str, UpdateVerdict]:
    verdicts: dict[str, UpdateVerdict] = {}
    if len(directions) < _LEAST_VOTES:
        return verdicts
    import numpy

    middle = _unit(numpy.median(numpy.stack(list(directions.values())), axis=0))
    angles = {name: float(direction @ middle) for name, direction in directions.items()}
    agreed = statistics.median(angles.values())
    for arrival in arrivals:
        angle = angles.get(arrival.update.id, agreed)
        if arrival.update.node in strangers and agreed > _AGREED and angle < _UNLIKE * agreed:
            way = "points against" if angle < -_UNLIKE * agreed else "is unrelated to"
            reason = f"it {way} the other updates of its round (cosine {angle:.2f}, the others' {agreed:.2f})"
            verdicts[arrival.update.id] = UpdateVerdict("unlike", reason, 0.0)
    return verdicts


def _judge_round_copies(
    arrivals: Sequence[AcceptedUpdate], strangers: frozenset[str], directions: Mapping[str, Sketch]
) -> dict[str, UpdateVerdict]:
    """Refuse a stranger's update that repeats a friend's one, or an earlier one, of the same round."""
    known = [arrival for arrival in arrivals if arrival.update.id in directions]
    if not known:
        return {}
    import numpy

    rows = numpy.stack([directions[arrival.update.id] for arrival in known])
    verdicts: dict[str, UpdateVerdict] = {}
    for place, arrival in enumerate(known):
        node = arrival.update.node
        if node not in strangers:
            continue
        others = [
            number
            for number, other in enumerate(known)
            if other.update.node != node and (number < place or other.update.node not in strangers)
        ]
        if bool((numpy.abs(rows[others] @ rows[place]) > _COPY).any()):
            reason = "it points in the direction of another member's update of the same round"
            verdicts[arrival.update.id] = UpdateVerdict("copy", reason, 0.0)
    return verdicts


def after_refusal(member: MemberRecord, kind: str, reason: str, terms: RoundConfig) -> MemberRecord:
    """Return the member after a refusal.

    Enough refusals of the counted kinds mean quarantine. The owner is exempt, because only the owner can end
    a quarantine.
    """
    if kind not in COUNTED or member.role == "owner":
        return member
    count = member.refusals + 1
    quarantine = member.quarantine
    if count >= terms.refusals and not quarantine:
        quarantine = f"{count} updates were refused, the last one: {reason}"
    return msgspec.structs.replace(member, refusals=count, quarantine=quarantine)


def after_acceptance(member: MemberRecord, samples: int) -> MemberRecord:
    """Return the member after an accepted update. Every tenth update cancels one refusal."""
    accepted = member.accepted + 1
    forgiven = 1 if accepted % _FORGIVING == 0 else 0
    return msgspec.structs.replace(
        member,
        accepted=accepted,
        samples=member.samples + samples,
        usual=samples,
        refusals=max(0, member.refusals - forgiven),
    )


def _unit(values: Sketch) -> Sketch:
    import numpy

    length = float(numpy.linalg.norm(values))
    return values / numpy.float32(length) if length > 0 else values


def member_names(members: Mapping[str, MemberRecord]) -> dict[str, str]:
    return {node: member.name for node, member in members.items()}


def stranger_nodes(members: Mapping[str, MemberRecord]) -> frozenset[str]:
    return frozenset(node for node, member in members.items() if member.role == "stranger")
