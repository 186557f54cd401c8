"""Where the hubs of this machine are, and how their processes are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from backyard.cli.kept import Kept
from backyard.core.config import Settings, state_directory
from backyard.core.errors import HubError

_ADDRESSES = "addresses"


def top_folder(settings: Settings) -> Path:
    return state_directory(settings) / "hub"


def kept_hub(name: str, settings: Settings) -> Path:
    """The hub of this name, or the only one."""
    top = top_folder(settings)
    found = sorted(path.name for path in top.iterdir() if (path / "hub.db").exists()) if top.is_dir() else []
    if name and name in found:
        return top / name
    if not name and len(found) == 1:
        return top / found[0]
    if not found:
        raise HubError("no hub is kept on this machine", hint="Begin one: backyard hub up train.py")
    said = f"there is no hub called {name} here" if name else f"{len(found)} hubs are kept here"
    raise HubError(said, hint=f"Say which with --name: {', '.join(found)}.")


def known_addresses(directory: Path) -> tuple[str, ...]:
    path = directory / _ADDRESSES
    return tuple(path.read_text("utf-8").split()) if path.exists() else ()


def write_addresses(directory: Path, addresses: Sequence[str]) -> None:
    (directory / _ADDRESSES).write_text("\n".join(addresses) + "\n", "utf-8")


async def start_hub(directory: Path, options: Sequence[str], place: Path) -> Kept:
    command = (sys.executable, "-P", "-m", "backyard.hub", str(directory), *options)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return await Kept.start("hub", command, room=place, folder=directory, environment=environment)
