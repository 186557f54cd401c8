"""Processor time of a call, on a machine that others use as well."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """Give the least of several samples: a processor that is withheld may count as used."""
    took = []
    for _ in range(times):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)
