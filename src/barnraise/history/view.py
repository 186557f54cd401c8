"""Read model of a run: everything that a terminal, a page or a report shows. Frozen; encodes to JSON.

Machines are named by ``node``, 64 hexadecimal digits, and by the name that people gave them. Names and texts
may come from other machines: a display makes them printable. Times ``at`` are seconds since 1970.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from barnraise.history.entries import ChangeKind

RunState = Literal["running", "ended", "failed", "stopped"]
MachineState = Literal["trains", "joining", "paused", "left", "evicted", "died", "refused", "ended"]
EventKind = Literal[
    "start",
    "end",
    "joining",
    "joined",
    "left",
    "paused",
    "resumed",
    "evicted",
    "died",
    "recovered",
    "refused",
    "plan",
    "checkpoint",
    "rollback",
    "failure",
    "note",
]
EventLevel = Literal["info", "warning", "error"]


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of a run now. None: unknown. ``memory_bytes``: size of the device's memory.

    ``state_reason``: why it does not train. ``samples_per_s``: while it computes, without waiting. ``share``:
    its part of the samples, from 0 to 1: of the newest ones, and after the end of all. ``trained_per_s``: its
    part of the run's samples per second. ``ranks``: of its workers in the current group.
    """

    node: str
    name: str
    state: MachineState
    state_reason: str = ""
    since: float | None = None
    device: str = ""
    system: str = ""
    memory_bytes: float | None = None
    used_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    load: float | None = None
    samples_per_s: float | None = None
    share: float | None = None
    trained_per_s: float | None = None
    ranks: tuple[int, ...] = ()
    sampled_at: float | None = None


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """Newest measurement of a link between two machines, named by ``source`` and ``target``."""

    source: str
    target: str
    source_node: str
    target_node: str
    mbps: float | None = None
    rtt_ms: float | None = None


class CurvePoint(msgspec.Struct, frozen=True, array_like=True):
    """Point of a curve: mean, smallest and largest value of ``stride`` steps from ``step`` on."""

    step: int
    value: float
    smooth: float
    low: float
    high: float
    stride: int = 1


class CurveMark(msgspec.Struct, frozen=True, kw_only=True):
    """Mark on all curves: a change of the machines, a plan, or a rollback."""

    step: int
    at: float
    kind: EventKind
    text: str


class CurveView(msgspec.Struct, frozen=True, kw_only=True):
    """Logged value over the steps: raw and smoothed. ``newest``: the last finite value."""

    name: str
    points: tuple[CurvePoint, ...]
    newest: float | None = None
    lowest: float | None = None


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of one phase of the recent steps, beside the plan's prediction. None: unknown."""

    name: str
    measured_s: float | None
    predicted_s: float | None = None


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Event in words, such as "nas is paused: its link slows the others"."""

    at: float
    kind: EventKind
    text: str
    level: EventLevel = "info"
    step: int | None = None
    node: str = ""
    detail: str = ""


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """Plan with its prediction beside what was measured under it.

    ``measured_step_s``: mean of ``measured_steps``, until the machines changed. ``shares``: expected samples
    of a step by name, with the speeds of that moment; a session follows the speeds from step to step.
    """

    at: float
    step: int
    name: str
    sync: str
    reason: str
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    measured_steps: int = 0
    shares: dict[str, float] = {}


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint, and the names of the machines that hold it."""

    at: float
    step: int
    machines: tuple[str, ...]
    size_bytes: float | None = None


class RatePoint(msgspec.Struct, frozen=True, array_like=True):
    """Speed of the run around one step. ``machines``: how many trained."""

    step: int
    at: float
    steps_per_s: float
    samples_per_s: float
    machines: int


class SamplePoint(msgspec.Struct, frozen=True, array_like=True):
    """Measurements of one machine at one moment; None: unknown."""

    at: float
    used_bytes: float | None
    temperature_c: float | None
    power_w: float | None
    samples_per_s: float | None
    load: float | None


class StartView(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a run: what was asked for, and the software of the machine that started it."""

    command: str = ""
    title: str = ""
    started_by: str = ""
    options: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    is_session: bool = True
    resumes: str = ""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run at one moment, with its whole history thinned to what a display can show.

    ``headline``: one sentence about now. ``step``: committed steps. ``counts``: what steps are; a map counts
    items. ``step_s``, the rates, ``eta_s`` and the phases are means of the newest ``recent_steps``.
    ``metric``: name of the curve that counts; empty if nothing was logged. ``rolled_back``: steps that were
    computed and do not count any more. ``missing``: committed steps without an entry in any known log.
    ``elapsed_s``: 0 if unknown. ``newest_at``: time of the newest entry; None without a record.
    """

    run: str
    state: RunState
    headline: str
    start: StartView
    started_at: float | None
    ended_at: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    at: float = 0.0
    newest_at: float | None = None
    counts: Literal["step", "item"] = "step"
    step: int = 0
    first_step: int = 0
    total_steps: int | None = None
    eta_s: float | None = None
    elapsed_s: float = 0.0
    batch: int = 0
    samples: int = 0
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    recent_steps: int = 0
    predicted_step_s: float | None = None
    energy_j: float | None = None
    machines: tuple[MachineView, ...] = ()
    links: tuple[LinkView, ...] = ()
    metric: str = ""
    curves: tuple[CurveView, ...] = ()
    marks: tuple[CurveMark, ...] = ()
    rates: tuple[RatePoint, ...] = ()
    samples_of: dict[str, tuple[SamplePoint, ...]] = {}  # by node
    phases: tuple[PhaseView, ...] = ()
    events: tuple[EventView, ...] = ()
    plans: tuple[PlanView, ...] = ()
    checkpoints: tuple[CheckpointView, ...] = ()
    rolled_back: int = 0
    missing: int = 0
    phase_totals_s: dict[str, float] = {}  # of all steps; "waiting": between them

    def curve(self, name: str = "") -> CurveView | None:
        """Return the curve of a logged value, or of the one that counts; None if there is none."""
        wanted = name or self.metric
        return next((curve for curve in self.curves if curve.name == wanted), None)


CHANGE_STATES: dict[ChangeKind, MachineState] = {
    "joining": "joining",
    "joined": "trains",
    "resumed": "trains",
    "recovered": "trains",
    "left": "left",
    "paused": "paused",
    "evicted": "evicted",
    "died": "died",
    "refused": "refused",
}
