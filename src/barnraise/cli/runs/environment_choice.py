"""Asks before an environment is built from a file that merely lies in the folder."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from msgspec.structs import replace

from barnraise.agent_client.run_options import RunOptions
from barnraise.agent_client.run_requests import GraphRequest, GraphResponse
from barnraise.artifacts import ArtifactStore, FolderManifest, read_files
from barnraise.cli.agent_call import ask
from barnraise.cli.terminal import is_terminal, wrapped
from barnraise.core.units import counted
from barnraise.environments.build_plan import SOURCES
from barnraise.environments.build_size import BuildSize, build_size
from barnraise.environments.builder import is_built, plan_environment


def choose_environment(
    store: ArtifactStore, folder: FolderManifest, chosen: RunOptions, on: tuple[str, ...], state: Path
) -> RunOptions:
    """Return the options with the environment that is used.

    A person at a terminal is asked if this machine does not have it yet.
    """
    if chosen.container or chosen.environment != "auto":
        return chosen
    if not any(entry.path in SOURCES for entry in folder.files):
        return chosen
    files = read_files(store, folder, lambda path: "/" not in path)
    plan = plan_environment(files, "auto")
    if is_built(plan, state / "environments"):
        return chosen
    size = build_size(plan, files)
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        _echo(decision_line(plan.source, size))
        return chosen
    machines = len(ask(GraphRequest(on=on), GraphResponse).nodes)
    _echo(alternative_line(plan.source, size))
    if click.confirm(question(plan.source, max(machines, chosen.min_nodes)), default=True, err=True):
        return chosen
    _echo("the script uses what is installed on each machine; `--env agent` does so without a question")
    return replace(chosen, environment="agent")


def question(source: str, machines: int) -> str:
    """Return the question before an environment is built."""
    return f"Build an environment from {source} on {counted(machines, 'machine')}?"


def alternative_line(source: str, size: BuildSize) -> str:
    """Return what the environment holds, and what happens without it."""
    return (
        f"{source} lists {size.text}; each machine would install its own. "
        "Without it, the script uses what is installed (`--env agent`)."
    )


def decision_line(source: str, size: BuildSize) -> str:
    """Return what is done where no person can be asked."""
    return f"each machine builds an environment from {source} ({size.text}); `--env agent` skips it"


def _echo(text: str) -> None:
    click.echo(wrapped(f"barnraise: {text}", indent="  "), err=True)
