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
    response = ask(StatusRequest(), StatusResponse)
    if as_json:
        print_json(response)
    elif graph:
        click.echo(response.picture or "No link has been measured yet.")
    else:
        click.echo(describe(response))
    return 0 if response.decides else 3


def nodes(*, as_json: bool) -> int:
    """List the machines of the cluster, one line each."""
    response = ask(StatusRequest(), StatusResponse)
    if as_json:
        print_json(response)
        return 0
    rows = [("name", "node id", "role", "state", "version", "system and devices")]
    rows += [
        (row.name, row.node, row.role, _STATES[row.state], row.version or "-", _hardware(row))
        for row in response.nodes
    ]
    click.echo(table(rows))
    return 0


def describe(response: StatusResponse, *, calm: bool = False) -> str:
    """Describe the state of the cluster. ``calm`` leaves out figures that change every second."""
    branch = f" (branch {response.branch})" if response.branch else ""
    lines = [f"cluster {response.cluster}{branch}: {response.sentence}"]
    if response.encryption != "tls":
        lines.append("PLAINTEXT: workers' links are not encrypted, by your setting")
    if response.coordinator:
        lines.append(f"coordinator: {response.coordinator} ({response.why_coordinator})")
    rows = [("", "name", "role", "state", "address", "round trip", "Mbit/s", "system and devices")]
    for row in response.nodes:
        trip = "-" if row.rtt_ms is None or calm else f"{row.rtt_ms:.3g} ms"
        mbps = "-" if row.mbps is None else f"{row.mbps:.0f}"
        mark = "*" if row.coordinator else str(row.seniority or "-")
        cells = (mark, row.name, _role(row), _STATES[row.state], row.address or "-", trip, mbps)
        rows.append((*cells, _hardware(row)))
    lines += ["", table(rows)]
    for clash in response.name_clashes:
        lines += ["", clash]
    if response.offer:
        lines += ["", response.offer]
    return "\n".join(lines)


def _role(row: NodeRow) -> str:
    return row.role if row.works else f"{row.role}, witness"


def _hardware(row: NodeRow) -> str:
    parts = [row.os] if row.os else []
    for device in row.devices:
        speed = f" {device.tflops:.2g} TFLOP/s" if device.tflops else ""
        parts.append(f"{device.name} {device.memory_bytes / 2**30:.0f} GB{speed}")
    return "; ".join(parts) or "-"
