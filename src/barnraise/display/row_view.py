"""Read model of a run whose record is not here or has no end: what the cluster knows of it now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from barnraise.agent_client.cluster_requests import NodeRow, StatusResponse
from barnraise.agent_client.run_requests import RunRow, WatchResponse
from barnraise.history.outcome import end_state
from barnraise.history.sentences import running_headline
from barnraise.history.view import (
    CurvePoint,
    CurveView,
    LinkView,
    MachineView,
    RunState,
    RunView,
    StartView,
)

NO_END = "its record has no end"
_SILENT_S = 60.0
_SILENT_STEPS = 10  # of the usual time of a step


def view_of_row(response: WatchResponse, status: StatusResponse | None, now: float) -> RunView:
    """Return what is known of a run without its record: no curve over time, no phases, no measurements."""
    row, progress = response.row, response.row.progress
    nodes = {node.name: node for node in (status.nodes if status is not None else ())}
    machines = tuple(_machines(response, nodes))
    steps_per_s = (progress.steps_per_s or None) if progress is not None else None
    left = progress.total - progress.step if progress is not None and progress.total is not None else None
    state = run_state(row)
    return RunView(
        run=row.run,
        state=state,
        headline=running_headline(machines, steps=1) if state == "running" else row.sentence,
        start=StartView(command=" ".join(row.command), title=row.title, started_by=row.by),
        started_at=row.at,
        exit_code=row.code,
        outcome=row.sentence if state != "running" else "",
        at=now,
        counts=progress.counts if progress is not None else "step",
        step=progress.step if progress is not None else 0,
        total_steps=progress.total if progress is not None else None,
        eta_s=left / steps_per_s if left is not None and steps_per_s else None,
        elapsed_s=max(0.0, now - row.at) if state == "running" else 0.0,  # nothing tells when it ended
        steps_per_s=steps_per_s,
        samples_per_s=(progress.samples_per_s or None) if progress is not None else None,
        machines=machines,
        links=_links(status, nodes, {machine.name for machine in machines}),
        metric=progress.metric if progress is not None else "",
        curves=_newest_value(row),
    )


def is_silent(view: RunView, now: float) -> bool:
    """Tell whether the record of a run without an end has got nothing for a while: the run may have ended."""
    if view.state != "running" or view.newest_at is None:
        return False
    return now - view.newest_at > max(_SILENT_S, _SILENT_STEPS * (view.step_s or 0.0))


def with_end(view: RunView, row: RunRow | None, now: float) -> RunView:
    """Return the view of a record with the end that the record lacks, as of its newest entry.

    ``row``: what the agent knows of the run; None: nothing. Then a run whose record is silent has ended.
    """
    if view.state != "running" or not (is_silent(view, now) if row is None else row.phase == "ended"):
        return view
    words = NO_END if row is None else row.sentence
    newest, started = view.newest_at, view.started_at
    return replace(
        view,
        state="stopped" if row is None else run_state(row),
        headline=words,
        outcome=words,
        ended_at=newest,
        eta_s=None,
        elapsed_s=max(0.0, newest - started) if newest is not None and started is not None else 0.0,
        machines=tuple(
            replace(machine, state="ended", ranks=()) if machine.state in ("trains", "joining") else machine
            for machine in view.machines
        ),
    )


def run_state(row: RunRow) -> RunState:
    """Return the state of a run as the read model names it."""
    if row.phase != "ended":
        return "running"
    return end_state(row.code, was_stopped=row.was_stopped)


def _machines(response: WatchResponse, nodes: Mapping[str, NodeRow]) -> Iterable[MachineView]:
    row = response.row
    devices = {worker.name: worker.device for worker in response.workers}
    has_ended = row.phase == "ended"
    for name in row.machines:
        yield MachineView(
            node=nodes[name].node if name in nodes else "",
            name=name,
            state="ended" if has_ended else "trains",
            device=devices.get(name, ""),
            ranks=tuple(worker.rank for worker in response.workers if worker.name == name),
        )
    for name, why in row.left_out:
        if name not in row.machines:
            node = nodes[name].node if name in nodes else ""
            yield MachineView(node=node, name=name, state="refused", state_reason=why)


def _links(
    status: StatusResponse | None, nodes: Mapping[str, NodeRow], names: set[str]
) -> tuple[LinkView, ...]:
    if status is None:
        return ()
    return tuple(
        LinkView(
            source=link.a,
            target=link.b,
            source_node=nodes[link.a].node if link.a in nodes else link.a,
            target_node=nodes[link.b].node if link.b in nodes else link.b,
            mbps=link.mbps,
            rtt_ms=link.rtt_ms,
        )
        for link in status.links
        if link.a in names and link.b in names
    )


def _newest_value(row: RunRow) -> tuple[CurveView, ...]:
    progress = row.progress
    if progress is None or not progress.metric:
        return ()
    point = CurvePoint(progress.step, progress.value, progress.value, progress.value, progress.value)
    return (CurveView(name=progress.metric, points=(point,), newest=progress.value),)
