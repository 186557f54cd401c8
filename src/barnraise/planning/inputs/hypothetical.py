"""Hypothetical machines: ``4090@1gbit``, ``mac-m2@wifi``, ``2x4090@2.5gbit`` (two cards). Pure.

The figures are rough public ones: 0.7 of the fp32 peak for cards, and usual values for processors. They show
which of two machines is faster and by how much, not how fast a model trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from barnraise.core.errors import ConfigError
from barnraise.core.units import parse_rate
from barnraise.planning.inputs.cluster import (
    NetworkPath,
    PlanCluster,
    PlannedMachine,
    build_cluster,
    samples_per_tflop,
)
from barnraise.planning.inputs.inputs import ModelSize

_GIB = 1 << 30
_SPEC = re.compile(r"(?:([1-9][0-9]?)x)?([a-z0-9-]+)@(.+)")
# The share of a nominal line rate that TCP carries.
_WIRED_SHARE = 0.94
_WIRED_S = 0.0002
_PEAK_SHARE = 0.7


class HypotheticalLink(NamedTuple):
    """Connection of a hypothetical machine. ``is_remote``: the machine is at another site."""

    up_mbps: float
    down_mbps: float
    latency_s: float
    is_remote: bool = False


# TFLOPS in fp32 at peak, and GiB of memory.
CARDS: Mapping[str, tuple[float, float]] = {
    "5090": (104.8, 32),
    "5080": (56.3, 16),
    "4090": (82.6, 24),
    "4080": (48.7, 16),
    "4070": (29.1, 12),
    "4060": (15.1, 8),
    "3090": (35.6, 24),
    "3080": (29.8, 10),
    "3070": (20.3, 8),
    "3060": (12.7, 12),
    "2080ti": (13.4, 11),
    "1080ti": (11.3, 11),
    "h100": (67.0, 80),
    "a100": (19.5, 40),
    "v100": (15.7, 16),
    "t4": (8.1, 16),
    "mac-m1": (2.6, 8),
    "mac-m1-pro": (5.2, 16),
    "mac-m1-max": (10.4, 32),
    "mac-m2": (3.6, 8),
    "mac-m2-pro": (6.8, 16),
    "mac-m2-max": (13.6, 32),
    "mac-m2-ultra": (27.2, 64),
    "mac-m3": (4.1, 16),
    "mac-m4": (4.3, 16),
    "mac-m4-max": (18.4, 36),
}
# TFLOPS that are usually reached, and GiB of memory.
PROCESSORS: Mapping[str, tuple[float, float]] = {
    "desktop": (1.0, 32),
    "laptop": (0.4, 16),
    "pi5": (0.03, 8),
    "pi4": (0.01, 4),
}
LINES: Mapping[str, HypotheticalLink] = {
    "wifi": HypotheticalLink(200.0, 200.0, 0.003),
    "wifi6": HypotheticalLink(600.0, 600.0, 0.003),
    "thunderbolt": HypotheticalLink(10_000.0, 10_000.0, 0.0002),
    "dsl": HypotheticalLink(20.0, 100.0, 0.015, is_remote=True),
    "cable": HypotheticalLink(40.0, 400.0, 0.015, is_remote=True),
    "fibre": HypotheticalLink(500.0, 500.0, 0.010, is_remote=True),
}


class HypotheticalMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine that does not exist here; ``tflops`` of all its devices together."""

    name: str
    tflops: float
    memory_bytes: int
    line: HypotheticalLink


def parse_machine(text: str) -> HypotheticalMachine:
    """Parse a description such as ``4090@1gbit``; raise ConfigError with the known devices and links."""
    spec = text.strip().lower()
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(
            f"{text!r} does not describe a machine",
            hint="Write device@link, such as 4090@1gbit, mac-m2@wifi or 2x4090@2.5gbit (two cards).",
        )
    count, device = int(match[1] or 1), match[2].removeprefix("rtx").removeprefix("-")
    if device in CARDS:
        tflops, memory = CARDS[device][0] * _PEAK_SHARE, CARDS[device][1]
    elif device in PROCESSORS:
        tflops, memory = PROCESSORS[device]
    else:
        known = ", ".join((*CARDS, *PROCESSORS))
        raise ConfigError(
            f"{text!r} names the device {match[2]!r}, whose speed is not known",
            hint=f"Use a device that is about as fast: {known}.",
        )
    return HypotheticalMachine(
        name=spec, tflops=count * tflops, memory_bytes=round(memory * _GIB), line=_line(text, match[3])
    )


def add_hypothetical(
    cluster: PlanCluster, machines: Iterable[HypotheticalMachine], model: ModelSize
) -> PlanCluster:
    """Return the cluster with these machines, each linked with all others as fast as both ends allow."""
    for machine in machines:
        cluster = _add_one(cluster, machine, model)
    return cluster


def _add_one(cluster: PlanCluster, machine: HypotheticalMachine, model: ModelSize) -> PlanCluster:
    known = ((member.samples_per_s, member.tflops) for member in cluster.members)
    per_tflop = samples_per_tflop(model, known)
    if per_tflop is None:
        raise ConfigError(
            f"the speed of {machine.name} with this model is unknown",
            hint="Give the FLOPs of a sample, or measure speed and TFLOPS of one machine.",
        )
    used_names = {member.name for member in cluster.members}
    names = [machine.name, *(f"{machine.name} {number}" for number in range(2, len(used_names) + 2))]
    name = next(name for name in names if name not in used_names)
    # A remote machine is a site of its own.
    sites = [member.site for member in cluster.members if member.site not in ("", member.name)]
    line = machine.line
    member = PlannedMachine(
        name=name,
        samples_per_s=machine.tflops * per_tflop,
        memory_bytes=machine.memory_bytes,
        up_mbps=line.up_mbps,
        down_mbps=line.down_mbps,
        site=name if line.is_remote else sites[0] if sites else "",
        tflops=machine.tflops,
        source=f"hypothetical: {machine.tflops:.3g} TFLOPS by rough public figures",
    )
    paths = list(cluster.paths)
    for other in cluster.members:
        into = [path.mbps for path in cluster.paths if path.target == other.name]
        out = [path for path in cluster.paths if path.source == other.name]
        latency = max(line.latency_s, min((path.latency_s for path in out), default=0.0))
        up = min(line.up_mbps, other.down_mbps or max(into, default=line.up_mbps))
        down = min(line.down_mbps, other.up_mbps or max((path.mbps for path in out), default=line.down_mbps))
        paths.append(NetworkPath(source=name, target=other.name, mbps=up, latency_s=latency))
        paths.append(NetworkPath(source=other.name, target=name, mbps=down, latency_s=latency))
    note = f"{name} is hypothetical; its figures are rough public ones."
    return build_cluster((*cluster.members, member), paths, (*cluster.notes, note))


def _line(text: str, link: str) -> HypotheticalLink:
    if link in LINES:
        return LINES[link]
    try:
        rate = parse_rate(link) / 1e6
    except ConfigError as error:
        raise ConfigError(
            f"{text!r} names the link {link!r}, which is neither a rate nor a known link",
            hint=f"Use a rate such as 1gbit, or one of {', '.join(LINES)}.",
        ) from error
    if rate <= 0:
        raise ConfigError(f"{text!r} has a link with the rate 0", hint="Use a rate such as 1gbit.")
    return HypotheticalLink(rate * _WIRED_SHARE, rate * _WIRED_SHARE, _WIRED_S)
