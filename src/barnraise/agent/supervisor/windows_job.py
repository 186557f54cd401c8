"""Job objects of Windows: all descendants of a process are killed when the job's handle closes."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol, cast

from barnraise.core.flow.termination import WINDOWS_KILL_CODE

_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
_KILL_ON_CLOSE = 0x2000  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
_PROCESS_MEMORY = 0x100  # JOB_OBJECT_LIMIT_PROCESS_MEMORY
CREATE_SUSPENDED = 0x4


class _BasicLimits(ctypes.Structure):
    _fields_ = (
        ("PerProcessUserTimeLimit", ctypes.c_int64),
        ("PerJobUserTimeLimit", ctypes.c_int64),
        ("LimitFlags", ctypes.c_uint32),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", ctypes.c_uint32),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", ctypes.c_uint32),
        ("SchedulingClass", ctypes.c_uint32),
    )


class _ExtendedLimits(ctypes.Structure):
    _fields_ = (
        ("BasicLimitInformation", _BasicLimits),
        ("IoInfo", ctypes.c_uint64 * 6),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    )


class Kernel(Protocol):
    """The functions of kernel32 that a job uses; each returns 0 on failure."""

    def CreateJobObjectW(self, security: None, name: None) -> int: ...
    def SetInformationJobObject(self, job: int, what: int, limits: object, size: int) -> int: ...
    def AssignProcessToJobObject(self, job: int, process: int) -> int: ...
    def TerminateJobObject(self, job: int, code: int) -> int: ...
    def GetCurrentProcess(self) -> int: ...
    def CloseHandle(self, handle: int) -> int: ...


class Job:
    """A group of processes that is killed with the job, or with the process that holds it."""

    def __init__(self, kernel: Kernel, memory_bytes: int | None = None) -> None:
        self._kernel = kernel
        self._handle = kernel.CreateJobObjectW(None, None)
        if not self._handle:
            raise OSError("Windows cannot create a job object")
        limits = _ExtendedLimits()
        limits.BasicLimitInformation.LimitFlags = _KILL_ON_CLOSE
        if memory_bytes is not None:
            limits.BasicLimitInformation.LimitFlags |= _PROCESS_MEMORY
            limits.ProcessMemoryLimit = memory_bytes
        if not kernel.SetInformationJobObject(
            self._handle, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)
        ):
            self.close()
            raise OSError("Windows refused the limits of a job object")

    def take(self, process: int) -> None:
        """Put a process, by its handle, and all its descendants into the job."""
        if not self._kernel.AssignProcessToJobObject(self._handle, process):
            raise OSError("Windows cannot put the process into its job object")

    def take_this_process(self) -> None:
        """Put the current process into the job."""
        self.take(self._kernel.GetCurrentProcess())

    def kill(self) -> None:
        """Kill all processes of the job."""
        self._kernel.TerminateJobObject(self._handle, WINDOWS_KILL_CODE)

    def close(self) -> None:
        """Close the handle, which kills all processes of the job."""
        if self._handle:
            self._kernel.CloseHandle(self._handle)
            self._handle = 0


def resume_process(process: int) -> None:
    """Let a process run that was created suspended."""
    ntdll: Any = getattr(ctypes, "WinDLL")("ntdll")  # noqa: B009  # only Windows has it
    ntdll.NtResumeProcess.argtypes = (ctypes.c_void_p,)
    if ntdll.NtResumeProcess(process) < 0:
        raise OSError("Windows cannot resume the process")


def kernel32() -> Kernel:
    """Return the real kernel32, with types that keep 64-bit handles whole."""
    kernel: Any = getattr(ctypes, "WinDLL")("kernel32")  # noqa: B009  # only Windows has it
    handle, number = ctypes.c_void_p, ctypes.c_uint32
    kernel.CreateJobObjectW.restype = handle
    kernel.CreateJobObjectW.argtypes = (handle, ctypes.c_wchar_p)
    kernel.SetInformationJobObject.argtypes = (handle, ctypes.c_int, handle, number)
    kernel.AssignProcessToJobObject.argtypes = (handle, handle)
    kernel.TerminateJobObject.argtypes = (handle, number)
    kernel.GetCurrentProcess.restype = handle
    kernel.CloseHandle.argtypes = (handle,)
    return cast(Kernel, kernel)
