"""The ``barnraise`` command: its verbs, and how an error reaches a person."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from barnraise import __version__
from barnraise.cli.completion import (
    complete_active_runs,
    complete_commands,
    complete_ended_runs,
    complete_files,
    complete_machines,
    complete_pages,
    complete_runs,
)
from barnraise.cli.help import SectionedGroup, misplaced_options
from barnraise.cli.history.commands import runs_group
from barnraise.cli.history.report_command import report_command
from barnraise.cli.history.track_command import track_command
from barnraise.cli.hub.commands import hub_group, invite_command
from barnraise.cli.machine.commands import machine_commands
from barnraise.cli.plan.options import planning_options, size_options, take_wishes
from barnraise.cli.project_file import ProjectFileCommand
from barnraise.cli.queue.commands import queue_group
from barnraise.cli.runs.evaluate import eval_command
from barnraise.cli.runs.export import checkpoint_group, export_command
from barnraise.cli.runs.options import RunCommandOptions, add_data, run_options, set_option, take_run_options
from barnraise.cli.watch.command import watch_command
from barnraise.core.errors import BarnraiseError
from barnraise.core.sanitize import printable

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@click.group(
    "barnraise",
    cls=SectionedGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="barnraise %(version)s", help="Print the version and exit.")
@click.pass_context
def app(context: click.Context) -> None:
    """Train PyTorch models on the machines you already own, together.

    \b
    The first steps:
      barnraise pair            on one machine; it shows a code
      barnraise join CODE       on the other
      barnraise run train.py    on any of them

    \b
    With friends over the internet:
      barnraise hub up train.py      on one machine; it prints an invite
      barnraise join --invite TEXT   on every friend's
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _flag(name: str, help: str) -> Decorator:
    return click.option(name, is_flag=True, help=help)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@app.command("up")
@_flag("--detach", "Run in the background.")
@click.option(
    "--psk-file", type=click.Path(path_type=Path), help="A pre-shared key, to join without a typed code."
)
@_flag("--witness", "Only vote; never take work (for an old machine that is always on).")
def _up(detach: bool, psk_file: Path | None, witness: bool) -> int:
    """Start this machine's agent."""
    from barnraise.cli.cluster import up

    return up.run(detach=detach, psk_file=psk_file, witness=witness)


@app.command("down")
@_as_json
def _down(as_json: bool) -> int:
    """Stop this machine's agent, after it has left the cluster properly."""
    from barnraise.cli.cluster import members

    return members.down(as_json=as_json)


@app.command("status")
@_as_json
@_flag("--graph", "Draw the machines and their links.")
@_flag("--measure", "Measure this machine's links again first (at most a second of traffic each).")
def _status(as_json: bool, graph: bool, measure: bool) -> int:
    """Show the cluster: machines, links and the coordinator."""
    from barnraise.cli.cluster import status

    return status.run(as_json=as_json, graph=graph, measure=measure)


@app.command("nodes")
@_as_json
def _nodes(as_json: bool) -> int:
    """List the machines with their whole ids, roles and hardware."""
    from barnraise.cli.cluster import status

    return status.nodes(as_json=as_json)


@app.command("pair")
@_flag("--guest", "Let it contribute, but run nothing here.")
@click.option("--wait/--no-wait", default=True, help="Wait until the code is used (the default), or not.")
@click.option("--machines", type=click.IntRange(1, 64), default=1, help="How many join, one code for each.")
@_flag("--yes", "Do not ask before torch is installed here, if it is missing.")
@_as_json
def _pair(**options: Any) -> int:
    """Show a code with which another machine joins. Starts the agent if none runs."""
    from barnraise.cli.cluster import pair

    return pair.run(**options)


@app.command("join")
@click.argument("code", required=False)
@click.option("--at", metavar="HOST", help="The other machine's address, if it is not found automatically.")
@_flag("--guest", "Agree to be a guest only.")
@click.option("--invite", metavar="TEXT", help="Train a friend's model over the internet instead; - asks.")
@_flag("--yes", "Do not ask before torch is installed; with --invite, before the script is started.")
@click.option("--name", default="", help="With --invite: what this machine is called there.")
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="FOLDER", help="With --invite: what the script writes."
)
@_flag("--quiet", "With --invite: leave the machine usable (lowest priority, one core free).")
@_flag("--site", "With --invite: train on all machines of this cluster, which count as one there.")
@_flag("--no-sandbox", "With --invite: let the script do everything that you can do.")
@_as_json
def _join(code: str | None, **options: Any) -> int:
    """Join the cluster of the machine that shows CODE, or a friend's run with --invite.

    Starts the agent if none runs. For "-" instead of CODE or TEXT it asks, so that no other user of this
    machine sees the secret.
    """
    from barnraise.cli.cluster import join

    return join.run(code, join.JoinOptions(**options))


