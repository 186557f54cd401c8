"""State of a run at one moment, and how old its news is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from barnraise.history.sentences import duration
from barnraise.history.view import RunView

_LATE_ANSWER_S = 5.0
_LATE_NEWS_S = 30.0
_LATE_STEPS = 5  # of the usual time of a step


@dataclass(frozen=True)
class Snapshot:
    """State of a run as this machine's agent knows it.

    ``waits_for``: empty if the run waits for nothing. ``user_pauses``: by machine name, why the user of the
    machine paused it.
    """

    view: RunView
    waits_for: str = ""
    user_pauses: Mapping[str, str] = field(default_factory=dict)


class SnapshotSource(Protocol):
    """Source of a display: the newest state of one run."""

    def look(self) -> Snapshot:
        """Return the state now; raise BarnraiseError if that is not possible."""
        ...


@dataclass(frozen=True)
class Freshness:
    """Ages of the agent's newest answer and of the run's newest entry. ``error``: why no answer came."""

    answer_s: float = 0.0
    news_s: float = 0.0
    error: str = ""

    def is_live(self, view: RunView) -> bool:
        """Tell whether what is shown is true now. A run that has ended does not change any more."""
        return view.state != "running" or not (self._is_unanswered or self._is_silent(view))

    def sentence(self, view: RunView) -> str:
        """Return since when nothing came; empty if what is shown is live."""
        if self.is_live(view):
            return ""
        if self._is_unanswered:
            why = self.error or "the agent of this machine does not answer"
            return f"NOT LIVE: {why}; this is the state of {duration(self.answer_s)} ago"
        return f"NOT LIVE: nothing came from the run for {duration(self.news_s)}"

    @property
    def _is_unanswered(self) -> bool:
        return self.answer_s > _LATE_ANSWER_S

    def _is_silent(self, view: RunView) -> bool:
        return self.news_s > max(_LATE_NEWS_S, _LATE_STEPS * (view.step_s or 0.0))


def newest_entry_at(view: RunView) -> float:
    """Return the time of the newest thing that is known of a run; 0 if there is nothing."""
    times = [event.at for event in view.events]
    times += [machine.sampled_at or 0.0 for machine in view.machines]
    times += [view.rates[-1].at] if view.rates else []
    return max([view.started_at or 0.0, *times])
