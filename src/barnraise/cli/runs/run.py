"""``barnraise run``: packs the folder, has the cluster start it everywhere, and shows what happens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from barnraise.agent_client.profile import (
    DRY_RUN,
    PROFILE_FILE,
    SplitProfile,
    StepProfile,
    decode_profile,
)
from barnraise.agent_client.run_options import (
    MAX_TITLE,
    RunOptions,
    RunProgram,
    ScriptImports,
)
from barnraise.agent_client.run_requests import (
    ResultsRequest,
    ResultsResponse,
    RunRow,
    RunStarted,
    StartRunRequest,
)
from barnraise.artifacts import (
    RESULTS,
    ArtifactStore,
    FolderManifest,
    folder_limits,
    pack,
    read_files,
    store_directory,
    unpack_into,
)
from barnraise.cli.agent_call import ask, offer_agent
from barnraise.cli.plan.options import PlanOptions
from barnraise.cli.plan.parse import check, levels_of
from barnraise.cli.plan.plan import run_measured
from barnraise.cli.plan.split import run_split
from barnraise.cli.runs.adapt import refuse_separate_training, warn_of_plain_trainer
from barnraise.cli.runs.data_sets import read_data
from barnraise.cli.runs.environment_choice import choose_environment
from barnraise.cli.runs.failure_text import failure_hint, final_line, is_traceback_shown, restarted_lines
from barnraise.cli.runs.options import RunCommandOptions
from barnraise.cli.runs.run_view import watch
from barnraise.cli.terminal import painted
from barnraise.cli.waiting import waiting
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import RunEnvironmentError, RunError
from barnraise.core.names import similar_names
from barnraise.core.sanitize import coloured, printable
from barnraise.core.units import counted, format_size
from barnraise.environments.build_size import listed_packages
from barnraise.environments.script_imports import scan_imports
from barnraise.environments.script_paths import absolute_paths, data_hint
from barnraise.history.outcome import end_state
from barnraise.planning.inputs.codecs import CHOOSABLE
from barnraise.planning.inputs.levels import OPEN, VARIABLE

_ANSWER_S = 20.0
FORGIVEN = 3  # exit code: the run finished, but an error of the script on one machine was forgiven
_BY_SIZE = (
    "Use run = barnraise.init() and run.prepare(...) as docs/session.md shows, or plan by the model's size: "
    "barnraise plan --parameters 124M --batch 512"
)


def run(script: str, arguments: Sequence[str], chosen: RunOptions, options: RunCommandOptions) -> int:
    """Run the script on the cluster. Return the exit code of the first worker that failed, or 0."""
    _check_dry_run(options)
    settings_of_run = _own_variables(options)  # wrong levels are told before anything is sent
    settings = load_settings()
    store = ArtifactStore(store_directory(state_directory(settings)))
    folder, command = split_command(script, arguments, options.folder)
    with waiting(f"barnraise: reading the folder {folder.name}"):
        packed = pack(folder, store, folder_limits(settings))
    sources = python_sources(store, packed.manifest)
    needs = ScriptImports(required=options.imports) if options.imports else needs_in(sources, command)
    if options.dry_run:
        _check_session(sources, script)
    elif not options.separate:
        refuse_separate_training(sources, command, chosen, options.on)
    offer_agent()
    chosen = choose_environment(store, packed.manifest, chosen, options.on, state_directory(settings))
    data = read_data(options.data, options.models, store, settings)
    question = StartRunRequest(
        program=RunProgram(
            command=tuple(command),
            folder=packed.id,
            data=data,
            needs=needs,
            settings=tuple(settings_of_run),
            packages=0 if chosen.container else listed_packages(store, packed.manifest, chosen.environment),
        ),
        options=replace(
            chosen,
            title=chosen.title or Path(script).stem[:MAX_TITLE],
        ),
        variables=options.variables,
        on=options.on,
    )
    with waiting("barnraise: waiting for the machines"):
        started = ask(question, RunStarted, timeout_s=chosen.wait_s + _ANSWER_S)
    what = f"{counted(packed.files, 'file')}, {format_size(packed.bytes)}"
    where = ", ".join(started.nodes)
    click.echo(f"barnraise: run {started.run} of {folder.name} ({what}) on {where}", err=True)
    if len(started.nodes) > 1:
        _warn_of_local_paths(sources, command[0], folder, (*options.data, *options.models))
        warn_of_plain_trainer(sources, command)
    if options.detach:
        click.echo(started.run)
        return 0
    if options.dry_run:
        row = watch(started.run, all_ranks=options.all_output, stops=True, echo=partial(click.echo, err=True))
        code = say_end(row, all_output=options.all_output)
        return code or _show_profile(_profile(row, store), options)
    row = watch(started.run, all_ranks=options.all_output, stops=True)
    return conclude(row, store, folder, all_output=options.all_output)


def _warn_of_local_paths(
    sources: Mapping[str, bytes], script: str, folder: Path, data: Sequence[str]
) -> None:
    """Print a hint for absolute paths in the script that this machine has, outside the folder."""
    given = [Path(text.partition("=")[2].removeprefix("@")).expanduser() for text in data]
    for named in absolute_paths(sources, script):
        path = Path(named.path).expanduser()
        if not path.is_absolute() or not os.path.exists(path):
            continue
        if not any(path.resolve().is_relative_to(part.resolve()) for part in (folder, *given)):
            option, variable = data_hint(str(path if path.is_dir() else path.parent))
            where = f"{named.file}:{named.line}"
            click.echo(f"barnraise: {where} names {path}, which the other machines may not have", err=True)
            click.echo(f"  -> Send it with {option}, and read it from {variable}", err=True)
            return


def conclude(row: RunRow, store: ArtifactStore, folder: Path, *, all_output: bool = False) -> int:
    """Fetch the results, report the outcome, and return the exit code."""
    bring_results(row.run, store, folder / RESULTS / row.run)
    return say_end(row, all_output=all_output)


def say_end(row: RunRow, *, all_output: bool = False) -> int:
    """Print how a run ended, and return the exit code. ``all_output``: all ranks' output was shown."""
    for line in restarted_lines(row):
        click.echo(painted(f"barnraise: {printable(line)}", colour="yellow", err=True), err=True)
    if end_state(row.code, was_stopped=row.was_stopped) == "ended":
        code = FORGIVEN if any(not (failure.signal or failure.follows) for failure in row.failures) else 0
        remark = f", although a worker failed (exit code {code})" if code else ""
        click.echo(f"barnraise: {printable(final_line(row))}{remark}", err=True)
        if code:
            click.echo(f"  -> Traceback of the worker: barnraise ps {row.run}", err=True)
        return code
    if row.tail and not is_traceback_shown(row, all_output=all_output):
        where = f"rank {row.failed_rank} on {row.failed_on}" if row.failed_on else "the first failure"
        click.echo(painted(f"\n--- last output of {where}", bold=True, err=True), err=True)
        click.echo(coloured(row.tail.rstrip(), also="\n\t"), err=True)
        click.echo("---", err=True)
    click.echo(painted(f"barnraise: {printable(final_line(row))}", colour="red", err=True), err=True)
    if hint := failure_hint(row):
        click.echo(f"  -> {hint}", err=True)
    if row.generation:
        click.echo(f"  -> Full output of every machine: barnraise logs {row.run} --all", err=True)
    # A script's own 3 would look like a run that finished.
    return row.code if row.code and row.code != FORGIVEN else 1


