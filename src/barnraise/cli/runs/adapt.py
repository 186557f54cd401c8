"""``barnraise adapt``: shows how a plain script becomes one that trains on all machines together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from barnraise.agent_client.run_options import RunOptions
from barnraise.agent_client.run_requests import GraphRequest, GraphResponse
from barnraise.cli.agent_call import ask
from barnraise.core.errors import RunError
from barnraise.core.files import write_atomically
from barnraise.core.units import counted
from barnraise.environments.session_adapter import AdaptedScript, adapt_script, unified_diff
from barnraise.environments.training_style import replaceable_trainer, training_style
from barnraise.topology.graph import NodeFacts, decode_graph

_BY_HAND = "docs/session.md shows the lines to add by hand."


def run(script: Path, *, write: bool) -> int:
    """Print the diff for a script, or change the script. Return the exit code."""
    if not script.is_file():
        raise RunError(f"there is no script {script}", hint="Give the path of a Python file.")
    source = script.read_bytes()
    style = training_style({script.name: source}, script.name)
    if style.kind in ("session", "distributed", "sweep"):
        click.echo(f"{style.reason}: nothing to add", err=True)
        return 0
    text = source.decode("utf-8")
    try:
        adapted = adapt_script(text)
    except RunError as error:
        raise RunError(f"{script} cannot be adapted automatically: {error.message}", hint=_BY_HAND) from error
    if write:
        write_atomically(script, adapted.text.encode())
        click.echo(f"{script} now trains in a session. Try it alone first: python {script}", err=True)
    else:
        click.echo(unified_diff(text, adapted.text, script.name), nl=False)
    _echo_notes(adapted)
    return 0


def refuse_separate_training(
    sources: Mapping[str, bytes], command: Sequence[str], chosen: RunOptions, on: tuple[str, ...]
) -> None:
    """Raise RunError if several workers would each train the whole model of this script."""
    script = _entry(command, sources)
    if script is None or training_style(sources, script).kind != "separate":
        return
    workers = _workers(chosen, on)
    if workers <= 1:
        return
    text = sources[script].decode("utf-8", "replace")
    try:
        adapted = adapt_script(text)
    except RunError as error:
        lines = f"{_BY_HAND} (Automatically it is not possible: {error.message}.)"
    else:
        click.echo(
            f"barnraise: with these changes, the machines train one model together. {script} is unchanged:",
            err=True,
        )
        click.echo(unified_diff(text, adapted.text, script), nl=False, err=True)
        _echo_notes(adapted)
        lines = f"Make these changes, then run it again: barnraise adapt --write {script}"
    raise RunError(
        f"{script} uses neither barnraise nor torch.distributed, so each of {counted(workers, 'worker')} "
        "would train its own copy of the model; nothing was started",
        hint=f"{lines}\n     Or train on one machine: --on NAME. Or one model per machine: --separate",
    )


def warn_of_plain_trainer(sources: Mapping[str, bytes], command: Sequence[str]) -> None:
    """Print a hint if the script has a Trainer that trains outside a session."""
    script = _entry(command, sources)
    if script is None or training_style(sources, script).kind != "distributed":
        return
    if trainer := replaceable_trainer(sources, script):
        file, name = trainer
        click.echo(
            f"barnraise: {file} imports {name}, which trains as DDP: with equal shares, and from its start "
            "again if a machine disappears",
            err=True,
        )
        click.echo(f"  -> To change that: from barnraise.integrations.transformers import {name}", err=True)


def _entry(command: Sequence[str], sources: Mapping[str, bytes]) -> str | None:
    """Return the file that a command starts, or None if it is not in the folder."""
    if command[0] != "-m":
        return command[0]
    base = command[1].replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__main__.py") if path in sources), None)


def _workers(chosen: RunOptions, on: tuple[str, ...]) -> int:
    """Return how many workers a run would start on the machines that are connected now."""
    response = ask(GraphRequest(on=on), GraphResponse)
    graph = decode_graph(response.graph)
    chosen_nodes = [facts for facts in graph.nodes if facts.node in response.nodes]
    count = sum(chosen.per_node or _devices(facts) for facts in chosen_nodes)
    return max(count, chosen.min_nodes, len(on))


def _devices(facts: NodeFacts) -> int:
    devices = facts.machine.devices if facts.machine is not None else ()
    return max(1, sum(device.kind != "cpu" for device in devices))


def _echo_notes(adapted: AdaptedScript) -> None:
    for note in adapted.notes:
        click.echo(f"Note: {note}", err=True)
