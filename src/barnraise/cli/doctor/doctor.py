"""``barnraise doctor``: checks for what often keeps machines apart, each with a command that fixes it."""

from __future__ import annotations

import json
import platform
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from barnraise import __version__
from barnraise.agent.diagnostics import checks
from barnraise.agent_client.cluster_requests import CheckRequest, CheckResponse, CheckRow
from barnraise.cli.agent_call import ask
from barnraise.cli.doctor import collect, hub_checks, machine_checks, network_checks
from barnraise.cli.doctor.facts import FirewallFacts
from barnraise.cli.explain import more_about
from barnraise.cli.terminal import painted, wrapped
from barnraise.core.command import Run, runner
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.background import DeadlineCall, DeadlineExceeded
from barnraise.core.sanitize import printable
from barnraise.core.units import counted

_COMMAND_S = 2.0
_LOOK_S = 6.0
_AGENT_S = 8.0
_ORDER = {"ok": 0, "warn": 1, "fail": 2}
_MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_NEED_SETTINGS = ("agent", "disk", "firewall", "hub", "key", "network-disk", "port", "wsl")

Rows = Sequence[CheckRow | None]


class Diagnosis(msgspec.Struct, frozen=True):
    """All results of one examination; ``ok`` if no check failed."""

    ok: bool
    version: str
    rows: tuple[CheckRow, ...]
    left_out: tuple[DeadlineExceeded, ...]


def run(*, as_json: bool, everything: bool) -> int:
    """Exit code 0 if nothing has failed, else 1; never longer than about ten seconds."""
    diagnosis = examine(runner(_COMMAND_S))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(diagnosis), indent=2))
    else:
        click.echo(describe(diagnosis, everything=everything))
    return 0 if diagnosis.ok else 1


def examine(run_command: Run) -> Diagnosis:
    """Run every check that is possible now."""
    began = time.monotonic()
    rows: list[CheckRow] = []
    left: list[DeadlineExceeded] = []
    looks = _looks(run_command)
    firewalls: DeadlineCall[list[FirewallFacts]] | None = None
    inside: DeadlineCall[CheckResponse] | None = None
    number, agent_answers = 0, False
    place = DeadlineCall(("settings",), _place).result(began + _COMMAND_S)
    if isinstance(place, DeadlineExceeded):
        left.append(DeadlineExceeded(("settings", *_NEED_SETTINGS, *checks.CHECKS), place.why))
    elif isinstance(place, BarnraiseError):
        rows.append(network_checks.settings(place))
        left.append(DeadlineExceeded((*_NEED_SETTINGS, *checks.CHECKS), "the settings are not valid"))
    else:
        settings, directory = place
        number = settings.network.port
        rows.append(network_checks.settings(None))
        looks += _looks_with(settings, directory, run_command)
        firewalls = DeadlineCall(("firewall",), partial(collect.firewalls, run_command, number))
        inside = DeadlineCall(checks.CHECKS, _ask_agent)
    for look in looks:
        answer = look.result(began + _LOOK_S)
        if isinstance(answer, DeadlineExceeded):
            left.append(answer)
        else:
            rows += [row for row in answer if row is not None]
    if inside is not None:
        response = inside.result(began + _AGENT_S)
        agent_answers = isinstance(response, CheckResponse)
        if isinstance(response, CheckResponse):
            rows += response.rows
        else:
            left.append(response)
    rows += [row for row in [network_checks.local_network(collect.SYSTEM, agent_answers)] if row is not None]
    if firewalls is not None:
        seen = firewalls.result(began + _AGENT_S)
        if isinstance(seen, DeadlineExceeded):
            left.append(seen)
        else:
            rows += network_checks.firewall(seen, number, collect.SYSTEM, came_in(rows))
    return _ordered(rows, left)


def came_in(rows: Iterable[CheckRow]) -> tuple[str, ...]:
    """Return the peers that dialled this machine just now. Pure."""
    return tuple(
        row.peer for row in rows if row.name == "reach" and row.sentence.startswith("both directions")
    )


def describe(diagnosis: Diagnosis, *, everything: bool = False) -> str:
    """Format a line of summary, then the warnings and failures with their fix, failures last.

    ``everything``: also the checks that passed.
    """
    shown = [row for row in diagnosis.rows if everything or row.state != "ok"]
    lines = [_summary(diagnosis)]
    if shown:
        width = max(len(row.name) for row in shown)
        lines += ["", *(line for row in shown for line in _lines(row, width))]
    if diagnosis.left_out:
        lines.append("")
    for left in diagnosis.left_out:
        lines.append(wrapped(f"not checked: {', '.join(left.names)} ({left.why})", indent="  "))
    pages = dict.fromkeys(row.name for row in diagnosis.rows if row.state != "ok")
    if pages:
        lines += ["", wrapped(more_about(*pages), indent="  ")]
    return "\n".join(lines)