@app.command("unpair")
@click.argument("node", metavar="MACHINE", shell_complete=complete_machines)
@_flag("--yes", "Do not ask for confirmation.")
@_as_json
def _unpair(node: str, yes: bool, as_json: bool) -> int:
    """Remove MACHINE (its name or id) from the cluster permanently."""
    from barnraise.cli.cluster import members

    return members.unpair(node=node, yes=yes, as_json=as_json)


@app.command("leave")
@_flag("--yes", "Do not ask for confirmation.")
@_as_json
def _leave(yes: bool, as_json: bool) -> int:
    """Leave the cluster permanently. To return, this machine must pair again."""
    from barnraise.cli.cluster import members

    return members.leave(yes=yes, as_json=as_json)


@app.command("rename")
@click.argument("name")
@_as_json
def _rename(name: str, as_json: bool) -> int:
    """Give this machine another NAME."""
    from barnraise.cli.cluster import members

    return members.rename(name=name, as_json=as_json)


@app.command("continue")
@click.option(
    "--without",
    shell_complete=complete_machines,
    multiple=True,
    required=True,
    metavar="MACHINE",
    help="A machine that is switched off; may be repeated.",
)
@_as_json
def _continue(without: tuple[str, ...], as_json: bool) -> int:
    """Continue without machines that are switched off, if too few are left to decide."""
    from barnraise.cli.cluster import members

    return members.go_on(without=list(without), as_json=as_json)


@app.group("psk")
def _psk() -> None:
    """Manage pre-shared keys, for machines without a person to type a code."""


@_psk.command("new")
@_flag("--guest", "Admit guests instead of owners.")
@click.option("--output", type=click.Path(path_type=Path), help="Write it to this new file (mode 0600).")
@_as_json
def _psk_new(guest: bool, output: Path | None, as_json: bool) -> int:
    """Create a key of 256 bits; a machine that has it may join while this agent runs."""
    from barnraise.cli.cluster import members

    return members.new_psk(guest=guest, output=output, as_json=as_json)


@app.command("doctor")
@_flag("--all", "Also show the checks that passed.")
@_as_json
def _doctor(all: bool, as_json: bool) -> int:
    """Find what keeps machines from working, and how to fix it.

    Exit code 0: nothing failed (there may be warnings). Exit code 1: a check failed.
    """
    from barnraise.cli.doctor import doctor

    return doctor.run(as_json=as_json, everything=all)


_on = click.option(
    "--on",
    multiple=True,
    metavar="MACHINE",
    help="Only on this machine; may be repeated, or a,b,c.",
    shell_complete=complete_machines,
)


def _names(on: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for text in on for name in text.split(",") if name)


