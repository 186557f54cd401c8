"""What the machines and the links between them can do: devices, a speed probe, and the graph to plan from.

May import ``local``, ``transport``, ``identity`` and ``core``; never torch.
"""

from barnraise.topology.devices import Device, Machine, with_speeds
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
    "describe_machine",
    "measured_speeds",
    "with_speeds",
]
