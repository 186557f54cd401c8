"""Placement of mirrors on the machines of a group."""

from __future__ import annotations

import itertools

from barnraise.planning.split.mirror_placement import MirrorMember, place_mirrors

GIB = 1 << 30


def group(machines: str, trained: int = 1, free: int | None = None) -> list[MirrorMember]:
    return [MirrorMember(f"{rank} on {name}", name, trained, free) for rank, name in enumerate(machines)]


def test_equal_machines_form_a_ring() -> None:
    assert place_mirrors(group("abc")) == ((1, 2, 0), (None, None, None), ())
    assert place_mirrors(group("a")) == ((None,), (None,), ())


def test_last_stage_is_mirrored_by_its_neighbour() -> None:
    """The machine before the last one takes over its blocks, and has their state."""
    next_to = {0: {1}, 1: {0, 2}, 2: {1}}
    members = [
        each._replace(neighbours=frozenset(next_to[rank])) for rank, each in enumerate(group("abc", free=3))
    ]
    assert place_mirrors(members).mirrors == (1, 2, 1)
    full = [members[0], members[1]._replace(free_bytes=1), members[2]]
    assert place_mirrors(full).mirrors == (1, 2, 0), "memory counts more"


def test_any_machine_may_be_lost_if_there_are_two() -> None:
    for machines in itertools.product("abc", repeat=5):
        members = group("".join(machines))
        mirrors = place_mirrors(members).mirrors
        for rank, mirror in enumerate(mirrors):
            if len(set(machines)) > 1:
                assert mirror is not None
                assert machines[mirror] != machines[rank]


def test_workers_of_one_machine_are_mirrored_by_the_other_one() -> None:
    placement = place_mirrors(group("aab"))
    assert placement.mirrors == (2, 2, 0)
    assert placement.mirrored_by(2) == [0, 1]
    assert placement.mirrored_by(1) == []


def test_mirrors_are_spread_over_the_machines() -> None:
    mirrors = place_mirrors(group("aabbcc")).mirrors
    assert sorted(mirror for mirror in mirrors if mirror is not None) == list(range(6))


def test_machine_without_memory_mirrors_nothing() -> None:
    members = [
        MirrorMember("mac", "m", 2 * GIB, 4 * GIB),
        MirrorMember("box", "b", GIB, GIB // 2),
        MirrorMember("pc", "p", GIB, 8 * GIB),
    ]
    placement = place_mirrors(members)
    assert placement.mirrors == (2, 0, 0)
    assert placement.free_bytes == (2 * GIB, GIB // 2, 6 * GIB)
    assert placement.why == ()


def test_missing_second_machine_is_named() -> None:
    placement = place_mirrors(group("aa"))
    assert placement.mirrors == (1, 0)
    assert placement.why[0].startswith(
        "what 0 on a trains has no mirror on another machine: there is no other"
    )
    members = [MirrorMember("mac", "m", 2 * GIB, 0), MirrorMember("box", "b", GIB, GIB)]
    placement = place_mirrors(members)
    assert placement.mirrors == (None, None)
    assert "no other machine has 2 GiB free for it" in placement.why[0]
    assert "newest checkpoint" in placement.why[1]


def test_member_that_trains_nothing_needs_no_mirror() -> None:
    members = [MirrorMember("mac", "m", 5), MirrorMember("box", "b", 0), MirrorMember("pc", "m", 5)]
    assert place_mirrors(members).mirrors == (1, None, 1)


def replicas(machines: str) -> list[MirrorMember]:
    """Return members that all train the same."""
    return [MirrorMember(name, name, 1, None, frozenset(range(4))) for name in machines]


def test_replicas_on_other_machines_are_mirrors() -> None:
    assert place_mirrors(replicas("abc")) == ((None, None, None), (None, None, None), ())
    halves = {"b": {0, 1}, "c": {2, 3}}
    pipeline = [MirrorMember(name, name, 1, None, frozenset(units)) for name, units in halves.items()]
    assert place_mirrors([*replicas("a"), *pipeline]).mirrors == (None, None, None)


def test_replicas_on_one_machine_have_one_mirror_on_another_one() -> None:
    placement = place_mirrors([*replicas("aa"), MirrorMember("b", "b", 0)])
    assert placement.mirrors == (2, None, None)
    assert placement.why == ()
    lonely = place_mirrors(replicas("aa"))
    assert lonely.mirrors == (None, None), "a second copy on the same machine helps nothing"
    assert len(lonely.why) == 1
