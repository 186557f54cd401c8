"""``barnraise status`` and ``barnraise nodes``: the cluster as this machine sees it."""

from __future__ import annotations

import click

from barnraise.agent_client.cluster_requests import (
    MeasureRequest,
    NodeRow,
    RequestDone,
    StatusRequest,
    StatusResponse,
)
from barnraise.cli.agent_call import ask, print_json, table

_STATES = {
    "this": "this machine",
    "here": "here",
    "joining": "joining",
    "silent": "does not answer",
    "away": "away",
}


def run(*, as_json: bool, graph: bool, measure: bool) -> int:
    """Exit code 0 if this side can decide, 3 if it waits for others."""
    if measure:
        done = ask(MeasureRequest(), RequestDone)
        click.echo(done.sentence, err=True)
    told = ask(StatusRequest(), StatusResponse)
    if as_json:
        print_json(told)
    elif graph:
        click.echo(told.picture or "No link has been measured yet.")
    else:
        click.echo(describe(told))
    return 0 if told.decides else 3


def nodes(*, as_json: bool) -> int:
    """List the machines of the cluster, one line each."""
    told = ask(StatusRequest(), StatusResponse)
    if as_json:
        print_json(told)
        return 0
    rows = [("name", "node id", "role", "state", "version", "system and devices")]
    rows += [
        (row.name, row.node, row.role, _STATES[row.state], row.version or "-", _hardware(row))
        for row in told.nodes
    ]
    click.echo(table(rows))
    return 0


def describe(told: StatusResponse, *, calm: bool = False) -> str:
    """Describe the state of the cluster. ``calm`` leaves out figures that change every second."""
    branch = f" (branch {told.branch})" if told.branch else ""
    lines = [f"cluster {told.cluster}  view {told.view}{branch}  {told.sentence}"]
    if told.encryption != "tls":
        lines.append("PLAINTEXT: workers' links are not encrypted, by your setting")
    if told.coordinator:
        lines.append(f"coordinator: {told.coordinator} ({told.why_coordinator})")
    rows = [("", "name", "role", "state", "address", "round trip", "Mbit/s", "system and devices")]
    for row in told.nodes:
        trip = "-" if row.rtt_ms is None or calm else f"{row.rtt_ms:.3g} ms"
        mbps = "-" if row.mbps is None else f"{row.mbps:.0f}"
        mark = "*" if row.coordinator else str(row.seniority or "-")
        cells = (mark, row.name, _role(row), _STATES[row.state], row.address or "-", trip, mbps)
        rows.append((*cells, _hardware(row)))
    lines += ["", table(rows)]
    if told.offer:
        lines += ["", told.offer]
    return "\n".join(lines)


def _role(row: NodeRow) -> str:
    return row.role if row.works else f"{row.role}, witness"


def _hardware(row: NodeRow) -> str:
    parts = [row.os] if row.os else []
    for device in row.devices:
        speed = f" {device.tflops:.2g} TFLOP/s" if device.tflops else ""
        parts.append(f"{device.name} {device.memory_bytes / 2**30:.0f} GB{speed}")
    return "; ".join(parts) or "-"
