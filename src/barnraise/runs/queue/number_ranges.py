"""Numbers of forgotten jobs, kept as ranges, because nearly all of them follow each other. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class NumberRanges:
    """Set of whole numbers, as ranges from a first to a last number."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        ordered = sorted(ranges)
        self._firsts = [first for first, _ in ordered]
        self._lasts = [last for _, last in ordered]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number)
        return place > 0 and number <= self._lasts[place - 1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def newest(self, count: int) -> list[int]:
        """Return the highest numbers, at most this many, the highest first."""
        numbers: list[int] = []
        for first, last in reversed(list(self)):
            numbers += range(last, max(first, last - (count - len(numbers)) + 1) - 1, -1)
            if len(numbers) >= count:
                break
        return numbers

    def add(self, number: int) -> None:
        """Add a number, and merge the ranges that it connects."""
        if number in self:
            return
        place = bisect_right(self._firsts, number)
        follows = place > 0 and self._lasts[place - 1] == number - 1
        precedes = place < len(self._firsts) and self._firsts[place] == number + 1
        if follows and precedes:
            del self._firsts[place]
            del self._lasts[place - 1]
        elif follows:
            self._lasts[place - 1] = number
        elif precedes:
            self._firsts[place] = number
        else:
            self._firsts.insert(place, number)
            self._lasts.insert(place, number)
