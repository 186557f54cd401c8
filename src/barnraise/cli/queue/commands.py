"""Commands of ``barnraise queue`` with their options, and the functions that run them. Light to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from barnraise.cli.completion import complete_files, complete_machines
from barnraise.cli.help import misplaced_options
from barnraise.cli.project_file import RunKeysCommand
from barnraise.cli.queue.expand import lift_options
from barnraise.cli.runs.options import add_data, run_options, take_run_options
from barnraise.core.units import parse_size

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_jobs = click.argument("jobs", nargs=-1, metavar="[JOB]...")
_OWN = {  # may also stand after the script, and whether each takes a value
    "--each": True,
    "--after": True,
    "--priority": True,
    "--needs": True,
    "--retries": True,
    "--metric": True,
    "--best": True,
    "--dry-run": False,  # typed last, it must not add the jobs
}


class QueueAddCommand(RunKeysCommand):
    """Command whose own options may stand after the script. Lists in the other arguments are expanded."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Omit ``--wait`` from the help: a job waits for as long as it must."""
        for parameter in self.params:
            if isinstance(parameter, click.Option) and parameter.name == "wait_s":
                parameter.hidden = True
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, lift_options(args, _OWN))


@click.group("queue", invoke_without_command=True)
@click.pass_context
def queue_group(context: click.Context) -> int | None:
    """Run many jobs, each on a device that is free. Without a command, list them.

    \b
      barnraise queue add train.py --lr 1e-4,3e-4 --seed 0..3     add eight jobs
      barnraise queue                                             list them
      barnraise queue results --wait                              wait, and fetch their files
    """
    if context.invoked_subcommand is not None:
        return None
    from barnraise.cli.queue import listing

    return listing.show(everything=False, as_json=False)


@queue_group.command(
    "add",
    cls=QueueAddCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--each",
    type=click.Choice(["device", "machine", "all"]),
    default="device",
    help="What one job gets: a device (the default), a machine, or all machines.",
)
@click.option(
    "--after", multiple=True, metavar="JOB", help="Start when this job is done; may be repeated, or 3,5-8."
)
@click.option(
    "--priority", type=click.IntRange(-1000, 1000), default=0, help="Higher starts first (default: 0)."
)
@click.option(
    "--needs",
    type=parse_size,
    default="0",
    metavar="SIZE",
    help="Memory that each device of a job must have, such as 12GB.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 20),
    default=1,
    help="How often a job that fails is tried on another machine (default: 1).",
)
@click.option("--metric", default="", metavar="NAME", help="The logged value to compare (default: the loss).")
@click.option(
    "--best", type=click.Choice(["min", "max"]), default="min", help="Which value is best (default: min)."
)
@click.option(
    "--on",
    multiple=True,
    metavar="MACHINE",
    help="Only on this machine; may be repeated, or a,b,c.",
    shell_complete=complete_machines,
)
@run_options
@add_data
@click.option("--folder", type=click.Path(path_type=Path), help="The folder to send (default: this one).")
@click.option("--separate", is_flag=True, help="Each worker of a job trains its own model.")
@click.option("--dry-run", is_flag=True, help="Print the jobs and add none.")
@_as_json
@click.argument("script", shell_complete=complete_files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def _add(script: str, arguments: tuple[str, ...], **options: Any) -> int:
    """Add a job for each combination of the lists and ranges among the arguments of SCRIPT.

    \b
      barnraise queue add train.py --lr 1e-4,3e-4 --seed 0..3     eight jobs
    Arguments after -- are not expanded: barnraise queue add train.py --seed 0..3 -- --layers 64,64
    """
    from barnraise.cli.queue import add

    expanded = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for text in misplaced_options(click.get_current_context().command, expanded):
        click.echo(
            f"barnraise: {text} comes after {script}, so the script gets it; write it before the script "
            "if it is meant for barnraise",
            err=True,
        )
    chosen = take_run_options(options)
    return add.add(script, arguments, chosen, add.AddOptions(**options))


@queue_group.command("list")
@click.option("--all", "everything", is_flag=True, help="All jobs that have ended, not only the newest 30.")
@_as_json
def _list(everything: bool, as_json: bool) -> int:
    """List the jobs with their states and metrics, and the best one."""
    from barnraise.cli.queue import listing

    return listing.show(everything=everything, as_json=as_json)


@queue_group.command("cancel")
@_jobs
@click.option("--all", "everything", is_flag=True, help="All jobs that have not ended.")
@_as_json
def _cancel(jobs: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Cancel jobs by number (3, 5-8); those that run are stopped."""
    from barnraise.cli.queue import change

    return change.change("cancel", jobs, everything=everything, as_json=as_json)


@queue_group.command("pause")
@_jobs
@_as_json
def _pause(jobs: tuple[str, ...], as_json: bool) -> int:
    """Do not start these jobs (default: all that wait). Those that run go on."""
    from barnraise.cli.queue import change

    return change.change("pause", jobs, as_json=as_json)


@queue_group.command("resume")
@_jobs
@_as_json
def _resume(jobs: tuple[str, ...], as_json: bool) -> int:
    """Let paused jobs start (default: all)."""
    from barnraise.cli.queue import change

    return change.change("resume", jobs, as_json=as_json)


@queue_group.command("clear")
@_jobs
@_as_json
def _clear(jobs: tuple[str, ...], as_json: bool) -> int:
    """Remove ended jobs from the list (default: all). Their results may then be deleted."""
    from barnraise.cli.queue import change

    return change.change("clear", jobs, as_json=as_json)


@queue_group.command("move")
@click.argument("job", type=click.IntRange(1))
@click.option(
    "--before", type=click.IntRange(1), metavar="JOB", help="Before this job (default: to the front)."
)
@click.option("--last", is_flag=True, help="To the end.")
@click.option("--priority", type=click.IntRange(-1000, 1000), help="Change only its priority.")
@_as_json
def _move(job: int, before: int | None, last: bool, priority: int | None, as_json: bool) -> int:
    """Change the place of a waiting JOB in the order; without an option, move it to the front."""
    from barnraise.cli.queue import change

    return change.move(job, before=before or 0, last=last, priority=priority, as_json=as_json)


@queue_group.command("results")
@_jobs
@click.option("--wait", "waits", is_flag=True, help="Wait until the jobs have ended.")
def _results(jobs: tuple[str, ...], waits: bool) -> int:
    """Fetch the files of done jobs into barnraise-runs/ of this folder (default: all jobs).

    Exit code 1: a job failed or was cancelled.
    """
    from barnraise.cli.queue import results

    return results.bring(jobs, waits=waits)
