"""Commits that count no step yet: those of a lease at a hub count with the exchange after it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from barnraise.history.step_rows import StepRow


class UncountedCommits:
    """Sums of the commits since the last one that counted steps."""

    def __init__(self) -> None:
        self._rows: list[StepRow] = []
        self._values: dict[str, tuple[float, int]] = {}

    def add(self, row: StepRow) -> StepRow | None:
        """Add the row of a commit. Return it with all before it, or None if it counts no step."""
        if row.stride == 0:
            self._rows = [_together(*self._rows, row)]
            return None
        rows, self._rows = self._rows, []
        return _together(*rows, row)

    def add_values(self, values: Mapping[str, float]) -> None:
        """Add the values of a commit that counts no step."""
        for name, value in values.items():
            total, count = self._values.get(name, (0.0, 0))
            self._values[name] = total + value, count + 1

    def take_values(self) -> dict[str, float]:
        """Return the mean of each value since the last time."""
        values, self._values = self._values, {}
        return {name: total / count for name, (total, count) in values.items()}


def _together(*rows: StepRow) -> StepRow:
    """Return the last row with the seconds, samples and phases of all."""
    return rows[-1]._replace(
        seconds=sum(row.seconds for row in rows),
        samples=sum(row.samples for row in rows),
        phases=tuple(map(sum, zip(*(row.phases for row in rows), strict=True))),
    )
