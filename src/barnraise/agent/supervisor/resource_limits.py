"""Resource limits of workers: priority, cores and memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from barnraise.agent.supervisor import linux
from barnraise.agent.supervisor.messages import WorkerLimits

_binds = sys.platform != "darwin"


def chosen_cpus(available: frozenset[int], limits: WorkerLimits) -> frozenset[int] | None:
    """Return the cores that workers may use, or None for all.

    The first cores are spared, because most interrupts are handled there.
    """
    count = len(available) - limits.spare_cpus
    if limits.cpus is not None:
        count = min(count, limits.cpus)
    count = max(1, count)
    return None if count >= len(available) else frozenset(sorted(available)[-count:])


def unsupported_limits(limits: WorkerLimits) -> list[str]:
    """Return sentences about limits that this system cannot enforce."""
    missing = []
    if limits.memory_bytes is not None and not _binds:
        missing.append("this system cannot limit the memory of a process: the memory limit is ignored")
    if (limits.cpus is not None or limits.spare_cpus) and not _binds:
        missing.append("this system cannot bind a process to cores: set OMP_NUM_THREADS instead")
    return missing


if sys.platform == "win32":

    def apply_to_process(pid: int, limits: WorkerLimits) -> None:
        """Set the limits that Windows lets another process set; the rest is set at creation."""
        import psutil

        process = psutil.Process(pid)
        cpus = chosen_cpus(frozenset(process.cpu_affinity()), limits)
        if cpus is not None:
            process.cpu_affinity(sorted(cpus))
        if limits.idle_io:
            process.ionice(psutil.IOPRIO_VERYLOW)

else:
    import resource

    def child_setup(limits: WorkerLimits) -> Callable[[], None]:
        """Return the function that a worker runs before it executes its program.

        It is safe only in a process with one thread.
        """
        supervisor = os.getpid()
        cpus = None
        if sys.platform == "linux":
            cpus = chosen_cpus(frozenset(os.sched_getaffinity(0)), limits)

        def prepare() -> None:
            if sys.platform == "linux":
                linux.die_with_parent(supervisor)
                if cpus is not None:
                    _try(lambda: os.sched_setaffinity(0, cpus))
                if limits.memory_bytes is not None:
                    memory_bytes = limits.memory_bytes
                    # Not the address space: CUDA reserves far more of it than it ever uses.
                    _try(lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes)))
            if limits.nice:
                _try(lambda: os.nice(limits.nice))

        return prepare

    def apply_to_process(pid: int, limits: WorkerLimits) -> None:
        """Set idle input and output priority, if the system has it."""
        if not limits.idle_io:
            return
        import psutil  # slow to import, and few runs need it

        process = psutil.Process(pid)
        if hasattr(process, "ionice"):
            process.ionice(psutil.IOPRIO_CLASS_IDLE)


def _try(act: Callable[[], object]) -> None:
    """Try to set a limit; a failure is no reason not to train."""
    try:
        act()
    except (OSError, ValueError):
        pass
