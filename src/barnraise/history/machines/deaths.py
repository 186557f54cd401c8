"""One event for each death: the failure of a worker and the loss of its machine are the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from barnraise.history.view import EventView

_SAME_S = 30.0  # between the failure of a worker and the death that it caused


def with_deaths(events: Iterable[EventView]) -> list[EventView]:
    """Return the events without failures that a death tells, too. Such a death has the failure's details."""
    kept = list(events)
    failures = [event for event in kept if event.kind == "failure"]
    for place, event in enumerate(kept):
        if event.kind != "died":
            continue
        same = next((each for each in failures if _is_same(each, event)), None)
        if same is not None:
            failures.remove(same)
            kept[place] = msgspec.structs.replace(event, level="error", detail=same.detail)
    return [event for event in kept if event.kind != "failure" or event in failures]


def _is_same(failure: EventView, death: EventView) -> bool:
    return failure.node == death.node and abs(failure.at - death.at) < _SAME_S
