"""``barnraise pause``, ``resume-machine`` and ``limit``: how much of this machine runs may use, and when."""

from __future__ import annotations

import time
from typing import Any

import click
from msgspec.structs import replace

from barnraise.agent_client.cluster_requests import (
    LimitsRequest,
    LimitsResponse,
    PauseMachineRequest,
    RequestDone,
)
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.cli.agent_call import ask, ensure_agent, print_json
from barnraise.cli.terminal import wrapped
from barnraise.core.errors import ConfigError
from barnraise.core.host.daily_hours import DailyHours
from barnraise.core.units import format_size, parse_duration, parse_rate, parse_size

_NONE = "none"
_LONGEST_S = 366 * 86_400
_LEAST_MEMORY = 256 << 20


def pause(*, machine: str | None, duration: str | None, as_json: bool) -> int:
    """Let no run use a machine, for a time or until `resume-machine`. None: this machine."""
    seconds = parse_duration(duration) if duration else 0.0
    if duration and not 0 < seconds <= _LONGEST_S:
        raise ConfigError(
            f"--for {duration} is not a time of at most a year",
            hint="Write for example --for 2h, or leave --for out to pause without an end.",
        )
    ensure_agent()
    until = time.time() + seconds if seconds else 0.0
    if machine is not None:
        return _say(ask_pause(machine, paused=True, until=until), as_json=as_json)
    return _show(_change(paused=True, paused_until=until, paused_by=""), as_json=as_json, is_pause=True)


def resume(*, machine: str | None, as_json: bool) -> int:
    """Let runs use a machine again after a pause. None: this machine."""
    ensure_agent()
    if machine is not None:
        return _say(ask_pause(machine, paused=False), as_json=as_json)
    return _show(_change(paused=False, paused_until=0.0, paused_by=""), as_json=as_json)


def ask_pause(machine: str, *, paused: bool, until: float = 0.0) -> RequestDone:
    """Pause a machine of the cluster, or let runs use it again; return what was done."""
    return ask(PauseMachineRequest(machine, paused, until), RequestDone, offer_start=False)


def limit(options: dict[str, Any], *, as_json: bool) -> int:
    """Show the limits of this machine, or change those that are given."""
    ensure_agent()
    changes = read_changes({name: value for name, value in options.items() if value is not None})
    return _show(_change(**changes) if changes else ask(LimitsRequest(), LimitsResponse), as_json=as_json)


def read_changes(options: dict[str, str]) -> dict[str, Any]:
    """Return the fields of the limits that these options change; ``none`` removes a limit. Pure."""
    changes: dict[str, Any] = {}
    for name, text in options.items():
        if name in ("battery", "metered"):
            changes[name] = text
        elif name == "hours":
            DailyHours.parse("" if text == _NONE else text, "--hours")
            changes[name] = "" if text == _NONE else text.strip()
        elif name == "cpus":
            changes[name] = 0 if text == _NONE else _whole(text, "--cpus", 4096)
        elif name == "gpu_memory":
            share = text.removesuffix("%").strip()
            changes["gpu_memory_percent"] = 0 if text == _NONE else _whole(share, "--gpu-memory", 100)
        elif name == "memory":
            changes["memory_bytes"] = 0 if text == _NONE else _memory(text)
        else:
            changes["mbps"] = 0.0 if text == _NONE else max(0.001, parse_rate(text) / 1e6)
    return changes


def _memory(text: str) -> int:
    size = parse_size(text)
    if size < _LEAST_MEMORY:
        raise ConfigError(
            f"--memory {text} is too little for a worker",
            hint=f"Write at least {format_size(_LEAST_MEMORY)}, with its unit, such as 8GiB.",
        )
    return size


def _whole(text: str, option: str, largest: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= largest:
        raise ConfigError(
            f"{option} {text} is no number from 1 to {largest}", hint=f"Write {_NONE} to remove the limit."
        )
    return int(text)


def _change(**changes: Any) -> LimitsResponse:
    current = ask(LimitsRequest(), LimitsResponse).limits
    return ask(LimitsRequest(replace(current, **changes)), LimitsResponse)


def _say(done: RequestDone, *, as_json: bool) -> int:
    if as_json:
        print_json(done)
    else:
        click.echo(wrapped(done.sentence, indent="  "))
    return 0


def _show(response: LimitsResponse, *, as_json: bool, is_pause: bool = False) -> int:
    if as_json:
        print_json(response)
        return 0
    for line in describe(response, is_pause=is_pause):
        click.echo(wrapped(line, indent="  "))
    return 0


def describe(response: LimitsResponse, *, is_pause: bool = False) -> list[str]:
    """Return lines about the state of this machine, its limits and its runs. Pure."""
    if not response.reason:
        state = "Runs may use this machine."
    elif response.limits.paused:
        state = f"This machine is paused: {response.reason}."
    else:
        state = f"Runs of other machines do not use this one now: {response.reason}."
    lines = [state, *(f"Run {run} {sentence}." for run, sentence in response.runs)]
    if is_pause:
        return [*lines, "Undo: barnraise resume-machine"]
    return [*lines, *_limits(response.limits)]


def _limits(limits: MachineLimits) -> list[str]:
    rows = {
        "processor cores": str(limits.cpus) if limits.cpus else "all",
        "memory of a worker": format_size(limits.memory_bytes) if limits.memory_bytes else "all",
        "memory of each GPU": f"{limits.gpu_memory_percent} %" if limits.gpu_memory_percent else "all",
        "sending": f"{limits.mbps:g} Mbit/s" if limits.mbps else "as fast as the line",
        "hours for other machines' runs": limits.hours or "all",
        "such runs on battery": limits.battery,
        "such runs on a metered connection": limits.metered,
    }
    return [f"  {name}: {value}" for name, value in rows.items()]
