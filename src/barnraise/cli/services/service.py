"""``barnraise service``: let the operating system start this machine's agent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from barnraise.agent_client.bootstrap import AGENT_LOG, standing_of
from barnraise.cli.services import ServiceLaunch, ServiceManager, ServiceStatus
from barnraise.core.command import Run, runner
from barnraise.core.config import (
    CONFIG_VARIABLE,
    ENVIRONMENT_PREFIX,
    load_settings,
    setting_names,
    state_directory,
)
from barnraise.core.errors import AgentError
from barnraise.core.installation import install_hint

_DEADLINE_S = 30.0
_PATHS = frozenset({CONFIG_VARIABLE, "BARNRAISE_STATE_DIRECTORY", "BARNRAISE_TRUST_SECRET_FILE"})


def install(*, as_json: bool) -> int:
    """Write the service, start it, and say what was done."""
    run = runner(_DEADLINE_S)
    directory = state_directory(load_settings())
    manager = manager_here(run, directory)
    service_status = manager.status()
    if not service_status.installed:
        _check_no_agent_runs(directory)
        check_importable(run, sys.executable)
    launch = ServiceLaunch(
        python=sys.executable,
        directory=str(Path.home()),
        log=str(directory / AGENT_LOG),
        environment=kept_environment(os.environ, Path.cwd()),
    )
    _show(manager.install(launch), as_json)
    return 0


def remove(*, as_json: bool) -> int:
    """End the agent and undo the installation."""
    _show(manager_here(runner(_DEADLINE_S), state_directory(load_settings())).remove(), as_json)
    return 0


def status(*, as_json: bool) -> int:
    """Exit code 0 if it is installed and runs, else 3."""
    service_status = manager_here(runner(_DEADLINE_S), state_directory(load_settings())).status()
    _show(service_status, as_json)
    return 0 if service_status.installed and service_status.running else 3


def manager_here(run: Run, state: Path, platform: str = sys.platform) -> ServiceManager:
    """Return the service manager of this operating system."""
    if platform.startswith("linux"):
        from barnraise.cli.services.systemd import Systemd

        home = os.environ.get("XDG_CONFIG_HOME", "")
        return Systemd(run, Path(home) if os.path.isabs(home) else Path.home() / ".config")
    if platform == "darwin":
        from barnraise.cli.services.launchd import Launchd

        return Launchd(run, Path.home(), os.getuid() if hasattr(os, "getuid") else 0)
    if platform == "win32":
        from barnraise.cli.services.windows import LogonTask

        user = "\\".join(filter(None, (os.environ.get("USERDOMAIN"), os.environ.get("USERNAME"))))
        return LogonTask(run, state, user, sys.executable)
    raise AgentError(
        f"there is no way yet to install a service on {platform}",
        hint="Start the agent in the background: barnraise up --detach",
    )


def kept_environment(environ: Mapping[str, str], here: Path) -> tuple[tuple[str, str], ...]:
    """Return our settings and nothing else. Their paths become absolute: a service starts elsewhere. Pure."""
    ours = {ENVIRONMENT_PREFIX + name.replace(".", "_").upper() for name in setting_names()}
    kept = []
    for name, text in sorted(environ.items()):
        if name in ours or name == CONFIG_VARIABLE:
            if name in _PATHS and text.strip():
                text = os.path.abspath(here / Path(text.strip()).expanduser())
            kept.append((name, text))
    return tuple(kept)


def check_importable(run: Run, python: str) -> None:
    """Raise AgentError if the agent only works with variables of this shell, which a service lacks."""
    done = run([python, "-E", "-P", "-c", "import barnraise.agent"])
    if done.returncode != 0:
        raise AgentError(
            f"{python} cannot import Barnraise in a new process, so a service could not start it",
            hint=install_hint(python=python),
        )


def describe(service_status: ServiceStatus) -> str:
    """Describe exactly what was written and run, and how to undo it."""
    lines = [f"{service_status.system}: {service_status.sentence}"]
    lines += [f"  wrote    {path}" for path in service_status.wrote]
    lines += [f"  ran      {command}" for command in service_status.ran]
    lines += [f"  deleted  {path}" for path in service_status.deleted]
    lines += [f"  undo     {service_status.undo}"] if service_status.undo else []
    if not (service_status.wrote or service_status.deleted) and service_status.installed:
        lines.append(f"  file     {service_status.file}")
    return "\n".join([*lines, *service_status.hints])


def _check_no_agent_runs(directory: Path) -> None:
    standing = standing_of(directory)
    if standing is not None:
        what = "an agent" if standing.agent else "a listener without an agent"
        raise AgentError(
            f"{what} runs already (pid {standing.pid}), and the service could not start beside it",
            hint="Run `barnraise down`, then `barnraise service install` again."
            if standing.agent
            else "Wait until the workers that use it have stopped.",
        )


def _show(service_status: ServiceStatus, as_json: bool) -> None:
    click.echo(
        json.dumps(msgspec.to_builtins(service_status), indent=2) if as_json else describe(service_status)
    )
