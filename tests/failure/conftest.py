"""Fixtures: one worker pool for all tests, from which each test takes its workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.failure.worker_pool import PATIENT_CLOCKS, Worker, WorkerPool

if sys.platform == "win32":
    collect_ignore_glob = ["test_*.py"]  # fork, SIGSTOP and SIGKILL do not exist there


@pytest.fixture(scope="package")
def worker_pool() -> Iterator[WorkerPool]:
    # a ring for every size: then most survivors are not the dead rank's neighbours
    made = WorkerPool({**PATIENT_CLOCKS, "BARNRAISE_COLLECTIVES_STRATEGY": "ring"})
    yield made
    made.close()


@pytest.fixture
def take(worker_pool: WorkerPool) -> Iterator[Callable[[int], list[Worker]]]:
    yield worker_pool.take
    worker_pool.release_all()


@pytest.fixture
def four(worker_pool: WorkerPool, take: Callable[[int], list[Worker]]) -> list[Worker]:
    """Four workers in one group."""
    workers = take(4)
    worker_pool.join(workers)
    return workers
