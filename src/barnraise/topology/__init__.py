"""Capabilities of machines and links: devices, a speed probe, and the graph that the planner reads.

Connections belong in ``transport``, decisions in ``planning``. Never imports torch.
"""

from barnraise.topology.devices import Device, Machine, decode_machine, with_speeds
from barnraise.topology.graph import LinkFacts, NodeFacts, TopologyGraph, build_graph
from barnraise.topology.hardware_info import describe_machine
from barnraise.topology.probe import measured_speeds

__all__ = [
    "Device",
    "LinkFacts",
    "Machine",
    "NodeFacts",
    "TopologyGraph",
    "build_graph",
    "decode_machine",
    "describe_machine",
    "measured_speeds",
    "with_speeds",
]