def bring_results(run: str, store: ArtifactStore, target: Path) -> None:
    """Fetch the files that rank 0 wrote."""
    with waiting("barnraise: receiving the files that the script wrote"):
        response = ask(ResultsRequest(run), ResultsResponse, timeout_s=600.0, offer_start=False)
    if response.sentence:
        click.echo(f"barnraise: {printable(response.sentence)}", err=True)
    if not response.manifest:
        return
    count = unpack_into(store, response.manifest, target)
    files = [file for file in target.rglob("*") if file.is_file()]
    if len(files) == 1:
        click.echo(f"barnraise: the script wrote {os.path.relpath(files[0])}", err=True)
    else:
        click.echo(f"barnraise: the script wrote {count} files in {os.path.relpath(target)}", err=True)


def _check_dry_run(options: RunCommandOptions) -> None:
    if not options.dry_run:
        if options.wishes != PlanOptions(sync=options.wishes.sync, levels=options.wishes.levels):
            raise RunError(
                "--add, --json and --picture are about the plans that only a dry run shows",
                hint="Use `barnraise run --dry-run ...`, or leave them out.",
            )
    elif options.detach:
        raise RunError("a dry run ends in a moment", hint="Leave out --detach.")
    else:
        check(options.wishes)


def _own_variables(options: RunCommandOptions) -> list[tuple[str, str]]:
    """Return the environment variables for the workers. A dry run always measures exact steps."""
    if options.dry_run:
        return [(DRY_RUN, "1")]
    own = [("BARNRAISE_SYNC", "auto")] if options.wishes.sync == "auto" else []
    levels = levels_of(options.wishes, CHOOSABLE)
    return own if levels == OPEN else [*own, (VARIABLE, msgspec.json.encode(levels).decode())]


