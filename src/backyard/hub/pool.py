"""The samples of a run that nobody holds, and arithmetic on spans of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backyard.hub.messages import Course, Span

_MOST_SPANS = 1000
_NOTHING = Course(samples=1, batch=1)


class Pool(msgspec.Struct, frozen=True, array_like=True):
    """The samples that nobody holds: all from ``cursor`` on (counted over all epochs), and what came back."""

    cursor: int = 0
    returned: tuple[Span, ...] = ()


def take(pool: Pool, course: Course, samples: int) -> tuple[tuple[Span, ...], Pool]:
    """So many samples, or what is left of them: those that came back first."""
    spans: list[Span] = []
    returned = list(pool.returned)
    while returned and samples > 0 and len(spans) < _MOST_SPANS:
        span = returned.pop(0)
        size = min(span.size, samples)
        spans.append(Span(span.epoch, span.first, span.first + size))
        samples -= size
        if size < span.size:
            returned.insert(0, Span(span.epoch, span.first + size, span.last))
    cursor = pool.cursor
    while samples > 0 and cursor < course.samples * course.epochs and len(spans) < _MOST_SPANS:
        epoch, first = divmod(cursor, course.samples)
        last = min(first + samples, course.samples)
        spans.append(Span(epoch, first, last))
        samples -= last - first
        cursor += last - first
    return tuple(spans), Pool(cursor, tuple(returned))


def give_back(pool: Pool, spans: Sequence[Span]) -> Pool:
    """Sorted, and neighbours joined."""
    joined: list[Span] = []
    for span in sorted((*pool.returned, *spans)):
        if joined and joined[-1].epoch == span.epoch and joined[-1].last == span.first:
            joined[-1] = Span(span.epoch, joined[-1].first, span.last)
        elif span.size:
            joined.append(span)
    return Pool(pool.cursor, tuple(joined))


def trained(spans: Sequence[Span], samples: int) -> tuple[Span, ...]:
    """The first so many samples of them."""
    found, _ = take(Pool(0, tuple(spans)), _NOTHING, samples)
    return found


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span] | None:
    """What is left of them; None if something else was taken, or a sample twice."""
    rest: list[Span] = []
    for span in spans:
        at = span.first
        for cut in sorted(one for one in taken if one.epoch == span.epoch and at <= one.first < span.last):
            if not at <= cut.first < cut.last <= span.last:
                return None
            rest.append(Span(span.epoch, at, cut.first))
            at = cut.last
        rest.append(Span(span.epoch, at, span.last))
    total = sum(one.size for one in (*rest, *taken))
    return rest if total == sum(one.size for one in spans) else None


def samples_left(pool: Pool, course: Course) -> int:
    return course.samples * course.epochs - pool.cursor + sum(span.size for span in pool.returned)
