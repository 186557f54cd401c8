"""Real hosts in network namespaces, for tests and benchmarks: rates, delay, loss, cuts and NAT.

Not part of the wheel. Imports the standard library only and nothing of Barnraise.
Linux, root, iproute2 and nsenter; nftables for cuts and NAT. See docs/lab.md.
"""

from lab.hosts import CommandFailed, Host, LabProcess
from lab.namespaces import LabError, why_unavailable
from lab.network import Lab, Nat
from lab.systems import ARM64, LINUX, WINDOWS

__all__ = [
    "ARM64",
    "LINUX",
    "WINDOWS",
    "CommandFailed",
    "Host",
    "Lab",
    "LabError",
    "LabProcess",
    "Nat",
    "why_unavailable",
]
