"""Directories of the hubs on this machine, and the start of their processes.

``hub`` in the state directory has a folder for each hub that is hosted here. ``hubs`` has one folder for each
running command that hosts a hub or trains for one; its name ends in the command's pid.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from barnraise.cli.child_process import ChildProcess
from barnraise.core.config import Settings, state_directory
from barnraise.core.errors import HubError
from barnraise.hub.storage.addresses import known_addresses

if TYPE_CHECKING:
    from barnraise.hub.private_options import PrivateOptions

_LOCAL, _PROXIED = "local-address", "proxied"
_PRIVATE_OPTIONS = "private-options"


def top_folder(settings: Settings) -> Path:
    return state_directory(settings) / "hub"


def workspace_root(settings: Settings) -> Path:
    return state_directory(settings) / "hubs"


def is_in_use(workspace: Path) -> bool:
    """Tell whether the command that this folder belongs to still runs."""
    pid = workspace.name.rpartition("-")[2]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def workspaces_with(settings: Settings, name: str) -> list[Path]:
    """List the folders of running commands that hold such a file."""
    top = workspace_root(settings)
    folders = sorted(top.iterdir()) if top.is_dir() else []
    return [workspace for workspace in folders if is_in_use(workspace) and (workspace / name).exists()]


def kept_hubs(settings: Settings) -> list[Path]:
    top = top_folder(settings)
    return sorted(path for path in top.iterdir() if (path / "hub.db").exists()) if top.is_dir() else []


def kept_hub(name: str, settings: Settings) -> Path:
    """Return the directory of the hub with this name, or of the only hub."""
    top, names = top_folder(settings), [path.name for path in kept_hubs(settings)]
    if name and name in names:
        return top / name
    if not name and len(names) == 1:
        return top / names[0]
    if not names:
        raise HubError("no hub is kept on this machine", hint="Begin one: barnraise hub up train.py")
    sentence = f"there is no hub called {name} here" if name else f"{len(names)} hubs are kept here"
    raise HubError(sentence, hint=f"Choose one with --name: {', '.join(names)}.")


def write_proxied(directory: Path, *, proxied: bool) -> None:
    """Write down whether a proxy ends TLS in front of the hub."""
    (directory / _PROXIED).write_text("yes" if proxied else "no", "utf-8")


def is_pinned(directory: Path) -> bool:
    """Tell whether the hub ends TLS itself, so that no key but its own is accepted there."""
    path = directory / _PROXIED
    return not path.exists() or path.read_text("utf-8") != "yes"


def write_local_address(directory: Path, address: str) -> None:
    """Write down the address at which this machine itself reaches the hub that it hosts."""
    (directory / _LOCAL).write_text(f"{address}\n", "utf-8")


def addresses_from_here(directory: Path) -> tuple[str, ...]:
    """Return the hub's addresses, this machine's own first: some routers block their public address from
    inside.
    """
    path = directory / _LOCAL
    local = path.read_text("utf-8").split() if path.exists() else []
    return tuple(dict.fromkeys((*local, *known_addresses(directory))))


async def start_hub(
    directory: Path, options: Sequence[str], place: Path, private: PrivateOptions | None = None
) -> ChildProcess:
    """Start the hub's process. Private options reach it in a file, because arguments are public."""
    if private is not None:
        from barnraise.hub.private_options import write_private_options

        path = place / _PRIVATE_OPTIONS
        write_private_options(private, path)
        options = (*options, "--private-options", str(path))
    command = (sys.executable, "-P", "-m", "barnraise.hub", str(directory), *options)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return await ChildProcess.start(
        "hub", command, workspace=place, folder=directory, environment=environment
    )
