"""Values that the processes of runs report: their counters continue when a process starts again. Pure."""

from __future__ import annotations

from collections.abc import Collection

from barnraise.core.metrics import ProcessValues, Sample
from barnraise.core.metrics.sample import MAX_SAMPLES, accepted, is_cumulative

SILENCE_S = 10.0

Key = tuple[str, tuple[str, ...]]
Place = tuple[str, int, str]  # run, number of the worker on this machine, kind of process


class _Totals:
    """Values of one place. ``before``: what the counters of earlier processes there had reached."""

    def __init__(self) -> None:
        self.before: dict[Key, float] = {}
        self.current: dict[Key, float] = {}
        self.instance = b""
        self.heard_at = 0.0

    def update(self, values: ProcessValues, now: float) -> None:
        """Replace the current values, of which the counters are kept if another process has sent them."""
        if values.instance != self.instance:
            for key, value in self.current.items():
                is_kept = key in self.before or len(self.before) < MAX_SAMPLES
                if is_cumulative(key[0]) and is_kept:
                    self.before[key] = self.before.get(key, 0.0) + value
            self.instance = values.instance
        self.current = {(each.name, each.labels): each.value for each in accepted(values)}
        self.heard_at = now

    def samples(self, labels: tuple[str, ...]) -> list[Sample]:
        """Return the values with these labels before their own."""
        own = self.current
        ended = ((key, value) for key, value in self.before.items() if key not in own)
        merged = ((key, value + self.before.get(key, 0.0)) for key, value in own.items())
        return [Sample(name, (*labels, *rest), value) for (name, rest), value in (*merged, *ended)]


class ProcessTable:
    """Newest values of all workers and communication processes of this machine."""

    def __init__(self) -> None:
        self._places: dict[Place, _Totals] = {}

    def update(self, run: str, local_rank: int, values: ProcessValues, now: float) -> None:
        """Note the values that a process has reported."""
        self._places.setdefault((run, local_rank, values.source), _Totals()).update(values, now)

    def samples(self, now: float) -> list[Sample]:
        """Return the values of all processes but those that have been silent for long."""
        samples: list[Sample] = []
        for (run, local_rank, _), totals in sorted(self._places.items()):
            if now - totals.heard_at <= SILENCE_S:
                samples += totals.samples((run, str(local_rank)))
        return samples

    def keep_only(self, runs: Collection[str]) -> None:
        """Forget the values of all other runs."""
        self._places = {place: totals for place, totals in self._places.items() if place[0] in runs}
