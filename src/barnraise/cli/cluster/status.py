"""``barnraise status`` and ``barnraise nodes``: the cluster as this machine sees it."""

from __future__ import annotations

import click

from barnraise.agent_client.cluster_requests import (
    DeviceRow,
    DiskUse,
    MeasureRequest,
    NodeRow,
    RequestDone,
    StatusRequest,
    StatusResponse,
)
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.tables import table
from barnraise.cli.terminal import wrapped
from barnraise.core.units import format_size
from barnraise.topology.render import short_device_name

_SHOWN_BYTES = 1 << 20
_MUCH_BYTES = 1 << 30
_STATES = {
    "this": "this machine",
    "here": "online",
    "joining": "joining",
    "silent": "does not answer",
    "away": "away",
}


def run(*, as_json: bool, graph: bool, measure: bool) -> int:
    """Exit code 0 if this side can decide, 3 if it waits for others."""
    if measure:
        done = ask(MeasureRequest(), RequestDone)
        click.echo(done.sentence, err=True)
    response = ask(StatusRequest(), StatusResponse)
    if as_json:
        print_json(response)
    elif graph:
        click.echo(response.picture or "No link has been measured yet.")
    else:
        click.echo(describe(response))
    return 0 if response.decides else 3


def nodes(*, as_json: bool) -> int:
    """List the machines of the cluster, each in full."""
    response = ask(StatusRequest(), StatusResponse)
    if as_json:
        print_json(response)
        return 0
    click.echo("\n\n".join(_in_full(row) for row in response.nodes))
    return 0


def describe(response: StatusResponse, *, calm: bool = False) -> str:
    """Describe the state of the cluster. ``calm`` leaves out figures that change every second."""
    branch = f" (branch {response.branch})" if response.branch else ""
    lines = [wrapped(f"cluster {response.cluster}{branch}: {response.sentence}")]
    if response.encryption != "tls":
        lines.append("PLAINTEXT: workers' links are not encrypted, by your setting")
    if response.coordinator:
        lines.append(wrapped(f"coordinator: {response.coordinator} ({response.why_coordinator})"))
    rows = [("", "name", "state", "address", "ms", "Mbit/s", "run", "device")]
    for row in response.nodes:
        trip = "-" if row.rtt_ms is None or calm else f"{row.rtt_ms:.3g}"
        mbps = "-" if row.mbps is None else f"{row.mbps:.0f}"
        mark = "*" if row.coordinator else str(row.seniority or "-")
        idle = "paused" if row.paused else "free"
        work = ", ".join(row.runs) or (idle if row.state in ("this", "here") else "-")
        cells = (mark, row.name, _state(row), row.address or "-", trip, mbps, work)
        rows.append((*cells, _main_device(row)))
    lines += ["", table(rows, words=(1, 3, 7))]
    if pauses := [_pause(row) for row in response.nodes if row.paused and row.state in ("this", "here")]:
        lines += ["", *pauses]
    for clash in response.name_clashes:
        lines += ["", wrapped(clash)]
    if response.disk is not None and not calm:
        lines += ["", *_disk(response.disk)]
    if response.offer:
        lines += ["", wrapped(response.offer)]
    return "\n".join(lines)


def _disk(disk: DiskUse) -> list[str]:
    """Return the line about this machine's disk, and how to free space where that is worth it."""
    parts = {"runs": disk.runs, "files": disk.files, "environments": disk.environments}
    details = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size >= _SHOWN_BYTES)
    line = f"disk: Barnraise uses {format_size(disk.total)}" + (f" ({details})" if details else "")
    return [wrapped(line), *(["To free space: barnraise clean"] if disk.total >= _MUCH_BYTES else [])]


def _pause(row: NodeRow) -> str:
    """Return the line about a paused machine; on this machine also the command that shows its limits."""
    hint = " (see `barnraise limit`)" if row.state == "this" else ""
    return wrapped(f"{row.name} is paused: {row.paused}{hint}")


def _state(row: NodeRow) -> str:
    """Return the state, with the role where a machine has another than most."""
    roles = (["guest"] if row.role == "guest" else []) + ([] if row.works else ["witness"])
    return ", ".join([_STATES[row.state], *roles])


def _in_full(row: NodeRow) -> str:
    """Describe one machine in a few lines; its id is never cut, because people copy it."""
    version = f"version {row.version}" if row.version else "version unknown"
    role = row.role if row.works else f"{row.role}, witness"
    heading = wrapped(f"{row.name}: {_STATES[row.state]}, {role}, {version}", indent="  ")
    lines = [heading, f"  id {row.node}"]
    if row.os:
        torch = f", torch {row.torch}" if row.torch else ""
        lines.append(wrapped(f"  {row.os}, Python {row.python}{torch}", indent="    "))
    lines += [wrapped(f"  {_device(device)}", indent="    ") for device in row.devices]
    lines += [wrapped(f"  note: {note}", indent="    ") for note in row.notes]
    return "\n".join(lines)


def _device(device: DeviceRow) -> str:
    speed = f", {device.tflops:.2g} TFLOP/s" if device.tflops else ""
    return f"{device.name} ({device.kind}), {format_size(device.memory_bytes)}{speed}"


def _main_device(row: NodeRow) -> str:
    """Describe the accelerators of a machine, or its processor if it has none."""
    devices = [device for device in row.devices if device.kind != "cpu"] or list(row.devices)
    if not devices:
        return "-"
    more = f"{len(devices)}x " if len(devices) > 1 else ""
    return f"{more}{short_device_name(devices[0].name)} {devices[0].memory_bytes / 2**30:.0f} GiB"
