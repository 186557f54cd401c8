"""Hardware description of this machine in milliseconds, without torch or another process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import psutil

import barnraise
from barnraise.topology.devices import Device, Machine

_WORD = 128
_CPUINFO = Path("/proc/cpuinfo")
_BOARD = Path("/proc/device-tree/model")
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
_ARCHITECTURES = {"amd64": "x86_64", "aarch64": "arm64"}
# A version of torch that says which devices it was built for: 2.13.0+cpu, 2.13.0+cu130.
_BUILT_FOR_CPU = re.compile(r"\+cpu\b")

_nvidia_seen: tuple[Device, ...] | None = None


def describe_machine() -> Machine:
    """Describe this machine without measured speeds (see `with_speeds`)."""
    notes: list[str] = []
    memory = _memory_bytes(notes)
    cpu = _cpu_name()
    torch = _torch_version()
    machine = _architecture()
    devices = [Device("cpu", 0, cpu, memory)]
    nvidia = _nvidia_devices()
    devices += nvidia
    if sys.platform == "darwin" and machine == "arm64":
        # One memory for both, of which the system keeps a part.
        devices.append(Device("mps", 0, _word(f"{cpu} GPU"), memory))
    if nvidia and torch is not None and _BUILT_FOR_CPU.search(torch):
        notes.append(f"torch {torch} is built for the CPU only and cannot use {nvidia[0].name}")
    if "microsoft" in platform.release().lower():
        notes.append("this is WSL2: other machines may not reach it, and mDNS does not pass")
    return Machine(
        os=_SYSTEMS.get(sys.platform, sys.platform),
        os_version=_os_version(),
        arch=machine,
        cpu_name=cpu,
        cores=_cores(notes),
        memory_bytes=memory,
        python=platform.python_version(),
        torch=torch,
        barnraise=barnraise.__version__,
        devices=tuple(devices),
        notes=tuple(notes),
    )


def _torch_version() -> str | None:
    try:
        return _word(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _architecture() -> str:
    machine = platform.machine().lower()
    return _word(_ARCHITECTURES.get(machine, machine) or "unknown")


def _os_version() -> str:
    if sys.platform == "darwin":
        return _word(platform.mac_ver()[0])
    if sys.platform == "win32":
        version = sys.getwindowsversion()
        return f"{version.major}.{version.minor}.{version.build}"
    try:
        return _word(platform.freedesktop_os_release().get("PRETTY_NAME", platform.release()))
    except OSError:
        return _word(platform.release())


def _cpu_name() -> str:
    name: str | None = None
    if sys.platform == "darwin":
        name = _sysctl("machdep.cpu.brand_string")
    elif sys.platform == "win32":
        name = _registry_cpu_name()
    else:
        name = _cpuinfo_name(_read(_CPUINFO)) or _read(_BOARD).strip("\0 \n")
    return _word(" ".join((name or platform.processor() or _architecture()).split()))


def _cpuinfo_name(text: str) -> str | None:
    """Return the CPU name; x86 gives the model, many ARM boards the board or nothing."""
    for key in ("model name", "Model", "Hardware"):
        match = re.search(rf"^{key}\s*:\s*(\S.*)$", text, re.MULTILINE)
        if match is not None and not match[1].strip().isdigit():
            return match[1]
    return None


def _sysctl(name: str) -> str | None:
    try:
        library = ctypes.CDLL(None)
        size = ctypes.c_size_t(256)
        room = ctypes.create_string_buffer(size.value)
        if library.sysctlbyname(name.encode(), room, ctypes.byref(size), None, 0) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return room.value.decode("utf-8", "replace")


def _registry_cpu_name() -> str | None:
    with contextlib.suppress(ImportError, OSError):
        winreg: Any = importlib.import_module("winreg")
        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
    return None


def _cores(notes: list[str]) -> int:
    """Return the cores that this process may use.

    A container's share of time is a note, not a whole number.
    """
    logical = psutil.cpu_count(logical=True) or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota, _, period = _read(_CGROUP / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) and int(quota) < int(period) * allowed:
        notes.append(f"this container may use {int(quota) / int(period):g} CPUs of time")
    return int(min(physical, allowed))


def _memory_bytes(notes: list[str]) -> int:
    total = int(psutil.virtual_memory().total)
    limit = _read(_CGROUP / "memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        notes.append("this container may use only a part of the machine's memory")
        return int(limit)
    return total


def _nvidia_devices() -> list[Device]:
    """Return the NVIDIA devices, asked once: the first answer may take a second if the cards sleep."""
    global _nvidia_seen
    if _nvidia_seen is None:
        _nvidia_seen = tuple(_nvml_devices() or _driver_devices())
    return list(_nvidia_seen)


def _nvml_devices() -> list[Device]:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - it is optional, and raises its own errors where there is no driver
        return []
    devices = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
            devices.append(
                Device("cuda", index, _word(text), int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
            )
    except Exception:  # noqa: BLE001 - a card that fell off the bus must not hide the machine
        return devices
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()
    return devices


def _driver_devices() -> list[Device]:
    """Return the device names that Linux's driver lists without its library."""
    devices = []
    for index, file in enumerate(sorted(_NVIDIA.glob("*/information"))):
        match = re.search(r"^Model:\s*(\S.*)$", _read(file), re.MULTILINE)
        devices.append(Device("cuda", index, _word(match[1] if match else "NVIDIA GPU"), 0))
    return devices


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(64 * 1024).decode("utf-8", "replace")
    except OSError:
        return ""


def _word(text: str) -> str:
    return text.strip()[:_WORD]
