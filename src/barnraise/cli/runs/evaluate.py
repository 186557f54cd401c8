"""Command ``eval``: lm-evaluation-harness on all machines. Light to import."""

from __future__ import annotations

from typing import Any

import click

from barnraise.cli.completion import complete_machines
from barnraise.cli.project_file import RunKeysCommand
from barnraise.cli.runs.options import RunCommandOptions, run_options, set_option, take_run_options
from barnraise.core.errors import RunError

_MODULE = "barnraise.integrations.lm_eval"
_MODEL = "model"  # its name in the run
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
@click.option("--batch-size", help="Requests that the model computes at once (default: 1).")
@click.option(
    "--requests", type=click.IntRange(1), help="Requests that a machine takes at a time (default: 32)."
)
@click.option("--output", metavar="FILE", help="File of the results (default: eval.json).")
def eval_command(on: tuple[str, ...], model: str | None, **options: Any) -> int:
    """Evaluate a language model on all machines with lm-evaluation-harness.

    This folder and the model are sent. The metrics are printed, and their file comes back into
    barnraise-runs/. The numbers are those of one machine, also if machines are lost.
    """
    from barnraise.cli.runs import run

    _check_model_arguments(options["model_args"] or "", has_model=model is not None)
    arguments = [_MODULE]
    for name in _PASSED_ON:
        value = options.pop(name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", f"{value}"]
    options["title"] = options["title"] or "eval"
    chosen = take_run_options(options)
    machines = tuple(name for text in on for name in text.split(",") if name)
    models = (f"{_MODEL}={model}",) if model is not None else ()
    variables = options["variables"]
    return run.run(
        "-m", arguments, chosen, RunCommandOptions(on=machines, models=models, variables=variables)
    )


def _check_model_arguments(text: str, *, has_model: bool) -> None:
    """Raise RunError if ``--model-args`` sets what a worker sets: lm_eval would only say TypeError."""
    for argument in text.split(","):
        name = argument.partition("=")[0].strip()
        if name in _SET_ELSEWHERE and (name != "pretrained" or has_model):
            raise RunError(f"--model-args must not set {name}", hint=_SET_ELSEWHERE[name])
