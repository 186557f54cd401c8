"""Which build of torch fits a machine. `barnraise torch` says it, and environments are built by it."""

from __future__ import annotations

import platform
import shutil

import msgspec

_INDEX = "https://download.pytorch.org/whl"


class TorchChoice(msgspec.Struct, frozen=True):
    """Where a machine's torch comes from: an index, or None for PyPI's own; and why so."""

    possible: bool
    index: str | None
    why: str


def choose_torch(system: str, machine: str, *, nvidia: bool, amd: bool) -> TorchChoice:
    """The build for a machine, from the names that ``platform`` gives it."""
    arm = machine.lower() in {"arm64", "aarch64"}
    if system == "Darwin":
        if not arm:
            why = "torch has no wheels for Intel Macs in this range; such a Mac cannot train"
            return TorchChoice(False, None, why)
        return TorchChoice(True, None, "the Mac wheel has CPU and MPS")
    if nvidia and not (system == "Windows" and arm):
        return TorchChoice(
            True,
            f"{_INDEX}/cu130",
            "an NVIDIA driver is here; plain `pip install torch` is CPU-only on Windows. "
            "GPUs older than Turing (2018) need cu126 instead of cu130",
        )
    if system == "Linux" and amd:
        why = "an AMD driver is here; ROCm wheels exist for Linux only"
        return TorchChoice(True, f"{_INDEX}/rocm7.2", why)
    why = "no supported GPU driver was found; this wheel is small and CPU-only"
    return TorchChoice(True, f"{_INDEX}/cpu", why)


def choose_torch_here() -> TorchChoice:
    """The build for this machine, from the drivers' own tools."""
    return choose_torch(
        platform.system(),
        platform.machine(),
        nvidia=shutil.which("nvidia-smi") is not None,
        amd=shutil.which("rocminfo") is not None,
    )
