"""``barnraise uninstall``: removes all that Barnraise keeps on this machine, after it has said what."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import click
import psutil

from barnraise.agent.disk.usage import used_bytes
from barnraise.agent_client.bootstrap import standing_of
from barnraise.agent_client.cluster_requests import ShutdownRequest, StatusRequest, StatusResponse
from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from barnraise.cli.agent_call import ask
from barnraise.cli.cluster.members import confirm, end_agent
from barnraise.cli.hub.directories import is_in_use, kept_hubs, workspace_root
from barnraise.cli.services.base import ServiceManager
from barnraise.cli.services.service import manager_here
from barnraise.cli.terminal import wrapped
from barnraise.core.command import runner
from barnraise.core.config import (
    CONFIG_VARIABLE,
    Settings,
    default_config_path,
    load_settings,
    state_directory,
)
from barnraise.core.errors import AgentError
from barnraise.core.installation import uninstall_command
from barnraise.core.units import counted, format_size

# What Barnraise writes into the state directory. Other files there are the user's, and stay.
_STATE_ENTRIES = (
    *(
        "agent.log*",
        "audit.log*",
        "cluster.db*",
        "containers",
        "environments",
        "history",
        "hub",
        "hubs",
        "ipc",
        "journals.db*",
        "listener.*",
        "node.*",
        "notifications.db*",
    ),
    *("openssl.cnf", "runs", "secret", "store", "supervisors"),
)
_SERVICE_S = 30.0
_EXIT_S = 15.0
_UNDONE = (
    "This cannot be undone: what runs have written here and nowhere else is lost, with their checkpoints and "
    "logs. This machine's key is lost, too; to return to its cluster, it must pair again."
)


@dataclass(frozen=True)
class Removal:
    """Things that will be removed, and reasons against it.

    ``name``: of this machine in its cluster. ``others``: the other machines of the cluster.
    """

    state: Path
    entries: tuple[Path, ...]
    bytes: int
    strangers: tuple[str, ...] = ()
    config: Path | None = None
    service: str = ""
    agent: int = 0
    listener: int = 0
    name: str = ""
    others: tuple[str, ...] = ()
    active_runs: tuple[str, ...] = ()
    active_hubs: tuple[str, ...] = ()
    hubs: tuple[str, ...] = ()


def run(*, yes: bool, hard: bool) -> int:
    """Show what will be removed, ask, and remove it. Return 1 if something could not be deleted."""
    settings = load_settings()
    manager = _manager(state_directory(settings))
    removal = _collect(settings, manager)
    check_unused(removal, hard=hard)
    click.echo(describe(removal))
    if is_empty(removal):
        _delete_if_empty(removal.state)
        click.echo(_remaining(removal))
        return 0
    confirm("Remove all this?", yes)
    if removal.service and manager is not None:
        click.echo(f"{manager.remove().sentence.split(';')[0]}.")
    if removal.agent and standing_of(removal.state) is not None:
        end_agent(ShutdownRequest())
        click.echo("The agent has stopped.")
    _wait_for_exit(removal.agent)
    problems = _delete((*removal.entries, *([removal.config] if removal.config else [])))
    for folder in {removal.state, *([removal.config.parent] if removal.config else [])}:
        _delete_if_empty(folder)
    click.echo("\n".join(problems) or f"Deleted {format_size(removal.bytes)}.")
    click.echo(_remaining(removal))
    return 1 if problems else 0


def describe(removal: Removal) -> str:
    """Return what will be removed, what stays, and what cannot be undone. Pure."""
    steps = []
    if removal.others:
        steps.append(f"leave the cluster with {', '.join(removal.others)}")
    if removal.service:
        steps.append(f"remove the service {removal.service}")
    if removal.agent:
        steps.append(f"stop the agent (pid {removal.agent})")
    if removal.entries:
        what = "this machine's key, cluster, runs, logs and files"
        steps.append(f"delete {what} in {removal.state} ({format_size(removal.bytes)})")
    steps += [f"delete the model and the state of the hub {name}" for name in removal.hubs]
    if removal.config is not None:
        steps.append(f"delete the settings {removal.config}")
    if is_empty(removal):
        return "Barnraise keeps nothing on this machine."
    lines = ["This will:", *(wrapped(f"  - {step}", indent="    ") for step in steps)]
    if removal.strangers:
        kept = f"These files in {removal.state} are not Barnraise's and stay: {', '.join(removal.strangers)}."
        lines.append(wrapped(kept))
    lines.append("Folders called barnraise-runs, beside your scripts, stay.")
    return "\n".join([*lines, "", wrapped(_UNDONE)])


def is_empty(removal: Removal) -> bool:
    """Tell whether there is nothing to remove. Pure."""
    return not (removal.entries or removal.config or removal.service or removal.agent or removal.listener)


def check_unused(removal: Removal, *, hard: bool) -> None:
    """Raise AgentError if something uses this machine. ``hard``: a run may lose it. Pure."""
    if removal.listener:
        raise AgentError(
            f"workers that were started without an agent use this machine (pid {removal.listener})",
            hint="Wait until they have ended, or stop them.",
        )
    if removal.active_hubs:
        raise AgentError(
            f"these commands for a hub still run here: {', '.join(removal.active_hubs)}",
            hint="Stop them with Ctrl-C where they run.",
        )
    if removal.active_runs and not hard:
        runs = ", ".join(removal.active_runs)
        raise AgentError(
            f"this machine takes part in {counted(len(removal.active_runs), 'run')}: {runs}",
            hint=f"Stop it: barnraise stop {removal.active_runs[0]}. Or let it go on without this machine: "
            "barnraise uninstall --hard",
        )


def _remaining(removal: Removal) -> str:
    """Return what is left to do for the user."""
    lines = []
    if removal.others:
        text = f"{', '.join(removal.others)} still know this machine. Type on one of them:"
        lines += [wrapped(text), f"  barnraise unpair {removal.name}"]
    has_pip = runner(_SERVICE_S)([sys.executable, "-m", "pip", "--version"]).returncode == 0
    command = uninstall_command(sys.executable, Path(sys.prefix), has_pip=has_pip)
    return "\n".join([*lines, "To remove the program itself:", f"  {command}"])


def _collect(settings: Settings, manager: ServiceManager | None) -> Removal:
    state = state_directory(settings)
    names = sorted(entry.name for entry in state.iterdir())
    ours = [name for name in names if any(fnmatch(name, pattern) for pattern in _STATE_ENTRIES)]
    config = None if os.environ.get(CONFIG_VARIABLE) else default_config_path()
    standing = standing_of(state)
    status, runs = None, RunsResponse(())
    if standing is not None and standing.agent:
        status = ask(StatusRequest(), StatusResponse, offer_start=False)
        runs = ask(RunsRequest(), RunsResponse, offer_start=False)
    workspaces = workspace_root(settings)
    own = next((row.name for row in status.nodes if row.state == "this"), "") if status else ""
    service = manager.status() if manager is not None else None
    return Removal(
        state=state,
        entries=tuple(state / name for name in ours),
        bytes=_bytes_of([state / name for name in ours]),
        strangers=tuple(name for name in names if name not in ours),
        config=config if config is not None and config.is_file() else None,
        service=service.file if service is not None and service.installed else "",
        agent=standing.pid if standing is not None and standing.agent else 0,
        listener=standing.pid if standing is not None and not standing.agent else 0,
        name=own,
        others=tuple(row.name for row in status.nodes if row.name != own) if status else (),
        active_runs=tuple(row.run for row in runs.runs if row.phase != "ended" and own in row.machines),
        active_hubs=tuple(path.name for path in _folders(workspaces) if is_in_use(path)),
        hubs=tuple(path.name for path in kept_hubs(settings)),
    )


def _manager(state: Path) -> ServiceManager | None:
    try:
        return manager_here(runner(_SERVICE_S), state)
    except AgentError:  # no services on this system, so none to remove
        return None


def _wait_for_exit(pid: int) -> None:
    """Wait until the agent's process has ended, because it writes to its directory until then."""
    deadline = time.monotonic() + _EXIT_S
    while pid and time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.05)


def _folders(top: Path) -> list[Path]:
    return sorted(top.iterdir()) if top.is_dir() else []


def _bytes_of(paths: Iterable[Path]) -> int:
    total, counted_files = 0, set[tuple[int, int]]()
    for path in paths:
        try:
            total += used_bytes(path, counted_files) if path.is_dir() else path.lstat().st_size
        except OSError:  # the agent deleted it meanwhile
            continue
    return total


def _delete(paths: Iterable[Path]) -> list[str]:
    """Delete files and folders; return a sentence for each that stays."""
    problems = []
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            problems.append(f"{path} could not be deleted: {error.strerror or error}")
    return problems


def _delete_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # it has other files
        pass
