"""``barnraise queue add``: packs the folder once and adds a job for each combination of arguments."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from msgspec.structs import replace

from barnraise.agent_client.queue.requests import MAX_ADDED, AddJobsRequest, JobOptions, JobsAdded
from barnraise.agent_client.run_options import MAX_TITLE, RunOptions, RunProgram
from barnraise.artifacts import ArtifactStore, folder_limits, pack, store_directory
from barnraise.cli.agent_call import ask, offer_agent, print_json
from barnraise.cli.queue.expand import Expanded, expand_arguments, parse_jobs
from barnraise.cli.runs.adapt import refuse_separate_training
from barnraise.cli.runs.data_sets import read_data
from barnraise.cli.runs.environment_choice import choose_environment
from barnraise.cli.runs.run import needs_in, python_sources, split_command
from barnraise.cli.waiting import waiting
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import RunError
from barnraise.core.sanitize import printable
from barnraise.core.units import counted, format_size
from barnraise.environments.build_size import listed_packages
from barnraise.environments.training_style import training_style

_PER_JOB_S = 0.5  # each job is agreed on by a quorum
_ANSWER_S = 30.0
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """Options of ``barnraise queue add`` that are not in `RunOptions`."""

    each: str = "device"
    after: tuple[str, ...] = ()
    priority: int = 0
    needs: int = 0
    retries: int = 1
    metric: str = ""
    best: str = "min"
    on: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    folder: Path | None = None
    separate: bool = False
    dry_run: bool = False
    as_json: bool = False


def add(script: str, arguments: Sequence[str], chosen: RunOptions, options: AddOptions) -> int:
    """Add the jobs and print their numbers; or print what they would be."""
    _check_sizes(chosen, options.each)
    module = list(arguments[:1]) if script == "-m" else []
    expanded = expand_arguments(arguments[len(module) :], MAX_ADDED)
    folder, start = split_command(script, module, options.folder)
    if options.dry_run:
        _print_commands(start, expanded, len(expanded.commands))
        return 0
    settings = load_settings()
    store = ArtifactStore(store_directory(state_directory(settings)))
    with waiting(f"barnraise: reading the folder {folder.name}"):
        packed = pack(folder, store, folder_limits(settings))
    sources = python_sources(store, packed.manifest)
    needs = needs_in(sources, start)
    on = tuple(name for text in options.on for name in text.split(",") if name)
    offer_agent()
    chosen = _fit_workers(sources, start, chosen, options, on)
    chosen = choose_environment(store, packed.manifest, chosen, on, state_directory(settings))
    request = AddJobsRequest(
        program=RunProgram(
            command=tuple(start),
            folder=packed.id,
            data=read_data(options.data, options.models, store, settings),
            needs=needs,
            packages=0 if chosen.container else listed_packages(store, packed.manifest, chosen.environment),
        ),
        commands=tuple((*start, *rest) for rest in expanded.commands),
        options=replace(chosen, title=chosen.title or Path(script).stem[:MAX_TITLE]),
        job=JobOptions(
            each=options.each,  # type: ignore[arg-type]  # click checks it
            after=tuple(parse_jobs(options.after)),
            needs_bytes=options.needs,
            retries=options.retries,
            metric=options.metric,
            best=options.best,  # type: ignore[arg-type]  # click checks it
        ),
        priority=options.priority,
        on=on,
    )
    with waiting(f"barnraise: adding {counted(len(expanded.commands), 'job')}"):
        added = ask(request, JobsAdded, timeout_s=_ANSWER_S + _PER_JOB_S * len(expanded.commands))
    if options.as_json:
        print_json(added)
    else:
        what = f"{counted(packed.files, 'file')}, {format_size(packed.bytes)}"
        _print_commands(start, expanded, len(added.jobs))
        first, last = added.jobs[0], added.jobs[-1]
        numbers = f"job {first}" if first == last else f"jobs {first} to {last}"
        click.echo(f"Added {numbers} of {folder.name} ({what}).")
        click.echo("Watch them: barnraise queue. Their files: barnraise queue results --wait")
    if added.sentence:
        click.echo(f"barnraise: {printable(added.sentence)}", err=True)
    return 1 if added.sentence else 0


def _check_sizes(chosen: RunOptions, each: str) -> None:
    """Raise RunError if a job would need more workers or machines than it gets."""
    if each == "device" and chosen.per_node > 1:
        raise RunError(
            f"a job on one device has one worker, and --per-node asks for {chosen.per_node}",
            hint="Give each job a whole machine: --each machine",
        )
    if each != "all" and chosen.min_nodes > 1:
        raise RunError(
            f"each job runs on one machine, and --min-nodes asks for {chosen.min_nodes}",
            hint="Give each job all machines: --each all",
        )


def _fit_workers(
    sources: Mapping[str, bytes],
    command: Sequence[str],
    chosen: RunOptions,
    options: AddOptions,
    on: tuple[str, ...],
) -> RunOptions:
    """Return options with which the workers of one job train one model; raise RunError if they cannot."""
    if options.separate or options.each == "device":
        return chosen
    if options.each == "all":
        refuse_separate_training(sources, command, chosen, on)
    elif command[0] in sources and training_style(sources, command[0]).kind == "separate":
        return replace(chosen, per_node=chosen.per_node or 1)  # it uses the machine by itself
    return chosen


def _print_commands(start: Sequence[str], expanded: Expanded, count: int) -> None:
    if expanded.swept:
        product = " x ".join(f"{values} of {name}" for name, values in expanded.swept)
        click.echo(f"{counted(count, 'job')}: {product}", err=True)
    for rest in expanded.commands[: min(count, _SHOWN)]:
        click.echo(f"  {shlex.join([*start, *rest])}", err=True)
    if count > _SHOWN:
        click.echo(f"  and {count - _SHOWN} more", err=True)
