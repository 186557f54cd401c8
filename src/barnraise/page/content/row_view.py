"""View of a run without a record on this machine: what the run's newest record and reports say. Pure."""

from __future__ import annotations

import shlex

from barnraise.agent_client.history_requests import KeptLog
from barnraise.agent_client.run_requests import RunRow, WatchResponse
from barnraise.history.view import EventView, MachineState, MachineView, RunState, RunView, StartView


def view_of_row(response: WatchResponse) -> RunView:
    """Return the view of a run that has no entries yet, such as one that prepares."""
    row, progress = response.row, response.row.progress
    training = {worker.name for worker in response.workers if worker.state == "running"}
    return RunView(
        run=row.run,
        state=state_of(row),
        headline=row.sentence or f"the run is in the phase {row.phase}",
        start=StartView(command=shlex.join(row.command), title=row.title, started_by=row.by),
        started_at=row.at,
        exit_code=row.code,
        counts=progress.counts if progress is not None else "step",
        step=progress.step if progress is not None else 0,
        total_steps=progress.total if progress is not None else None,
        steps_per_s=progress.steps_per_s or None if progress is not None else None,
        samples_per_s=progress.samples_per_s or None if progress is not None else None,
        machines=tuple(
            MachineView(
                node="",
                name=part.name,
                state=_machine_state(row, part.name, training),
                state_reason="" if part.name in training else part.words,
            )
            for part in response.parts
        ),
        events=tuple(
            EventView(at=row.at, kind="failure", level="error", text=failure.summary, detail=failure.tail)
            for failure in row.failures
        ),
    )


def row_of_log(log: KeptLog) -> RunRow:
    """Return the line of a run of which only the record is left."""
    return RunRow(
        run=log.run,
        title="",
        command=(),
        by="",
        at=log.changed_at,
        phase="recorded",
        generation=0,
        version=0,
        sentence="only its record is kept",
        machines=(),
    )


def state_of(row: RunRow) -> RunState:
    """Return the state of a run, as a view has it."""
    if row.phase != "ended":
        return "running"
    if row.was_stopped:
        return "stopped"
    return "ended" if row.code in (0, 3) else "failed"


def _machine_state(row: RunRow, name: str, training: set[str]) -> MachineState:
    if row.phase == "ended":
        return "ended"
    return "trains" if name in training else "joining"
