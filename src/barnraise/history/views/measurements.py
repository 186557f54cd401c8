"""Measurements of machines and links: the newest ones, and samples over time. Pure."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable
from itertools import pairwise

from barnraise.history.entries import LinkSample, MachineSample
from barnraise.history.view import LinkView, SamplePoint

MOST_SAMPLES = 500  # of one machine
_FIELDS = tuple(name for name in MachineSample.__struct_fields__ if name not in ("node", "energy_j"))
_at = operator.attrgetter("at")


class Measurements:
    """Samples of all machines and links of a run."""

    def __init__(self) -> None:
        self._series: dict[bytes, _Series] = {}
        self._links: dict[tuple[bytes, bytes], tuple[float, float, float]] = {}
        self._changed: set[tuple[bytes, bytes]] = set()
        self._views: dict[tuple[bytes, bytes], LinkView] = {}
        self._shown: tuple[LinkView, ...] = ()
        self._names: dict[bytes, str] = {}

    def add(self, samples: Iterable[MachineSample | LinkSample]) -> None:
        """Add samples in any order; each counts once."""
        for sample in samples:
            if isinstance(sample, MachineSample):
                self._series.setdefault(sample.node, _Series()).add(sample)
                continue
            for source, target, mbps, rtt_ms in sample.links:
                known = self._links.get((source, target))
                if known is None or known[0] <= sample.at:
                    self._links[source, target] = sample.at, mbps, rtt_ms
                    self._changed.add((source, target))

    def newest(self, node: bytes) -> MachineSample:
        """Return the newest known value of each measurement of a machine."""
        series = self._series.get(node)
        return MachineSample(0.0, node) if series is None else series.newest(node)

    def samples_of(self) -> dict[str, tuple[SamplePoint, ...]]:
        """Return samples of each machine over time, at equal distances."""
        return {node.hex(): series.thinned() for node, series in self._series.items()}

    def shares(self) -> dict[bytes, list[tuple[float, float]]]:
        """Return the shares of each machine, with the time of each, in order."""
        return {node: sorted(series.shares) for node, series in sorted(self._series.items())}

    def links(self, name_of: Callable[[bytes], str]) -> tuple[LinkView, ...]:
        """Return the newest measurement of each link; the same object if nothing has changed."""
        names = {node: name_of(node) for pair in self._changed for node in pair}
        names = {node: name_of(node) for node in self._names} | names
        changed = self._changed if names.items() >= self._names.items() else self._links.keys()
        for pair in changed:
            _, mbps, rtt_ms = self._links[pair]
            source, target = pair
            self._views[pair] = LinkView(
                source=names[source],
                target=names[target],
                source_node=source.hex(),
                target_node=target.hex(),
                mbps=mbps or None,
                rtt_ms=rtt_ms or None,
            )
        if changed:
            self._shown = tuple(self._views[pair] for pair in self._links)
        self._names, self._changed = names, set()
        return self._shown


class _Series:
    """Samples of one machine by time."""

    def __init__(self) -> None:
        self.shares: list[tuple[float, float]] = []  # time and value
        self._points: list[SamplePoint] = []
        self._energies: list[tuple[float, float]] = []  # time and value, in order
        self._newest: dict[str, tuple[float, float]] = {}  # time and value, by field

    def add(self, sample: MachineSample) -> None:
        """Add a sample, unless there is one of this moment."""
        place = bisect.bisect_left(self._points, sample.at, key=_at)
        if place < len(self._points) and self._points[place].at == sample.at:
            return
        point = SamplePoint(
            sample.at,
            sample.used_bytes,
            sample.temperature_c,
            sample.power_w,
            sample.samples_per_s,
            sample.load,
        )
        self._points.insert(place, point)
        if sample.share is not None:
            self.shares.append((sample.at, sample.share))
        if sample.energy_j is not None:
            bisect.insort(self._energies, (sample.at, sample.energy_j))
        for name in _FIELDS:
            value = getattr(sample, name)
            if value is not None and self._newest.get(name, _NEVER)[0] <= sample.at:
                self._newest[name] = sample.at, value

    def newest(self, node: bytes) -> MachineSample:
        """Return the newest known value of each measurement, and the energy of all counts."""
        values = {name: value for name, (_, value) in self._newest.items()}
        return MachineSample(node=node, energy_j=self._energy(), **values)

    def _energy(self) -> float | None:
        """Return the energy; the count begins again at 0 when the agent starts again."""
        values = [value for _, value in self._energies]
        return sum(a for a, b in pairwise(values) if b < a) + values[-1] if values else None

    def thinned(self) -> tuple[SamplePoint, ...]:
        """Return samples at equal distances."""
        return tuple(self._points[:: max(1, -(-len(self._points) // MOST_SAMPLES))])


_NEVER = (float("-inf"), 0.0)