def _check_session(sources: Mapping[str, bytes], script: str) -> None:
    """Check that the script uses a session; without one, a dry run would train to the end."""
    sessions = [source for source in sources.values() if b"barnraise" in source]
    if not any(b".prepare(" in source or b".train_step(" in source for source in sessions):
        raise RunError(
            f"{script} does not train in a session, so a dry run has nothing to measure", hint=_BY_SIZE
        )


def _show_profile(profile: StepProfile | SplitProfile, options: RunCommandOptions) -> int:
    if isinstance(profile, SplitProfile):
        return run_split(profile, wishes=options.wishes)
    return run_measured(profile, on=options.on, wishes=options.wishes)


def _profile(row: RunRow, store: ArtifactStore) -> StepProfile | SplitProfile:
    """Read the measurements of rank 0; all other files of the dry run are ignored."""
    response = ask(ResultsRequest(row.run), ResultsResponse, timeout_s=600.0, offer_start=False)
    manifest = store.manifest(response.manifest) if response.manifest else None
    files = read_files(store, manifest, lambda path: path == PROFILE_FILE) if manifest is not None else {}
    if PROFILE_FILE not in files:
        why = f": {response.sentence}" if response.sentence else ""
        raise RunError(f"the script ended before two steps of a session were measured{why}", hint=_BY_SIZE)
    return decode_profile(files[PROFILE_FILE])


def split_command(script: str, arguments: Sequence[str], folder: Path | None) -> tuple[Path, list[str]]:
    """Return the folder to send and the arguments for Python in it."""
    if script == "-m":
        if not arguments:
            raise RunError(
                "-m needs the name of a module", hint="Name the module: barnraise run -m package.module"
            )
        return (folder or Path.cwd()).resolve(), ["-m", *arguments]
    path = Path(script)
    if script.startswith("-") and not path.is_file():
        raise RunError(f"there is no option {script.partition('=')[0]} here", hint=_option_hint(script))
    if not path.is_file():
        beside = (each.name for each in path.parent.glob("*.py")) if path.parent.is_dir() else ()
        near = similar_names(path.name, beside)
        guess = f"Did you mean {near}?" if near else "Give the path of a Python file in this folder."
        raise RunError(f"there is no script {script}", hint=guess)
    root = (folder or Path.cwd()).resolve()
    try:
        inside = path.resolve().relative_to(root)
    except ValueError:
        raise RunError(
            f"{script} is not in the folder that is sent, {root}",
            hint="Run it from its own folder, or name the folder with --folder.",
        ) from None
    return root, [inside.as_posix(), *arguments]


def _option_hint(word: str) -> str:
    """Return what to do about an option that the current command does not have."""
    context = click.get_current_context(silent=True)
    known = [name for param in context.command.params for name in param.opts] if context is not None else []
    near = similar_names(word.partition("=")[0], [name for name in known if name.startswith("--")])
    guess = f"Did you mean {near}? " if near else ""
    return f"{guess}See the options with --help. Those of the script come after its name."


def python_sources(store: ArtifactStore, manifest: FolderManifest) -> dict[str, bytes]:
    """Return the Python files of a packed folder by their paths."""
    return read_files(store, manifest, lambda path: path.endswith(".py"))


def needs_in(sources: Mapping[str, bytes], command: Sequence[str]) -> ScriptImports:
    if command[0] == "-m":
        return ScriptImports()
    if command[0] not in sources:
        raise RunError(
            f"{command[0]} is not among the files that are sent",
            hint="A rule in .gitignore or .barnraiseignore leaves it out; change the rule.",
        )
    needs = scan_imports(sources, command[0])
    if needs.syntax is not None:
        raise RunEnvironmentError(needs.syntax, hint="Correct the script; nothing was sent or started.")
    return needs