def _summary(diagnosis: Diagnosis) -> str:
    """Return such as "27 checks passed, 1 warning, 1 failure"; zeros are left out."""
    counts = {state: sum(row.state == state for row in diagnosis.rows) for state in _ORDER}
    parts = [f"{counted(counts['ok'], 'check')} passed"]
    parts += [painted(counted(counts["warn"], "warning"), colour="yellow")] if counts["warn"] else []
    parts += [painted(counted(counts["fail"], "failure"), colour="red")] if counts["fail"] else []
    return ", ".join(parts)


def _lines(row: CheckRow, width: int) -> list[str]:
    peer = f"{row.peer}: " if row.peer and row.peer not in row.sentence else ""
    mark = painted(f"{_MARKS[row.state]:4}", colour=_COLOURS[row.state])
    indent = " " * (width + 8)
    sentence = wrapped(f"{'':4}  {row.name:{width}}  {peer}{row.sentence}", indent=indent)
    # A fix is often a command to copy, so it stays on one line if it has a line for itself.
    fix = [f"{'':6}-> {printable(row.fix)}"] if row.fix else []
    return [f"{mark}{sentence[4:]}", *fix]


def _place() -> tuple[Settings, Path] | BarnraiseError:
    try:
        settings = load_settings()
        return settings, state_directory(settings)
    except BarnraiseError as error:
        return error


def _ask_agent() -> CheckResponse:
    return ask(CheckRequest(), CheckResponse, timeout_s=_AGENT_S, offer_start=False)


def _looks(run_command: Run) -> list[DeadlineCall[Rows]]:
    """Start the checks that every machine can run."""
    system, arch = collect.SYSTEM, platform.machine().lower()
    bits = struct.calcsize("P") * 8

    def software() -> Rows:
        return [
            machine_checks.python((sys.version_info[0], sys.version_info[1], sys.version_info[2]), bits),
            machine_checks.barnraise(__version__, collect.recorded_version("barnraise")),
            machine_checks.torch(collect.torch(), system, arch),
        ]

    return [
        DeadlineCall(("python", "barnraise", "torch"), software),
        DeadlineCall(("gpu",), lambda: [machine_checks.gpu(collect.nvidia(run_command), collect.torch())]),
        DeadlineCall(("clock",), lambda: [machine_checks.clock(time.time(), collect.installed_s(), system)]),
        DeadlineCall(("sleep",), lambda: [machine_checks.sleep(collect.sleep(run_command), system)]),
        DeadlineCall(
            ("requirements",), lambda: [machine_checks.requirements(collect.requirements(Path.cwd()))]
        ),
        DeadlineCall(("bridge",), lambda: [network_checks.bridge(collect.bridges(run_command))]),
    ]


def _looks_with(settings: Settings, directory: Path, run_command: Run) -> list[DeadlineCall[Rows]]:
    """Start the checks that depend on the settings: the state directory and the port."""
    number = settings.network.port

    def state() -> Rows:
        disk = collect.disk(directory)
        key = collect.key(directory, disk.filesystem)
        return [
            machine_checks.disk(disk),
            machine_checks.network_disk(disk),
            machine_checks.key(key),
            machine_checks.cloned_key(key),
        ]

    def friends() -> Rows:
        return [row for hub in hub_checks.hubs(settings) for row in network_checks.hub(hub, collect.SYSTEM)]

    return [
        DeadlineCall(("disk", "network-disk", "key", "cloned-key"), state),
        DeadlineCall(("hub",), friends),
        DeadlineCall(("port",), lambda: [network_checks.port(collect.port(number, directory))]),
        DeadlineCall(("agent",), lambda: [network_checks.agent(collect.running(directory), __version__)]),
        DeadlineCall(("wsl",), lambda: [network_checks.wsl(collect.wsl(run_command), number)]),
    ]


def _ordered(rows: Iterable[CheckRow], left: Iterable[DeadlineExceeded]) -> Diagnosis:
    """Sort the results, failures last. A check that another source has answered is not missing. Pure."""
    ordered = tuple(sorted(rows, key=lambda row: (_ORDER[row.state], row.name, row.peer)))
    made = {row.name for row in ordered} | (set() if collect.SYSTEM == "macos" else {"local-network"})
    missing = [
        DeadlineExceeded(tuple(name for name in exceeded.names if name not in made), exceeded.why)
        for exceeded in left
    ]
    ok = all(row.state != "fail" for row in ordered)
    return Diagnosis(ok, __version__, ordered, tuple(exceeded for exceeded in missing if exceeded.names))
