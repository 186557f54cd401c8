"""Choice of the torch build for a machine, for `barnraise torch` and for built environments."""

from __future__ import annotations

import platform
import shutil

import msgspec

_INDEX = "https://download.pytorch.org/whl"


class TorchChoice(msgspec.Struct, frozen=True):
    """Package index of a machine's torch (None: PyPI), and the reason."""

    possible: bool
    index: str | None
    why: str


def choose_torch(system: str, machine: str, *, nvidia: bool, amd: bool) -> TorchChoice:
    """Return the build for a machine, by the names that ``platform`` gives it."""
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
    """Return the build for this machine."""
    return choose_torch(
        platform.system(),
        platform.machine(),
        nvidia=shutil.which("nvidia-smi") is not None,
        amd=shutil.which("rocminfo") is not None,
    )
