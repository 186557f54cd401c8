"""Update checks: each kind of bad update is refused with its name, and honest updates pass."""

from __future__ import annotations

import msgspec
import numpy
import pytest

from barnraise.hub.aggregation.update_checks import (
    SKETCH,
    UpdateVerdict,
    after_acceptance,
    after_refusal,
    clip_scale,
    confirmed_norms,
    judge_copy,
    judge_norm,
    judge_round,
    learned_norm,
    median_norm,
    needs_sketches,
    replace_norms,
    trusted_merge_count,
)
from barnraise.hub.protocol.messages import RoundConfig
from barnraise.hub.rounds.leases import PendingUpdate
from barnraise.hub.storage.log import AcceptedUpdate, Contribution, MemberRecord, UpdateFingerprint

TERMS = RoundConfig()
RANDOM = numpy.random.default_rng(5)
DIRECTION = RANDOM.normal(size=SKETCH).astype(numpy.float32)


def _seen(node: str, sketch: numpy.ndarray, norm: float = 1.0, sha256: str = "") -> UpdateFingerprint:
    return UpdateFingerprint(
        node=node, lease="", sha256=sha256 or node, norm=norm, sketch=sketch.astype("<f4").tobytes()
    )


def _arrival(name: str, norm: float = 1.0, merged: int = 1) -> AcceptedUpdate:
    return AcceptedUpdate(
        update=PendingUpdate(name, name, "lease", 0, 10),
        sha256=name,
        size=1,
        spans=(),
        norm=norm,
        scale=1.0,
        merged=merged,
    )


def _honest(noise: float = 0.7) -> numpy.ndarray:
    return DIRECTION + RANDOM.normal(size=SKETCH) * noise


def test_large_norms_are_clipped_then_refused() -> None:
    assert median_norm([_seen("a", DIRECTION)] * 2) is None
    median = median_norm([_seen("a", DIRECTION, norm) for norm in (1.0, 2.0, 300.0)])
    assert median == 2.0
    assert judge_norm(5.9, median, TERMS).scale == 1.0
    clipped = judge_norm(8.0, median, TERMS)
    assert (clipped.kind, clipped.scale) == ("", 0.75)
    assert judge_norm(20.1, median, TERMS).kind == "norm"
    assert judge_norm(1e9, None, TERMS) == UpdateVerdict(), "two norms do not show which is right"


def test_running_median_only_clips_and_is_learned_again() -> None:
    seen = [_seen("a", DIRECTION) for _ in range(30)]
    scales = []
    for _ in range(40):
        usual = median_norm(seen)
        scales.append(clip_scale(8.0, usual, TERMS))
        seen.append(_seen("a", DIRECTION, learned_norm(8.0, usual, TERMS)))
    assert scales[0] == 3 / 8
    assert scales[-1] == 1.0
    assert learned_norm(1e9, 1.0, TERMS) == TERMS.refuse_over


def test_round_with_all_norms_grown_is_accepted() -> None:
    arrivals = [_arrival(f"n{number}", norm=100.0 + number) for number in range(5)]
    assert judge_round(arrivals, frozenset(), TERMS) == {}
    clipped = [msgspec.structs.replace(arrival, scale=scale) for arrival in arrivals for scale in (0.5, 0.1)]
    assert judge_round(clipped[::2], frozenset(), TERMS) == {}, "less than by the running median alone"
    assert {verdict.scale for verdict in judge_round(clipped[1::2], frozenset(), TERMS).values()} == {
        0.1 * 10 / 3
    }
    assert {verdict.scale for verdict in judge_round(clipped[1:4:2], frozenset(), TERMS).values()} == {0.1}, (
        "two alone"
    )
    arrivals.append(_arrival("large", norm=5000.0))
    assert judge_round(arrivals, frozenset(), TERMS)["large"].kind == "norm"


def test_copied_updates_are_refused_as_copies() -> None:
    earlier = [_seen("a", DIRECTION, sha256="x"), _seen("b", _honest())]
    sketch = DIRECTION.tobytes()
    assert judge_copy("c", "x", b"", earlier).kind == "copy"
    assert judge_copy("a", "x", b"", earlier).kind == "copy", "one's own update, a second time"
    assert judge_copy("c", "y", sketch, earlier).kind == "copy"
    assert judge_copy("c", "y", (-3 * DIRECTION).tobytes(), earlier).kind == "copy", "scaled and turned round"
    assert judge_copy("a", "y", sketch, earlier).kind == "", "a member may agree with itself"
    assert judge_copy("c", "y", _honest().astype("<f4").tobytes(), earlier).kind == ""
    assert judge_copy("c", "y", b"", earlier).kind == "", "a small model has no sketch"


