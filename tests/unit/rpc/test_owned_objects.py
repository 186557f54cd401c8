"""Objects live as long as their leases, and their destructors may do anything."""

from __future__ import annotations

import pytest

from barnraise.rpc.owned_objects import OwnedObjects


class Noticed:
    """Object whose destructor asks for the counts, as any code may that it runs."""

    def __init__(self, owner: OwnedObjects, ended: list[tuple[int, int]]) -> None:
        self.owner, self.ended = owner, ended

    def __del__(self) -> None:
        self.ended.append(self.owner.counts(0))


def test_object_is_dropped_with_its_last_lease() -> None:
    objects, ended = OwnedObjects(), []
    serial = objects.keep(Noticed(objects, ended), 1)
    assert serial is not None
    assert objects.lend(serial, 2) is None
    assert objects.counts(own_rank=1) == (1, 1)
    objects.release(serial, 1)
    assert ended == []
    objects.release(serial, 2)
    assert ended == [(0, 0)], "outside of the lock"
    assert objects.lend(serial, 2) is not None


def test_objects_of_a_lost_rank_are_dropped() -> None:
    objects, ended = OwnedObjects(), []
    for _ in range(3):
        objects.keep(Noticed(objects, ended), 1)
    kept = objects.keep("kept", 2)
    assert kept is not None
    objects.lose(1)
    assert len(ended) == 3
    assert objects.get(kept, 2) == "kept"
    assert objects.keep("late", 1) is None, "a lost rank gets nothing"


def test_object_is_given_to_holders_only() -> None:
    objects = OwnedObjects()
    serial = objects.keep("it", 1)
    assert serial is not None
    assert objects.holds(serial, 1)
    with pytest.raises(LookupError, match="rank 2 holds no reference"):
        objects.get(serial, 2)
    with pytest.raises(LookupError):
        objects.get(serial + 1, 1)


def test_clear_drops_everything_and_numbers_are_not_used_again() -> None:
    objects, ended = OwnedObjects(), []
    first = objects.keep(Noticed(objects, ended), 1)
    objects.clear()
    assert len(ended) == 1
    assert objects.keep("second", 1) != first
