"""The line about what a run waits for, before its first step and at its end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.agent_client.run_requests import PartRow, WatchResponse, WorkerRow
from barnraise.cli.runs.progress.progress_line import format_time_left
from barnraise.core.units import counted, format_size

_LARGE_BYTES = 4 << 20


def part_line(part: PartRow, run: str) -> str:
    """Return what a machine does before its workers start; an empty text if it is ready."""
    if part.stage == "asks":
        return f"waiting for {part.name}, a guest: its user must run `barnraise accept {run}`"
    if part.stage == "fetching" and part.all_bytes > _LARGE_BYTES:
        return f"{part.name} receives {format_size(part.done_bytes)} of {format_size(part.all_bytes)}"
    if part.stage in ("fetching", "waiting", "building"):
        return f"{part.name}: {part.words or _STAGES[part.stage]}"
    return ""


_STAGES = {
    "fetching": "receiving the files",
    "waiting": "waiting",
    "building": "building the environment",
}


def awaited(response: WatchResponse, *, has_output: bool) -> str:
    """Return what the run waits for; an empty text if nothing is known.

    ``has_output``: the script has printed something.
    """
    row = response.row
    if row.phase == "preparing":
        lines = [line for part in response.parts if (line := part_line(part, row.run))]
        return "; ".join(lines) or "all machines are ready, starting the workers"
    if row.phase == "stopping":
        alive = [worker.name for worker in response.workers if worker.state != "ended"]
        return f"waiting for the worker to end on {_names(alive)}" if alive else "collecting the results"
    if row.phase == "restarting":
        paused = [part_line(part, row.run) for part in response.parts if part.stage == "waiting"]
        return "; ".join(["restarting the workers", *paused])
    if row.phase != "running" or not response.workers:
        return ""
    return _before_first_step(response.workers, has_output=has_output)


def stall_reason(workers: Sequence[WorkerRow]) -> str:
    """Return why a group that trains makes no step, as far as its workers report it; else an empty text."""
    reasons = [f"{worker.name} waits for {worker.words}" for worker in workers if worker.words]
    starting = [worker.name for worker in workers if not worker.has_session and worker.state != "ended"]
    if starting and len(starting) < len(workers):
        reasons.append(f"the script starts on {_names(starting)}")
    return "; ".join(dict.fromkeys(reasons))


def _before_first_step(workers: Sequence[WorkerRow], *, has_output: bool) -> str:
    starting = [worker.name for worker in workers if not worker.has_session and worker.state != "ended"]
    if len(starting) == len(workers):
        machines = counted(len(set(starting)), "machine")
        return f"the script runs on {machines}" if has_output else f"the script starts on {_names(starting)}"
    if starting:
        return f"waiting for the first step: the script starts on {_names(starting)}"
    reasons = [f"{worker.name} waits for {worker.words}" for worker in workers if worker.words]
    return "; ".join(["waiting for the first step", *reasons])


def _names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def waiting_line(text: str, waited_s: float, width: int) -> str:
    """Return the text with the seconds of the wait, of at most ``width`` characters."""
    elapsed = f" ({format_time_left(waited_s)})"
    space = width - len(elapsed)
    return (text if len(text) <= space else text[: max(0, space - 3)] + "...") + elapsed
