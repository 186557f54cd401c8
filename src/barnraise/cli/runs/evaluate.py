"""Command ``eval``: lm-evaluation-harness on all machines. Light to import."""

from __future__ import annotations

from typing import Any

import click

from barnraise.cli.runs.options import RunCommandOptions, run_options, set_option, take_run_options

_MODULE = "barnraise.integrations.lm_eval"
_PASSED_ON = (
    *("model", "model_args", "tasks", "include_path", "num_fewshot", "limit", "batch_size", "requests"),
    "output",
)


@click.command("eval")
@click.option("--on", help="Machines, separated by commas (default: all).")
@run_options
@set_option
@click.option("--model", default="hf", help="Kind of model, as lm_eval names it (default: hf).")
@click.option("--model-args", metavar="TEXT", help="Arguments of the model, such as pretrained=./model.")
@click.option("--tasks", required=True, help="Tasks, separated by commas.")
@click.option("--include-path", metavar="FOLDER", help="A folder with tasks of your own, inside this one.")
@click.option("--num-fewshot", type=int, help="Examples before each question (default: the task's).")
@click.option("--limit", type=float, help="Use only this many samples of each task, for a trial.")
@click.option("--batch-size", help="Batch of the model (default: 1).")
@click.option(
    "--requests", type=click.IntRange(1), help="Requests that a machine takes at a time (default: 32)."
)
@click.option("--output", metavar="FILE", help="File of the results (default: eval.json).")
def eval_command(on: str | None, **options: Any) -> int:
    """Evaluate a language model on all machines with lm-evaluation-harness.

    This folder is sent. The numbers are those of one machine, also if machines are lost meanwhile.
    """
    from barnraise.cli.runs import run

    arguments = [_MODULE]
    for name in _PASSED_ON:
        value = options.pop(name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", f"{value}"]
    chosen = take_run_options(options)
    machines = tuple(name for name in (on or "").split(",") if name)
    return run.run("-m", arguments, chosen, RunCommandOptions(on=machines, variables=options["variables"]))
