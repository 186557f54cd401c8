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
