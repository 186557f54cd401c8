"""Systems of hosts besides this machine's own: Windows under Wine, and Linux on arm64 under qemu.

``python -m lab prepare windows arm64`` builds them from packages, once.
"""

from lab.systems.arm64 import Arm64
from lab.systems.system import LINUX, System
from lab.systems.windows import Windows

WINDOWS, ARM64 = Windows(), Arm64()

__all__ = ["ARM64", "LINUX", "WINDOWS", "System"]
