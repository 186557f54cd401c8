"""A record stays small for days, and keeps the meaning of the loss curve."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from barnraise.history.columns import pack_column
from barnraise.history.curves import build_curves
from barnraise.history.entries import Entry, LogHead, MachineSample, StepBatch, ValueBatch
from barnraise.history.log_file import RunLogWriter, log_path, read_entries
from barnraise.history.logs.compaction import compact
from barnraise.history.merge import merge
from benchmarks.invented_run import DESK, RUN

_DAY_S = 86_400
_MACHINES = 3
_LARGEST_DAY = 20_000_000


def _loss(step: int) -> float:
    return 9.0 if step == 5_000 else 2.0 + math.exp(-step / 20_000) + 0.01 * math.sin(step)


@pytest.mark.parametrize("steps_per_s", [1, 10])
def test_record_of_a_day_on_three_machines_is_below_20_mb(tmp_path: Path, steps_per_s: int) -> None:
    """Write what the recorder and the sampler of one machine write in a day, second by second."""
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, LogHead(RUN, DESK, "agent", bytes(16), 1.0))
    largest = 0
    for second in range(_DAY_S):
        at = 1.79e9 + second
        first = second * steps_per_s
        count = range(steps_per_s)
        phases = (110, 5512, 3104, 41, 0, 1233)
        columns = tuple(tuple(ticks // steps_per_s + row for row in count) for ticks in phases)
        ticks = tuple(10_000 // steps_per_s + row for row in count)
        losses = pack_column([_loss(first + row) for row in count])
        rates = pack_column([1e-3] * steps_per_s)
        entries: list[Entry] = [
            StepBatch(1, first, at, ticks, (256,) * steps_per_s, columns),
            ValueBatch(1, first, ("loss", "lr"), (losses, rates)),
        ]
        if second % 15 == 0:
            entries += [
                MachineSample(at, DESK, 6e9, 61.0, 251.5, 1e6 + second, load=0.93),
                MachineSample(at, DESK, samples_per_s=256.25, share=0.4),
            ]
        writer.append(entries)
        largest = max(largest, writer.size)
    assert path.stat().st_size <= largest
    assert _MACHINES * largest < _LARGEST_DAY
    merged = merge([read_entries(path)])
    covered = [entry for entry in merged if isinstance(entry, StepBatch)]
    total = _DAY_S * steps_per_s
    assert sum(entry.end - entry.first for entry in covered) == covered[-1].end == total
    assert sum(sum(entry.samples) for entry in covered) == 256 * total
    curve = next(
        curve
        for curve in build_curves(entry for entry in merged if isinstance(entry, ValueBatch))
        if curve.name == "loss"
    )
    assert max(point.high for point in curve.points) == pytest.approx(9.0)  # no spike is lost
    for point in curve.points[::50]:
        middle = point.step + point.stride // 2
        if abs(middle - 5_000) > 2 * point.stride:
            assert point.value == pytest.approx(_loss(middle), abs=0.05)


def test_coarser_rows_keep_sums_means_and_extremes() -> None:
    steps = StepBatch(1, 0, 5.0, tuple(range(1, 9)), (2,) * 8, ((1,) * 8,) * 6)
    values = ValueBatch(1, 0, ("loss",), (pack_column([1.0, 3.0, math.nan, 5.0, 2.0, 2.0, 2.0, 2.0]),))
    small = compact([steps, values], 150)
    batches = [entry for entry in merge([small]) if isinstance(entry, StepBatch)]
    assert sum(sum(batch.ticks) for batch in batches) == sum(steps.ticks)
    assert batches[0].stride > 1
    assert batches[-1].end == 8
    curve = build_curves(entry for entry in small if isinstance(entry, ValueBatch))[0]
    assert (curve.points[0].low, max(point.high for point in curve.points)) == (1.0, 5.0)


@pytest.mark.parametrize("count", [3, 8, 40])
def test_record_with_many_values_becomes_coarser_too(tmp_path: Path, count: int) -> None:
    names = tuple(f"value{number}" for number in range(count))
    writer = RunLogWriter(log_path(tmp_path, RUN, DESK), LogHead(RUN, DESK, "agent", bytes(16), 1.0), 900_000)
    rows = 1024
    for first in range(0, 3_000_000 // (4 * count), rows):
        columns = tuple(pack_column([float(first + row) for row in range(rows)]) for _ in names)
        writer.append([StepBatch(1, first, 1.0, (10,) * rows, (8,) * rows)])
        for start in range(0, rows, 128):
            part = tuple(column[4 * start : 4 * (start + 128)] for column in columns)
            writer.append([ValueBatch(1, first + start, names, part)])
    assert writer.size < 900_000
    entries = read_entries(log_path(tmp_path, RUN, DESK))
    assert any(isinstance(entry, ValueBatch) and entry.lows for entry in entries)
