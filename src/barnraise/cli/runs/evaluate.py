"""Command ``eval``: lm-evaluation-harness on all machines. Light to import."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from barnraise.agent_client.run_options import DATA_NAME
from barnraise.cli.completion import complete_machines
from barnraise.cli.project_file import RunKeysCommand
from barnraise.cli.runs.options import RunCommandOptions, run_options, set_option, take_run_options
from barnraise.core.errors import RunError
from barnraise.core.names import similar_names

_MODULE = "barnraise.integrations.lm_eval"
_MODEL = "model"  # its name in the run
_KIND = "hf"
_PASSED_ON = (
    *("kind", "model_args", "tasks", "include_path", "num_fewshot", "limit", "batch_size", "requests"),
    "output",
)
_SET_ELSEWHERE = {  # arguments of the model that a worker sets, and what to do about them
    "pretrained": "Leave it out: --model names the model. Or leave out --model, if each machine has it.",
    "device": "Leave it out: each worker uses its own device.",
    "batch_size": "Write it as an option of its own: --batch-size.",
}


@click.command("eval", cls=RunKeysCommand)
@click.option(
    "--on",
    multiple=True,
    metavar="MACHINE",
    help="Only on this machine; may be repeated, or a,b,c.",
    shell_complete=complete_machines,
)
@run_options
@set_option
@click.option(
    "--model",
    metavar="PATH|ID",
    help="Send this model: a folder, or an id in this machine's Hugging Face cache.",
)
@click.option("--kind", help="Kind of model, as lm_eval names it (default: hf).")
@click.option("--model-args", metavar="TEXT", help="More arguments of the model, such as dtype=float32.")
@click.option("--tasks", required=True, help="Tasks, separated by commas.")
@click.option("--include-path", metavar="FOLDER", help="A folder with tasks of your own, inside this one.")
@click.option("--num-fewshot", type=int, help="Examples before each question (default: the task's).")
@click.option("--limit", type=float, help="Use only this many samples of each task, for a trial.")
@click.option(
    "--batch-size",
    help="Requests that the model computes at once (default: 1). With one machine only: auto.",
)
@click.option(
    "--requests", type=click.IntRange(1), help="Requests that a machine takes at a time (default: 32)."
)
@click.option("--output", metavar="FILE", help="File of the results (default: eval.json).")
def eval_command(on: tuple[str, ...], model: str | None, **options: Any) -> int:
    """Evaluate a language model on all machines with lm-evaluation-harness.

    This folder and the model are sent. The metrics are printed, and their file comes back into
    barnraise-runs/. The numbers are those of one machine if the machines compute alike, also if machines
    are lost. Processors of different kinds may differ in the last bits of a result.
    """
    from barnraise.cli.runs import run

    _check_model_arguments(options["model_args"] or "", has_model=model is not None)
    kind = options["kind"] or _KIND
    _check_model(model, has_arguments=bool(options["model_args"]) or kind != _KIND)
    if options["include_path"] is not None:
        options["include_path"] = _inside(options["include_path"])
    machines = tuple(name for text in on for name in text.split(",") if name)
    _check_batch_size(options["batch_size"] or "", machines)
    arguments = [_MODULE]
    for name in _PASSED_ON:
        value = options.pop(name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", f"{value}"]
    options["title"] = options["title"] or "eval"
    chosen = take_run_options(options)
    models = (f"{_MODEL}={model}",) if model is not None else ()
    variables = options["variables"]
    command = RunCommandOptions(on=machines, models=models, variables=variables, imports=_imports(kind))
    return run.run("-m", arguments, chosen, command)


def _imports(kind: str) -> tuple[str, ...]:
    """Return what each machine must have; a machine that lacks it is left out, as in every run."""
    return ("lm_eval", "torch", *(("transformers", "accelerate") if kind.startswith("hf") else ()))


def _check_model(model: str | None, *, has_arguments: bool) -> None:
    """Raise RunError unless the model is named and can be sent."""
    from barnraise.cli.runs.data_sets import find_model

    if model is None:
        if has_arguments:
            return
        raise RunError("no model was named", hint="Name a folder or an id: barnraise eval --model ../merged")
    name, separator, rest = model.partition("=")
    if separator and re.fullmatch(DATA_NAME, name) and not Path(model).expanduser().exists():
        raise RunError(
            f"eval has one model, so --model {model} needs no name",
            hint=f"Leave the name out: --model {rest}",
        )
    if model.startswith("@"):
        return
    folder = find_model(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise RunError(
            f"{model} is an adapter, and lm_eval needs a whole model",
            hint="Write one first: barnraise export RUN ../merged --merged --base PATH|ID",
        )


def _check_batch_size(size: str, machines: Sequence[str]) -> None:
    """Raise RunError if several machines could each find a batch size of their own."""
    if size.startswith("auto") and len(machines) != 1:
        raise RunError(
            f"--batch-size {size} finds another size on each machine, so the numbers may differ",
            hint="Write a number. Or name one machine: --on MACHINE.",
        )


def _inside(folder: str) -> str:
    """Return the path of a folder with tasks, relative to the folder that is sent."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        near = similar_names(path.name, (each.name for each in Path.cwd().iterdir() if each.is_dir()))
        guess = f"Did you mean {near}?" if near else "Name the folder that has the YAML files of the tasks."
        raise RunError(f"there is no folder {folder} with tasks", hint=guess)
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        raise RunError(
            f"{folder} is outside of the folder that is sent, {Path.cwd()}",
            hint="Copy the tasks into this folder, or type the command in a folder that contains them.",
        ) from None


def _check_model_arguments(text: str, *, has_model: bool) -> None:
    """Raise RunError if ``--model-args`` sets what a worker sets: lm_eval would only say TypeError."""
    for argument in text.split(","):
        name = argument.partition("=")[0].strip()
        if name in _SET_ELSEWHERE and (name != "pretrained" or has_model):
            raise RunError(f"--model-args must not set {name}", hint=_SET_ELSEWHERE[name])
