"""Output of a benchmark: where it ran, a table, and one JSON object as the last line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def environment_line() -> str:
    """Return date, commit, processor and load: a figure without them means little."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}  commit {_commit()}  {_processor()} x{os.cpu_count()}  "
        f"Linux {platform.release()}  Python {platform.python_version()}  torch {torch}  load {load}"
    )


def _commit() -> str:
    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "none"
    return commit + ("+changes" if git("status", "--porcelain") else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format aligned columns: the first to the left, the others to the right."""
    cells = [list(head), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        padded = [row[0].ljust(widths[0]), *others]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def last_line(figures: Mapping[str, Any]) -> None:
    """Print the figures as the run's last line, with four significant digits."""
    print(json.dumps(rounded(figures)), flush=True)


def rounded(value: Any) -> Any:
    """Return a value whose numbers have four significant digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            only = values[0] if values else float("nan")
            return cls(only, only, only)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        return (
            f"{self.median * scale:.{digits}f} [{self.low * scale:.{digits}f} {self.high * scale:.{digits}f}]"
        )


def p95(values: Sequence[float]) -> float | None:
    """Give the 95th percentile; None of nothing."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else None


def median(values: Sequence[float]) -> float | None:
    """Give the median; None of nothing, which is not the same as a very good figure."""
    return statistics.median(values) if values else None


def at_most(value: float | None, goal: float) -> str:
    """Return "met" or "missed", or "not measured" if the value is None."""
    if value is None:
        return "not measured"
    return "met" if value <= goal else "missed"


def durations(answers: Sequence[Any], name: str, start: int = 0, end: int = 1) -> list[float]:
    """Return the seconds from the last rank's start to the last rank's end, operation by operation."""
    ranks = [answer["times"][name] for answer in answers]
    return [
        (max(times[end] for times in operation) - max(times[start] for times in operation)) / 1e9
        for operation in zip(*ranks, strict=True)
    ]


def slope(values: Sequence[float]) -> float:
    """Give the least-squares growth per step of an evenly sampled series of two at least."""
    count = len(values)
    if count < 2:
        raise ValueError("one value has no growth")
    middle = (count - 1) / 2
    mean = statistics.fmean(values)
    spread = sum((index - middle) ** 2 for index in range(count))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