def _judged(
    sketches: dict[str, numpy.ndarray], strangers: frozenset[str], norms: dict[str, float] | None = None
) -> dict[str, UpdateVerdict]:
    arrivals = [_arrival(name, norm=(norms or {}).get(name, 1.0)) for name in sketches]
    return judge_round(arrivals, strangers, TERMS, sketches=sketches)


def test_strangers_are_judged_by_other_updates_of_round() -> None:
    sketches = {f"n{number}": _honest() for number in range(15)}
    sketches |= {f"flip{number}": -_honest() for number in range(3)}
    sketches |= {"random": RANDOM.normal(size=SKETCH), "large": _honest()}
    verdicts = _judged(sketches, frozenset(sketches), {"large": 100.0})
    assert {name: verdict.kind for name, verdict in verdicts.items()} == {
        **{f"flip{number}": "unlike" for number in range(3)},
        "random": "unlike",
        "large": "norm",
    }
    assert "against" in verdicts["flip0"].reason
    assert "unrelated" in verdicts["random"].reason
    friends = _judged(sketches, frozenset(), {"large": 100.0})
    assert set(friends) == {"large"}, "friends are believed in their direction"


def test_round_without_agreed_direction_keeps_all_updates() -> None:
    sketches = {f"n{number}": RANDOM.normal(size=SKETCH) for number in range(10)}
    assert _judged(sketches, frozenset(sketches)) == {}


def test_stranger_that_repeats_update_of_same_round_is_refused() -> None:
    first, second = _honest(), _honest()
    sketches = {"eve": 2 * first, "friend": first, "mallory": second, "mallory2": -second}
    verdicts = _judged(sketches, frozenset({"eve", "mallory", "mallory2"}))
    assert {name: verdict.kind for name, verdict in verdicts.items()} == {"eve": "copy", "mallory2": "copy"}
    assert _judged(sketches, frozenset()) == {}, "friends' updates were compared when they arrived"


def test_sketches_are_needed_only_beside_stranger() -> None:
    arrivals = [_arrival("friend"), _arrival("eve")]
    assert needs_sketches(arrivals, frozenset({"eve"}))
    assert not needs_sketches(arrivals, frozenset({"mallory"})), "no stranger takes part"
    assert not needs_sketches(arrivals[1:], frozenset({"eve"})), "there is nothing to compare with"


NORMS = {"friend": 1.5, "owner": 1.0, "eve": 1e6, "mallory": 1e6}


@pytest.mark.parametrize(
    ("here", "strangers", "counts"),
    [
        ("friend eve", "eve", {"friend": 1.5, "eve": 1.5}),
        ("friend owner eve", "eve", {"friend": 1.5, "owner": 1.0}),
        ("friend eve mallory", "eve mallory", {"friend": 1.5, "eve": 1.5, "mallory": 1.5}),
        ("friend owner eve", "friend owner eve", {"friend": 1.5, "owner": 1.0}),
        ("eve", "eve", {}),
        ("eve mallory", "eve mallory", {}),
    ],
)
def test_stranger_without_known_median_is_clipped_to_friend(
    here: str, strangers: str, counts: dict[str, float]
) -> None:
    arrivals = [_arrival(name, NORMS[name]) for name in here.split()]
    verdicts = judge_round(arrivals, frozenset(strangers.split()), TERMS)
    verdict_by_name = {name: verdicts.get(name, UpdateVerdict()) for name in here.split()}
    counted = {
        name: NORMS[name] * verdict.scale for name, verdict in verdict_by_name.items() if not verdict.kind
    }
    assert counted == pytest.approx(counts)
    assert not {verdict.kind for verdict in verdict_by_name.values()} - {"", "norm", "incomparable"}


@pytest.mark.parametrize("order", ["small large eve", "eve large small", "large eve small"])
def test_stranger_beside_several_friends_is_clipped_to_smallest(order: str) -> None:
    """No norm is usual yet, and the friends' updates are of different length."""
    norms = {"small": 1.0, "large": 2.5, "eve": 2.0}
    arrivals = [_arrival(name, norms[name]) for name in order.split()]
    verdicts = judge_round(arrivals, frozenset({"eve"}), TERMS)
    assert set(verdicts) == {"eve"}
    assert verdicts["eve"].scale * norms["eve"] == pytest.approx(1.0)


