"""Machines and directed network paths that plans are made of. Pure.

`cluster_from_graph` makes a cluster of a measured graph. Names identify machines, so they are unique.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import RunError
from barnraise.core.units import format_rate
from barnraise.planning.inputs.inputs import ModelSize
from barnraise.topology.devices import Bytes, Figure, Machine, Word, require_finite
from barnraise.topology.graph import Seconds, TopologyGraph
from barnraise.topology.render import main_device

MAX_MEMBERS = 256
# The share of the matrix product speed that a training usually reaches.
EFFICIENCY = 0.35
ASSUMED_MBPS = 100.0

Speed = Annotated[float, Meta(gt=0, le=1e12)]


class PlannedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine and its training speed: samples of this model per second, alone, with all its devices.

    ``memory_bytes``: of each device; 0 if unknown. ``up_mbps`` and ``down_mbps``: shared by all its paths;
    None if the fastest path sets the limit. ``site``: machines with the same name are at one site; empty if
    unknown. ``source``: where the speed comes from. ``node``: the id of the machine if it exists.
    """

    name: Annotated[str, Meta(min_length=1, max_length=160)]
    samples_per_s: Speed
    memory_bytes: Bytes = 0
    up_mbps: Figure | None = None
    down_mbps: Figure | None = None
    site: Word = ""
    tflops: Figure | None = None
    source: Annotated[str, Meta(max_length=300)] = "given"
    node: Word = ""

    def __post_init__(self) -> None:
        require_finite(self.samples_per_s, self.up_mbps, self.down_mbps, self.tflops)


class NetworkPath(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link: rate of a single flow, and latency."""

    source: str
    target: str
    mbps: Figure
    latency_s: Seconds = 0.0

    def __post_init__(self) -> None:
        require_finite(self.mbps, self.latency_s)
        if self.source == self.target:
            raise ValueError("a path must connect two different machines")


class PlanCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Members by name and paths by their ends; `build_cluster` sorts them."""

    members: Annotated[tuple[PlannedMachine, ...], Meta(max_length=MAX_MEMBERS)]
    paths: tuple[NetworkPath, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        ends = [(path.source, path.target) for path in self.paths]
        if names != sorted(set(names)) or ends != sorted(set(ends)):
            raise ValueError("the members and paths of a cluster must be unique and sorted")
        if not {end for pair in ends for end in pair} <= set(names):
            raise ValueError("a path of a cluster ends at an unknown machine")


def build_cluster(
    members: Iterable[PlannedMachine], paths: Iterable[NetworkPath] = (), notes: Iterable[str] = ()
) -> PlanCluster:
    """Build a cluster from parts in any order; paths to unknown machines are left out."""
    known = {member.name: member for member in members}
    ends = {(path.source, path.target): path for path in paths}
    return PlanCluster(
        members=tuple(known[name] for name in sorted(known)),
        paths=tuple(ends[pair] for pair in sorted(ends) if set(pair) <= set(known)),
        notes=tuple(notes),
    )


def symmetric_link(a: str, b: str, mbps: float, latency_s: float = 0.0) -> tuple[NetworkPath, NetworkPath]:
    """Return both directions of a link with equal rates."""
    return (
        NetworkPath(source=a, target=b, mbps=mbps, latency_s=latency_s),
        NetworkPath(source=b, target=a, mbps=mbps, latency_s=latency_s),
    )


def without_machines(cluster: PlanCluster, names: Collection[str]) -> PlanCluster:
    """Return the cluster without these machines and their paths."""
    remaining = (member for member in cluster.members if member.name not in names)
    return build_cluster(remaining, cluster.paths, cluster.notes)


def cluster_from_graph(
    graph: TopologyGraph,
    model: ModelSize,
    speeds: Mapping[str, float] | None = None,
    assumed_mbps: float = ASSUMED_MBPS,
) -> PlanCluster:
    """Build a cluster from the measured graph.

    ``speeds``: measured samples per second of this model, by node id. The speed of another machine is
    estimated from its matrix product speed: compared with measured machines, or by the model's
    ``flops_per_sample``. A machine with neither is left out, and a note names it.
    """
    measured = dict(speeds or {})
    figures = {facts.node: _tflops(facts.machine) for facts in graph.nodes}
    per_tflop = samples_per_tflop(
        model, ((speed, figures.get(node)) for node, speed in measured.items() if speed > 0)
    )
    names = _names(graph)
    members, notes = [], []
    for facts in graph.nodes:
        speed, tflops = measured.get(facts.node, 0.0), figures[facts.node]
        source = "measured with this model"
        if speed <= 0 and tflops and per_tflop:
            speed, source = tflops * per_tflop, f"estimated from {tflops:.3g} TFLOPS"
        if speed <= 0:
            notes.append(f"{names[facts.node]} is left out: its speed with this model is unknown.")
            continue
        members.append(
            PlannedMachine(
                name=names[facts.node],
                samples_per_s=speed,
                memory_bytes=_memory(facts.machine),
                tflops=tflops,
                source=source,
                node=facts.node,
            )
        )
    paths: list[NetworkPath] = []
    for link in graph.links:
        mbps = link.mbps
        if mbps is None:
            mbps = assumed_mbps
            notes.append(
                f"The link between {names[link.a]} and {names[link.b]} was not measured; "
                f"{format_rate(mbps * 1e6)} is assumed."
            )
        paths += symmetric_link(names[link.a], names[link.b], mbps, link.rtt_s / 2)
    return build_cluster(members, paths, notes)


def samples_per_tflop(model: ModelSize, known: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the samples per second for each TFLOPS, from measured machines or from the model's FLOPs."""
    ratios = [speed / tflops for speed, tflops in known if tflops]
    if ratios:
        return statistics.median(ratios)
    return None if model.flops_per_sample is None else 1e12 * EFFICIENCY / model.flops_per_sample


def require_members(cluster: PlanCluster) -> None:
    """Raise RunError if no machine has a known speed."""
    if not cluster.members:
        raise RunError(
            "cannot make a plan: no machine has a known speed",
            hint="Measure the speed of one machine with this model, or give the FLOPs of a sample.",
        )


def _tflops(machine: Machine | None) -> float | None:
    """Return the TFLOPS of all devices of the kind that a run would use."""
    main = None if machine is None else main_device(machine)
    if machine is None or main is None:
        return None
    return sum(device.tflops_fp32 or 0.0 for device in machine.devices if device.kind == main.kind) or None


def _memory(machine: Machine | None) -> int:
    main = None if machine is None else main_device(machine)
    if machine is None or main is None:
        return 0
    return min(device.memory_bytes for device in machine.devices if device.kind == main.kind)


def _names(graph: TopologyGraph) -> dict[str, str]:
    """Return the name of each node, with the start of its id if the name is empty or used twice."""
    names = [facts.name for facts in graph.nodes]
    return {
        facts.node: facts.name
        if facts.name and names.count(facts.name) == 1
        else f"{facts.name or 'node'} ({facts.node[:8]})"
        for facts in graph.nodes
    }
