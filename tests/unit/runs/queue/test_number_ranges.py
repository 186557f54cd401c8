"""A set of numbers as ranges says the same as a set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from barnraise.runs.queue.number_ranges import NumberRanges


@given(st.lists(st.integers(1, 30)))
def test_ranges_have_the_added_numbers_and_no_others(numbers: list[int]) -> None:
    ranges = NumberRanges()
    for number in numbers:
        ranges.add(number)
    assert [number for number in range(32) if number in ranges] == sorted(set(numbers))
    rows = list(ranges)
    assert all(first <= last for first, last in rows)
    assert all(earlier[1] + 1 < later[0] for earlier, later in pairwise(rows)), "they are merged"
    assert list(NumberRanges(rows)) == rows


@given(st.sets(st.integers(1, 30)), st.integers(1, 40))
def test_newest_numbers_are_the_highest(numbers: set[int], count: int) -> None:
    ranges = NumberRanges()
    for number in numbers:
        ranges.add(number)
    assert ranges.newest(count) == sorted(numbers, reverse=True)[:count]


def test_numbers_that_follow_each_other_are_one_range() -> None:
    ranges = NumberRanges([(5, 9)])
    for number in (10, 3, 4):
        ranges.add(number)
    assert list(ranges) == [(3, 10)]
