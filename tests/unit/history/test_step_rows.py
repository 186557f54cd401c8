"""Phases of rows: those of split models are a column more, and logs without it are still read."""

from __future__ import annotations

from barnraise.history.entries import PHASES, StepBatch
from barnraise.history.step_rows import StepRow, phase_columns, step_batches
from barnraise.history.step_table import StepTable

SIX = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def batch_of(phases: tuple[float, ...]) -> StepBatch:
    [batch] = step_batches([StepRow(1, step, 1, 100.0, 3.0, 8, phases) for step in range(2)])
    return batch


def test_rows_without_activations_have_six_columns() -> None:
    assert len(batch_of((*SIX, 0.0)).phases) == len(batch_of(SIX).phases) == 6
    assert batch_of((*SIX, 0.9)).phases[6] == (9000, 9000)


def test_six_columns_are_read_as_no_activations() -> None:
    assert phase_columns(batch_of(SIX))[6] == (0, 0)
    assert phase_columns(batch_of(())) == ()
    assert len(phase_columns(batch_of((*SIX, 0.9)))) == len(PHASES)


def test_activations_are_shown_only_of_split_models() -> None:
    table = StepTable()
    table.update([batch_of(SIX)])
    assert [phase.name for phase in table.phases(None)] == list(PHASES[:6])
    assert "activations" not in table.phase_totals_s()
    table.update([batch_of((*SIX, 0.9))])
    assert table.phases(None)[-1].name == "activations"
    assert table.phase_totals_s()["activations"] == 1.8
