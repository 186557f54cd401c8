"""How a worker is kept from taking the whole machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from barnraise.agent.supervisor import linux
from barnraise.agent.supervisor.messages import WorkerLimits

_binds = sys.platform != "darwin"


def chosen_cpus(available: frozenset[int], limits: WorkerLimits) -> frozenset[int] | None:
    """The cores that workers may use; None if all. The first are spared: interrupts mostly go there."""
    count = len(available) - limits.spare_cpus
    if limits.cpus is not None:
        count = min(count, limits.cpus)
    count = max(1, count)
    return None if count >= len(available) else frozenset(sorted(available)[-count:])


def unsupported_limits(limits: WorkerLimits) -> list[str]:
    """Sentences about limits that this system has no means for."""
    missing = []
    if limits.memory_bytes is not None and not _binds:
        missing.append("this system cannot limit the memory of a process: the memory limit is not kept")
    if (limits.cpus is not None or limits.spare_cpus) and not _binds:
        missing.append("this system cannot bind a process to cores: set OMP_NUM_THREADS instead")
    return missing


if sys.platform == "win32":

    def apply_to_process(pid: int, limits: WorkerLimits) -> None:
        """What Windows lets another process set (priority and memory are set when the worker is made)."""
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
        """What a worker does before it becomes its program. Only in a process with one thread."""
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
                    most = limits.memory_bytes
                    # Not the address space: CUDA reserves far more of it than it ever uses.
                    _try(lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)))
            if limits.nice:
                _try(lambda: os.nice(limits.nice))

        return prepare

    def apply_to_process(pid: int, limits: WorkerLimits) -> None:
        """Idle input and output, where the system knows it."""
        if not limits.idle_io:
            return
        import psutil  # takes longer to load than all the rest, and few runs need it

        process = psutil.Process(pid)
        if hasattr(process, "ionice"):
            process.ionice(psutil.IOPRIO_CLASS_IDLE)


def _try(act: Callable[[], object]) -> None:
    """A limit that cannot be set is no reason not to train."""
    try:
        act()
    except (OSError, ValueError):
        pass
