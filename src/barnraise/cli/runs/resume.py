"""``barnraise resume`` and ``export``: what is left of a run that has ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from barnraise.agent_client.bootstrap import child_environment
from barnraise.agent_client.cluster_requests import StatusRequest, StatusResponse
from barnraise.agent_client.run_requests import (
    FetchCheckpointRequest,
    FetchCheckpointResponse,
    NewestCheckpointRequest,
    NewestCheckpointResponse,
    PartRow,
    ResumeRunRequest,
    RunRow,
    RunStarted,
    WatchRequest,
    WatchResponse,
)
from barnraise.artifacts import RESULTS_STAY, ArtifactStore, store_directory
from barnraise.cli.agent_call import ask, offer_agent
from barnraise.cli.runs.run import conclude
from barnraise.cli.runs.run_view import watch
from barnraise.cli.waiting import waiting
from barnraise.core.command import runner
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import CheckpointError, RunError, ShippingError
from barnraise.core.names import list_names
from barnraise.core.sanitize import printable
from barnraise.core.units import counted, format_size

_RESUME_S = 600.0  # what the run was started with may have to come first
_BRING_S = 10.0


def resume(
    run: str, *, on: tuple[str, ...], variables: tuple[tuple[str, str], ...], all_ranks: bool, detach: bool
) -> int:
    """Start the same command again on the machines that are online, from the newest complete checkpoint in
    reach.
    """
    offer_agent()
    with waiting("barnraise: looking for the newest checkpoint"):
        started = ask(ResumeRunRequest(run=run, variables=variables, on=on), RunStarted, timeout_s=_RESUME_S)
    where = f"{', '.join(started.nodes)}; {started.begins}"
    click.echo(f"barnraise: run {started.run} continues {run} on {where}", err=True)
    if detach:
        click.echo(started.run)
        return 0
    row = watch(started.run, all_ranks=all_ranks, stops=True)
    store = ArtifactStore(store_directory(state_directory(load_settings())))
    return conclude(row, store, Path.cwd(), all_output=all_ranks)


_WRITTEN = {
    "model": ("model.safetensors", "the model"),
    "adapter": ("adapter_model.safetensors", "the adapter"),
    "merged": ("", "the base model with the adapter"),
}


def export(run: str, target: Path, form: str = "model", base: Path | None = None) -> int:
    """Export the model of the newest complete checkpoint in reach, and note where it comes from.

    ``form``: ``model``, ``adapter`` or ``merged``. ``base``: the folder of the base model to merge with.
    """
    response = ask(WatchRequest(run=run, wait_s=0), WatchResponse)
    row = response.row
    _bring_newest(row)
    state = state_directory(load_settings())
    command = [sys.executable, "-P", "-m", "barnraise.checkpoint", str(state), row.run, str(target.resolve())]
    command += [form, "" if base is None else str(base.resolve())]
    done = runner(None, child_environment())(command)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise RunError(
            f"run {row.run} cannot be exported: {words[-1] if words else 'no reason was given'}",
            hint="Correct what the message names, or export into another folder.",
        )
    facts = {"run": row.run, "command": row.command, "machines": row.machines, **json.loads(done.stdout)}
    (target / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    steps = f"after {counted(int(facts['steps']), 'step')} of run {row.run}"
    is_part = form == "model" and "base_tensors" in facts
    file, noun = _WRITTEN[form]
    noun = "the trained part of the model" if is_part else noun
    click.echo(f"barnraise: {target / file} is {noun} {steps}", err=True)
    if is_part:
        click.echo(f"barnraise: {_describe_base(facts['base_tensors'])}", err=True)
    if newer := _describe_newer_steps(row, int(facts["steps"]), response.parts):
        click.echo(f"barnraise: {printable(newer)}", err=True)
    return 0


def reshard(
    sources: Sequence[str], target: Path, *, into: int, step: int | None, safetensors: bool, prefix: str
) -> int:
    """Write a sharded checkpoint in another number of shards, or its tensors as one file."""
    roots = [_shard_folder(source, state_directory(load_settings())) for source in sources]
    command = [sys.executable, "-P", "-m", "barnraise.checkpoint.offline", "--into", str(into)]
    command += [] if step is None else ["--step", str(step)]
    command += ["--safetensors", "--prefix", prefix] if safetensors else []
    done = runner(None, child_environment())([*command, "--", str(target.resolve()), *map(str, roots)])
    lines = done.stderr.strip().splitlines()
    if done.returncode != 0:
        raise CheckpointError(
            lines[-1] if lines else "the checkpoint cannot be converted: no reason was given",
            hint="Correct what the message names, then try again.",
        )
    for line in lines:
        click.echo(printable(line), err=True)
    facts = json.loads(done.stdout)
    what = f"{counted(int(facts['tensors']), 'tensor')} of step {int(facts['step']):,}"
    click.echo(f"barnraise: {facts['path']} has {what}", err=True)
    return 0


def _shard_folder(source: str, state: Path) -> Path:
    """Return the folder of sharded checkpoints that a path or a run of this machine stands for."""
    if Path(source).is_dir():
        return Path(source).resolve()
    kept = state / "runs" / source / "checkpoints" / "sharded"
    folders = sorted({manifest.parent.parent for manifest in kept.rglob("step-*/manifest.json")})
    if len(folders) == 1:
        return folders[0]
    if folders:
        raise CheckpointError(
            f"run {source} has sharded checkpoints in {len(folders)} folders",
            hint=f"Name one of them: {', '.join(map(str, folders))}.",
        )
    raise CheckpointError(
        f"{source} is neither a folder nor a run with sharded checkpoints on this machine",
        hint="Name a folder that the script gave to save_sharded, or a run of `barnraise ps`.",
    )


def _describe_newer_steps(row: RunRow, written: int, parts: Sequence[PartRow] = ()) -> str:
    """Return what the run committed after the checkpoint that was written, and where that is; or nothing."""
    progress = row.progress
    if progress is None or progress.counts != "step" or progress.step <= written:
        return ""
    newer = f"The run committed {counted(progress.step, 'step')}; its newest checkpoint is older."
    if row.phase != "ended":
        return f"{newer} The next one comes within checkpoint_s (60 s by default)."
    if row.code == 0:
        stay = next((part.words for part in parts if part.words.startswith(RESULTS_STAY)), "")
        saved = stay or f"barnraise attach {row.run}"
        return f"{newer} The last steps are in what the script saved: {saved}"
    return f"{newer} To train the last steps again: barnraise resume {row.run}"


def _describe_base(count: int | None) -> str:
    """Return what the exported file does not contain; ``count`` is None if the base was not compared."""
    which = "The frozen base" if count is None else f"The frozen base ({count:,} tensors)"
    return f"{which} is not in it. Load it first, then this file with load_state_dict(..., strict=False)."


def _bring_newest(row: RunRow) -> None:
    """Fetch the newest checkpoint to this disk; take the next one if that fails."""
    passed: list[tuple[str, int]] = []
    why = "no machine that is here has a checkpoint of it"
    while (
        newest := ask(NewestCheckpointRequest(row.run, passing_over=tuple(passed)), NewestCheckpointResponse)
    ).run:
        try:
            _bring(newest)
        except (RunError, ShippingError) as error:
            why = error.message
            click.echo(f"barnraise: {why}", err=True)
            passed.append((newest.run, newest.step))
        else:
            return
    if newest.sharded:
        raise RunError(
            f"run {row.run} has sharded checkpoints only (the newest of step {newest.sharded}, with parts on "
            f"{', '.join(newest.machines)}), and export does not put their parts together",
            hint="Put them together on one machine: barnraise checkpoint reshard (see docs/sharded.md). Or "
            f"go on with the run: barnraise resume {row.run}",
        )
    raise _cannot(row, why)


def _bring(newest: NewestCheckpointResponse) -> None:
    question = FetchCheckpointRequest(newest.run, newest.step, _BRING_S)
    while not (response := ask(question, FetchCheckpointResponse, timeout_s=3 * _BRING_S)).here:
        size = f"{format_size(response.done_bytes)} of {format_size(response.all_bytes)}"
        click.echo(f"barnraise: step {newest.step} comes from {', '.join(newest.machines)}: {size}", err=True)


def _cannot(row: RunRow, why: str) -> RunError:
    """Return the error of a run without a checkpoint in reach, with what to do about it."""
    nodes = ask(StatusRequest(), StatusResponse).nodes
    here = {node.name for node in nodes if node.state in ("this", "here")}
    absent = [name for name in row.machines if name not in here]
    return RunError(f"run {row.run} cannot be exported: {why}", hint=_next_step(row, absent))


def _next_step(row: RunRow, absent: Sequence[str]) -> str:
    """Return what to do if no machine that is here has a checkpoint; ``absent``: machines of the run."""
    if row.phase != "ended":
        return "Try again later: a session saves its first checkpoint after 60 s, or after checkpoint_s."
    if row.code == 0:
        return f"It finished. What the script saved: barnraise attach {row.run}"
    if absent:
        return f"Switch on {list_names(absent)}, where it may have saved one."
    return "It ended before its first checkpoint, so run it again. Sessions save one after checkpoint_s (60)."
