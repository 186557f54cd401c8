"""Pool of the samples that no member holds, and arithmetic on spans of samples. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from barnraise.hub.protocol.messages import HubDataOrder, SampleSpan

_MOST_SPANS = 1000
_NOTHING = HubDataOrder(samples=1, batch=1)


class SamplePool(msgspec.Struct, frozen=True, array_like=True):
    """Free samples: all from ``cursor`` on (counted over all epochs), and the returned ones."""

    cursor: int = 0
    returned: tuple[SampleSpan, ...] = ()


def take_samples(
    pool: SamplePool, course: HubDataOrder, samples: int
) -> tuple[tuple[SampleSpan, ...], SamplePool]:
    """Take up to ``samples`` samples, returned ones first. Return their spans and the remaining pool."""
    spans: list[SampleSpan] = []
    returned = list(pool.returned)
    while returned and samples > 0 and len(spans) < _MOST_SPANS:
        span = returned.pop(0)
        size = min(span.size, samples)
        spans.append(SampleSpan(span.epoch, span.first, span.first + size))
        samples -= size
        if size < span.size:
            returned.insert(0, SampleSpan(span.epoch, span.first + size, span.last))
    cursor = pool.cursor
    while samples > 0 and cursor < course.samples * course.epochs and len(spans) < _MOST_SPANS:
        epoch, first = divmod(cursor, course.samples)
        last = min(first + samples, course.samples)
        spans.append(SampleSpan(epoch, first, last))
        samples -= last - first
        cursor += last - first
    return tuple(spans), SamplePool(cursor, tuple(returned))


def return_samples(pool: SamplePool, spans: Sequence[SampleSpan]) -> SamplePool:
    """Return the pool with these spans, sorted and joined."""
    return (
        SamplePool(pool.cursor, merge_spans((*pool.returned, *spans)))
        if any(span.size for span in spans)
        else pool
    )


def merge_spans(spans: Iterable[SampleSpan]) -> tuple[SampleSpan, ...]:
    """Return the spans sorted, with adjacent ones joined."""
    merged: list[SampleSpan] = []
    for span in sorted(spans):
        if merged and merged[-1].epoch == span.epoch and merged[-1].last == span.first:
            merged[-1] = SampleSpan(span.epoch, merged[-1].first, span.last)
        elif span.size:
            merged.append(span)
    return tuple(merged)


def first_samples(spans: Sequence[SampleSpan], samples: int) -> tuple[SampleSpan, ...]:
    """Return the first ``samples`` samples of the spans."""
    taken, _ = take_samples(SamplePool(0, tuple(spans)), _NOTHING, samples)
    return taken


def subtract_spans(spans: Sequence[SampleSpan], taken: Sequence[SampleSpan]) -> list[SampleSpan] | None:
    """Return the spans without those taken. Return None if others were taken, or a sample twice."""
    if any(span.size <= 0 for span in taken):  # or two of them elsewhere could make up for each other
        return None
    rest: list[SampleSpan] = []
    cuts = sorted(taken)
    for span in merge_spans(spans):
        at = span.first
        begin = bisect_left(cuts, SampleSpan(span.epoch, span.first, 0))
        end = bisect_left(cuts, SampleSpan(span.epoch, span.last, 0))
        for cut in cuts[begin:end]:
            if not at <= cut.first < cut.last <= span.last:
                return None
            rest.append(SampleSpan(span.epoch, at, cut.first))
            at = cut.last
        rest.append(SampleSpan(span.epoch, at, span.last))
    total = sum(span.size for span in (*rest, *taken))
    return rest if total == sum(span.size for span in spans) else None


def has_samples(pool: SamplePool, course: HubDataOrder) -> bool:
    """Tell whether there are free samples."""
    return bool(pool.returned) or pool.cursor < course.samples * course.epochs
