"""Confinement of the workers of a run on this machine: their sandbox, their data and their broker.

Confined workers have no discovery secret, and those in a sandbox have no network. The broker opens their
links to the machines of the run, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from barnraise.agent.context import AgentContext
from barnraise.agent.supervisor.messages import WorkerLaunch
from barnraise.core.config import CONFIG_VARIABLE, default_config_path
from barnraise.core.errors import RunError
from barnraise.identity import NodeId
from barnraise.runs.record import RunSpec
from barnraise.sandbox.choice import Sandbox, sandboxed
from barnraise.sandbox.spec import SandboxSpec, python_roots
from barnraise.transport.ipc.dial_broker import WEB_PORTS, DialBroker, DialRules, Place
from barnraise.transport.ipc.dial_request import BROKER_NAME
from barnraise.transport.listener.preface import Preface, encode


def make_broker(context: AgentContext, spec: RunSpec, directory: Path) -> DialBroker:
    """Return the broker of a run, which knows the machines of the run as they are at each request."""

    def preface(worker: bytes, plaintext: bool) -> bytes:
        return encode(Preface(worker, os.urandom(16), plaintext=plaintext), context.log.secret)

    return DialBroker(directory, lambda: _rules(context, spec), preface)


def _rules(context: AgentContext, spec: RunSpec) -> DialRules:
    """Return the places that workers of a run may reach."""
    places: set[Place] = {(address, context.listener.port) for address in context.own_addresses()}
    for node in map(NodeId, spec.nodes):
        places |= context.connections.proved_places(node)
    return DialRules(workers=frozenset(places), public_ports=WEB_PORTS)


class RunSandbox:
    """Sandbox of the workers of one run on this machine."""

    def __init__(self, sandbox: Sandbox, home: Path, *, state: Path, interface: Path) -> None:
        self._sandbox = sandbox
        self._home = home
        self._state = state
        self._interface = interface

    def wrap(self, worker: WorkerLaunch, start: int, python: Path, data: Sequence[str]) -> WorkerLaunch:
        """Return the launch of the same worker in a sandbox; raise RunEnvironmentError if there is none."""
        config = os.environ.get(CONFIG_VARIABLE) or str(default_config_path())
        settings = (config,) if os.path.isfile(config) else ()
        variables: Mapping[str, str] = worker.environment
        if settings:
            variables = {**variables, CONFIG_VARIABLE: config}
        spec = SandboxSpec(
            root=str(self._home / "sandbox" / f"{start}-{worker.local_rank}"),
            directory=worker.directory,
            writable=(worker.directory, str(self._interface)),
            readable=(*python_roots(python), *data, *settings),
            hidden=(str(Path.home()), str(self._state)),
            broker=str(self._interface / BROKER_NAME),
        )
        wrapped = sandboxed(self._sandbox, spec, worker.command, os.environ, variables)
        return replace(worker, command=wrapped.command, environment=wrapped.environment)


def check_data_path(name: str, location: Path, allowed: Sequence[str]) -> None:
    """Raise RunError unless this machine's user lets confined runs read this path.

    ``allowed``: directories of the setting runs.data_paths.
    """
    real = location.resolve()
    if not any(real.is_relative_to(Path(path).expanduser().resolve()) for path in allowed):
        raise RunError(
            f"the data set {name} is at {location}, which this machine does not show to runs of others",
            hint=f'Add its folder to the settings there: [runs] data_paths = ["{location.parent}"]',
        )