@app.command(
    "run",
    cls=ProjectFileCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_on
@run_options
@set_option
@add_data
@click.option("--folder", type=click.Path(path_type=Path), help="The folder to send (default: this one).")
@click.option("--all", "all_output", is_flag=True, help="Show every worker's output, not only rank 0's.")
@_flag("--detach", "Print the run's name and return.")
@_flag("--separate", "Each worker trains its own model; they do not train one model together.")
@_flag("--dry-run", "Measure a few steps, keep nothing, and show plans, as `barnraise plan` does.")
@planning_options
@click.argument("script", shell_complete=complete_files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def _run(script: str, arguments: tuple[str, ...], **options: Any) -> int:
    """Train with SCRIPT on all machines. Options go before the script; the rest is passed to it.

    -m MODULE instead of a script runs a module. Options that a project always needs may stand in the
    table [run] of barnraise.toml beside the script, such as: on = ["mac", "pc"].
    """
    from barnraise.cli.runs import run

    for text in misplaced_options(_run, arguments):
        click.echo(
            f"barnraise: {text} comes after {script}, so the script gets it; write it before the script "
            "if it is meant for barnraise",
            err=True,
        )
    options["on"], options["wishes"] = _names(options["on"]), take_wishes(options)
    chosen = take_run_options(options)
    return run.run(script, arguments, chosen, RunCommandOptions(**options))


@app.command("adapt")
@click.argument("script", type=click.Path(path_type=Path))
@_flag("--write", "Change the script itself instead of printing a diff.")
def _adapt(script: Path, write: bool) -> int:
    """Print the lines that let SCRIPT train one model on all machines, as a diff."""
    from barnraise.cli.runs import adapt

    return adapt.run(script, write=write)


@app.command("plan", cls=ProjectFileCommand, keys_of=_run)
@size_options
@_on
@planning_options
def _plan(on: tuple[str, ...], **options: Any) -> int:
    """Predict which machines to train on, how, and how fast. Starts nothing.

    From the size of a model; `barnraise run --dry-run` measures your own script instead.
    """
    from barnraise.cli.plan import plan

    wishes = take_wishes(options)
    return plan.run(plan.Size(**options), on=_names(on), wishes=wishes)


@app.command("ps")
@click.argument("run", required=False, shell_complete=complete_runs)
@_flag("--all", "Also runs that ended long ago.")
@_as_json
def _ps(run: str | None, all: bool, as_json: bool) -> int:
    """List the runs, or show one."""
    from barnraise.cli.runs import runs

    return runs.ps(run=run, everything=all, as_json=as_json)


@app.command("logs")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--rank", type=click.IntRange(0, 1024), help="Rank of the worker (default: the main one).")
@_flag("--all", "Every worker's output.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run ends.")
def _logs(run: str | None, rank: int | None, all: bool, follow: bool) -> int:
    """Print the output of the workers of RUN (default: the newest run)."""
    from barnraise.cli.runs import runs

    return runs.logs(run=run or runs.newest_run(), rank=rank, all_ranks=all, follow=follow)


@app.command("open")
@click.option(
    "--on", metavar="MACHINE", default="", help="Its page instead.", shell_complete=complete_machines
)
@_flag("--print", "Only print the link, and open no browser.")
@_as_json
def _open(on: str, print: bool, as_json: bool) -> int:
    """Open the page of this machine, with its runs, in a browser.

    The link works once, for two minutes. It leads to this machine only, also with --on.
    """
    from barnraise.cli.cluster import page

    return page.open_page(on=on, only_print=print, as_json=as_json)


@app.command("stop")
@click.argument("run", required=False, shell_complete=complete_active_runs)
@_flag("--hard", "Kill immediately, without ten seconds to save.")
@_as_json
def _stop(run: str | None, hard: bool, as_json: bool) -> int:
    """Stop RUN on every machine (default: the newest active run)."""
    from barnraise.cli.runs import runs

    return runs.stop(run=run or runs.newest_run(active=True), hard=hard, as_json=as_json)


@app.command("attach")
@click.argument("run", required=False, shell_complete=complete_runs)
@_flag("--all", "Show every worker's output, not only rank 0's.")
def _attach(run: str | None, all: bool) -> int:
    """Watch RUN (default: the newest) as if it had been started here. Ctrl-C leaves it running."""
    from barnraise.cli.runs import runs

    return runs.attach(run=run or runs.newest_run(), all_ranks=all)


@app.command("resume")
@click.argument("run", required=False, shell_complete=complete_ended_runs)
@_on
@set_option
@_flag("--all", "Show every worker's output, not only rank 0's.")
@_flag("--detach", "Print the new run's name and return.")
def _resume(
    run: str | None, on: tuple[str, ...], variables: tuple[tuple[str, str], ...], all: bool, detach: bool
) -> int:
    """Continue RUN (default: the newest), which has ended, from its newest complete checkpoint."""
    from barnraise.cli.runs import resume, runs

    chosen = run or runs.newest_run()
    return resume.resume(chosen, on=_names(on), variables=variables, all_ranks=all, detach=detach)


@app.command("clean")
@click.argument("run", required=False)
@_flag("--all", "Also remove ended runs that could be resumed, and every environment not in use.")
@_flag("--dry-run", "Only show what would be removed.")
@_flag("--yes", "Do not ask for confirmation.")
@_as_json
def _clean(run: str | None, all: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Free disk space: remove old runs and unused files of this machine, or only RUN."""
    from barnraise.cli.runs import clean

    return clean.clean(run=run or "", everything=all, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command("accept")
@click.argument("run", shell_complete=complete_active_runs)
@_flag("--yes", "Do not ask for confirmation.")
@_flag("--refuse", "Refuse the run.")
@_flag("--no-sandbox", "Let it do everything that you can do.")
@_as_json
def _accept(run: str, yes: bool, refuse: bool, no_sandbox: bool, as_json: bool) -> int:
    """Show what RUN would do on this guest machine, and accept or refuse it."""
    from barnraise.cli.runs import runs

    return runs.accept(run=run, yes=yes, refuse=refuse, is_sandboxed=not no_sandbox, as_json=as_json)


@app.command("self-test")
def _self_test() -> int:
    """Prove on this machine alone that everything works. Needs torch.

    Three nodes pair, train together, lose a worker and get it back; nothing of yours is touched.
    """
    from barnraise.cli.machine import self_test

    return self_test.run()


@app.group("service")
def _service() -> None:
    """Let the operating system start this machine's agent."""


@_service.command("install")
@_as_json
def _service_install(as_json: bool) -> int:
    """Start the agent now and whenever you log in."""
    from barnraise.cli.services import service

    return service.install(as_json=as_json)


@_service.command("remove")
@_as_json
def _service_remove(as_json: bool) -> int:
    """Stop the agent, and do not start it at login any more."""
    from barnraise.cli.services import service

    return service.remove(as_json=as_json)


@_service.command("status")
@_as_json
def _service_status(as_json: bool) -> int:
    """Show whether the service is installed and running."""
    from barnraise.cli.services import service

    return service.status(as_json=as_json)


@app.command("uninstall")
@_flag("--yes", "Do not ask.")
@_flag("--hard", "Also while a run uses this machine; the run continues on the others.")
def _uninstall(yes: bool, hard: bool) -> int:
    """Remove what Barnraise keeps on this machine: agent, service, state and settings.

    It says what that is and asks first. The last line is the command that removes the program itself.
    """
    from barnraise.cli import uninstall

    return uninstall.run(yes=yes, hard=hard)


@app.command("listen")
@click.option("--port", type=int, help="TCP port to listen on (default: 52416).")
@click.option(
    "--trust",
    multiple=True,
    metavar="NODEID",
    help="Id of a machine to trust; repeat for more. Replaces [trust] nodes.",
)
@_flag("--until-idle", "End when the last worker of this machine has left.")
def _listen(port: int | None, trust: tuple[str, ...], until_idle: bool) -> int:
    """Listen on this machine's port, without an agent. For workers that you start by hand."""
    from barnraise.cli.cluster import listen

    return listen.run(port=port, trust=list(trust), until_idle=until_idle)


@app.command("audit")
@click.option("--since", default="", help="Only newer lines: a time such as 2h or 3d, or a date.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=50, help="How many lines; 0: all.  [default: 50]"
)
@_as_json
def _audit(since: str, limit: int, as_json: bool) -> int:
    """Show what changed trust and ran code on this machine."""
    from barnraise.cli.machine import audit

    return audit.run(since=since, limit=limit, as_json=as_json)


@app.command("settings")
def _settings() -> None:
    """Show the settings in force and where each came from. Needs no agent."""
    from barnraise.cli.machine import settings

    settings.run()


@app.command("torch")
@_flag("--install", "Install the torch that fits this machine.")
@_flag("--yes", "With --install: do not ask.")
def _torch(install: bool, yes: bool) -> int:
    """Show how to install torch here, and what is installed; or install it. Needs no agent."""
    from barnraise.cli.machine import torch_install

    return torch_install.run(install=install, yes=yes)


@app.command("help")
@click.argument("command", required=False, shell_complete=complete_commands)
@click.pass_context
def _help(context: click.Context, command: str | None) -> None:
    """Show all commands, or the help of COMMAND."""
    assert context.parent is not None
    if command is None:
        click.echo(context.parent.get_help())
        return
    _, subcommand, _ = app.resolve_command(context.parent, [command])
    assert subcommand is not None
    with click.Context(subcommand, info_name=command, parent=context.parent) as inner:
        click.echo(subcommand.get_help(inner))


@app.command("explain")
@click.argument("code", required=False, shell_complete=complete_pages)
def _explain(code: str | None) -> int:
    """Explain an error CODE or a check of doctor: causes, and what to do."""
    from barnraise.cli import explain

    return explain.run(code)


@app.command("version")
def _version() -> None:
    """Print the version of Barnraise."""
    click.echo(f"barnraise {__version__}")


@app.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> None:
    """Print a script that completes commands, machines and runs with the Tab key.

    \b
    For bash, add this line to ~/.bashrc:
      eval "$(barnraise completion bash)"
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(app, {}, "barnraise", "_BARNRAISE_COMPLETE").source())


for _command in (
    hub_group,
    invite_command,
    *machine_commands,
    eval_command,
    export_command,
    checkpoint_group,
    queue_group,
    runs_group,
    report_command,
    track_command,
    watch_command,
):
    app.add_command(_command)


def main() -> None:
    """Run a command; our own errors are a sentence and a hint, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file on Windows may lack characters that a name has
            stream.reconfigure(errors="replace")
    try:
        code = app.main(standalone_mode=False)
    except BarnraiseError as error:
        from barnraise.cli.explain import more_about

        text = printable(str(error), also="\n\t")  # it may quote another machine
        click.echo(f"barnraise: {text}\n     {more_about(error.code)}", err=True)
        sys.exit(1)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