def test_stranger_beside_region_means_is_clipped_to_single_update_norm() -> None:
    """A region's mean of 100 updates is up to ten times shorter than one of them."""
    arrivals = [
        _arrival("region", 0.3, merged=100),
        _arrival("friend", 4.0),
        _arrival("eve", 6.0),
    ]
    verdict = judge_round(arrivals, frozenset({"eve"}), TERMS)["eve"]
    assert (verdict.kind, verdict.scale * 6.0) == ("", pytest.approx(3.0))


def test_stranger_before_median_was_known_is_clipped_to_median() -> None:
    seen = [_seen(f"n{number}", DIRECTION) for number in range(3)]
    verdict = judge_round([_arrival("eve", 1e6)], frozenset({"eve"}), TERMS, seen)["eve"]
    assert (verdict.kind, verdict.scale * 1e6) == ("", pytest.approx(TERMS.clip_over))


def test_stranger_norms_are_learned_only_if_confirmed() -> None:
    unconfirmed = [_seen("eve", DIRECTION, 0.0, sha256=name) for name in ("x", "y", "z")]
    assert median_norm(unconfirmed) is None
    arrivals = [_arrival(name, 4.0) for name in ("ann", "bob", "eve")]
    parts = [_part("ann", 1.0), _part("eve", 0.5)]
    assert confirmed_norms(arrivals, parts, frozenset({"eve"})) == {"eve": 2.0}
    assert confirmed_norms(arrivals[1:], parts[1:], frozenset({"eve"})) == {}, (
        "two norms do not show which is right"
    )
    seen = replace_norms([_seen("eve", DIRECTION, 0.0)], {"eve": 2.0})
    assert [update.norm for update in seen] == [2.0]


def _part(name: str, scale: float) -> Contribution:
    return Contribution(
        node=name, lease="", samples=1, spans=(), behind=0, weight=1.0, scale=scale, sha256=name
    )


@pytest.mark.parametrize("agreed", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("regions", "leaves"), [(2, 1), (3, 1), (1, 2), (1, 3), (3, 3), (0, 3), (3, 0)])
def test_regions_and_direct_members_in_one_round_all_count(regions: int, leaves: int, agreed: float) -> None:
    """Each region sends the mean of n updates of norm 1 whose cosine is ``agreed``."""

    def norm(merged: int) -> float:
        return (1 / merged + (1 - 1 / merged) * agreed) ** 0.5

    sizes = [200, 500, 1000][:regions] + [1] * leaves
    arrivals = [_arrival(f"n{place}", norm(size), size) for place, size in enumerate(sizes)]
    assert judge_round(arrivals, frozenset(), TERMS) == {}
    seen = [
        msgspec.structs.replace(_seen("a", DIRECTION, arrival.norm), merged=arrival.merged)
        for arrival in arrivals
    ]
    for size in (1, 500):
        usual = median_norm(seen, size)
        assert clip_scale(norm(size), usual, TERMS) == 1.0
    if len(arrivals) > 2:
        for size in (1, 500):
            large = _arrival("large", 400.0, size)
            assert judge_round([*arrivals, large], frozenset(), TERMS)["large"].kind == "norm"


def test_merge_count_claimed_by_stranger_is_ignored() -> None:
    assert trusted_merge_count("region", 40, 1000) == trusted_merge_count("friend", 40, 1000) == 40
    assert trusted_merge_count("stranger", 40, 1000) == 1
    assert trusted_merge_count("region", 1 << 30, 1000) == 1000


def test_quarantine_follows_counted_refusals() -> None:
    member = MemberRecord(node="a", name="ann", role="friend", since=0.0)
    for kind in ("stale", "rate", "digest"):
        assert after_refusal(member, kind, "late", TERMS) == member
    for _ in range(2):
        member = after_refusal(member, "not-finite", "it is not finite", TERMS)
    assert not member.quarantine
    for _ in range(10):
        member = after_acceptance(member, 5)
    assert (member.refusals, member.accepted, member.samples) == (1, 10, 50)
    for _ in range(2):
        member = after_refusal(member, "norm", "too large", TERMS)
    assert "too large" in member.quarantine
    owner = MemberRecord(node="o", name="owner", role="owner", since=0.0)
    for _ in range(9):
        owner = after_refusal(owner, "norm", "too large", TERMS)
    assert not owner.quarantine
